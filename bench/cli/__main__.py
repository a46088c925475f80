"""`python -m bench.cli` is `moebench`."""

from bench.cli import main

if __name__ == "__main__":
    main()
