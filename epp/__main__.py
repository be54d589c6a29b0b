"""Lets `python -m epp` do what `epp` does."""

import sys

from epp.cli import main

if __name__ == "__main__":
    sys.exit(main())
