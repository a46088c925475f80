#!/bin/sh
# Collects what `make setup-train` installs as wheels, for a machine that reaches no package index.
#   wheelhouse.sh VERSION [PLATFORM]   e.g. 3.12 manylinux_2_28_x86_64, the default platform
#   TORCH  a version or a requirement, as for tools/setup.sh; `none` collects the base install only
set -eu
cd "$(dirname "$0")/.."
version=${1:-}
platform=${2:-manylinux_2_28_x86_64}
torch=${TORCH:-2.13.0}
case $version in
    3.11 | 3.12 | 3.13) ;;
    *)
        echo "PYTHON: '$version' is not valid; allowed: 3.11, 3.12 or 3.13, the Python of the machine that installs" >&2
        exit 2
        ;;
esac
out=wheelhouse/cp$(echo "$version" | tr -d .)
extras=train,dev
case $torch in
    none) extras='' torch='' ;;
    [0-9]*) torch="torch==$torch" ;;
esac
mkdir -p "$out"
# Older platform tags are taken too: a wheel for an older C library runs on a newer one.
python3 -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$out" .
python3 -m pip download --quiet --disable-pip-version-check --constraint constraints.txt --dest "$out" \
    --only-binary :all: --python-version "$version" --implementation cp \
    --platform "$platform" --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --find-links "$out" "disagmoe-bench${extras:+[$extras]}" $torch 'setuptools>=77,<82'
echo "wrote $(ls "$out" | wc -l) wheels to $out; install with: pip install --no-index --find-links $out" \
    "'disagmoe-bench${extras:+[$extras]}'"
