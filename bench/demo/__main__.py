"""`python -m bench.demo`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from bench.demo.options import parse_options
from bench.demo.run import Demo, colour_wanted, interruptible
from bench.stack import NotReadyError

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    options = parse_options(argv)
    try:
        with interruptible():
            return Demo(options, colour=colour_wanted(dict(os.environ))).main()
    except KeyboardInterrupt:
        print("\ninterrupted; everything is stopped", file=sys.stderr)
        return INTERRUPTED
    except (NotReadyError, OSError) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
