#!/bin/sh
# Makes .venv with the base install (`setup.sh base`) or adds training and development to it (`setup.sh train`).
# The Makefile calls it and depends on the stamps it leaves: .venv/.base names the interpreter, .venv/.train the torch.
#   PYTHON  interpreter to use; by default the first of python3.13 .. python3.11, python3 that runs and is in range
#   TORCH   a version, a requirement or the path of a wheel; `system` takes the torch that PYTHON already has;
#           by default what .venv was last given, or else $default_torch
set -eu
cd "$(dirname "$0")/.."
default_torch=2.13.0
in_range='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
python=${PYTHON:-}
torch=${TORCH:-}

die() {
    echo "$1" >&2
    exit 2
}

pip_install() {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$@"
}

# Of an interpreter: the folder its torch lies in.
torch_home() {
    "$1" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null
}

usable() {
    "$1" -c "$in_range" 2>/dev/null || return 1
    [ "$torch" != system ] || torch_home "$1" >/dev/null
}

choose_python() {
    if [ -n "$python" ]; then
        "$python" -c '' 2>/dev/null || die "PYTHON: '$python' is not valid; allowed: an interpreter that runs"
        "$python" -c "$in_range" || die "PYTHON: '$python' is $("$python" -V 2>&1); allowed: Python 3.11 to 3.13"
        return
    fi
    for candidate in python3.13 python3.12 python3.11 python3; do
        # A name may exist and not run (a shim of a version manager), so it is tried.
        if usable "$candidate"; then
            python=$candidate
            return
        fi
    done
    [ "$torch" != system ] || die "TORCH: 'system' is not valid; allowed: with a Python 3.11 to 3.13 that has torch (set PYTHON)"
    die "PYTHON: none was found; allowed: Python 3.11 to 3.13 (install one, or set PYTHON to its path)"
}

version_of() {
    "$1" -c 'import sys; print(sys.version_info[:2])' 2>/dev/null || echo none
}

setup_base() {
    # An existing .venv stays, unless it no longer runs or PYTHON asks for another version.
    if [ -z "$python" ] && .venv/bin/python -c "$in_range" 2>/dev/null; then
        python=$(cat .venv/.base 2>/dev/null || echo .venv/bin/python)
    else
        choose_python
        if [ "$(version_of .venv/bin/python)" != "$(version_of "$python")" ]; then
            "$python" -m venv --clear .venv ||
                die "PYTHON: '$python' cannot make a virtual environment; allowed: one with venv (Debian: python3-venv)"
        fi
    fi
    echo "installing the base packages into .venv ($(.venv/bin/python -V))"
    # The build runs in .venv, with the pinned setuptools, not in an environment of pip's own.
    pip_install setuptools
    pip_install --no-build-isolation --editable .
    echo "$python" >.venv/.base
}

setup_train() {
    [ -n "$torch" ] || torch=$(cat .venv/.train 2>/dev/null || echo "$default_torch")
    shared=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/_system_torch.pth
    # A failure below leaves no stamp, so that the next call starts over.
    rm -f "$shared" .venv/.train
    case $torch in
        system)
            [ -n "$python" ] || python=$(cat .venv/.base)
            home=$(torch_home "$python") || die "TORCH: 'system' is not valid; allowed: with a PYTHON that has torch, and $python has none"
            [ "$(version_of "$python")" = "$(version_of .venv/bin/python)" ] ||
                die "PYTHON: '$python' is $("$python" -V); allowed: the version of .venv, $(.venv/bin/python -V) (or remove .venv)"
            .venv/bin/python -m pip uninstall --quiet --yes torch triton 2>/dev/null
            # Like --system-site-packages, but right also where PYTHON is itself in an environment.
            echo "$home" >"$shared"
            echo "installing the training and development packages into .venv, with the torch of $python"
            pip_install --no-build-isolation --editable '.[train,dev]'
            ;;
        [0-9]*)
            echo "installing torch $torch and the training and development packages into .venv"
            pip_install --no-build-isolation --editable '.[train,dev]' "torch==$torch"
            ;;
        *)
            echo "installing $torch and the training and development packages into .venv"
            pip_install --no-build-isolation --editable '.[train,dev]' "$torch"
            ;;
    esac
    .venv/bin/python -c 'import torch' || die "TORCH: '$torch' is installed but cannot be imported; allowed: a torch that runs here"
    echo "$torch" >.venv/.train
}

case ${1:-} in
    base) setup_base ;;
    train) setup_train ;;
    *) die "usage: tools/setup.sh base|train" ;;
esac
