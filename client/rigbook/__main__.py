"""`python -m rigbook`."""

from rigbook.entry import main

if __name__ == "__main__":
    raise SystemExit(main())
