"""`python -m dstune`."""

from dstune.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
