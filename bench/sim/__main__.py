"""`python -m bench.sim`: run a grid of cells, or replay a log, and write what came of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.sim.command import CommandError, run_command
from bench.sim.options import parse_options
from bench.sim.plan import WorkloadError
from epp.core.errors import ConfigError

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 when runs failed, 2 for wrong input, 130 when interrupted."""
    options = parse_options(sys.argv[1:] if argv is None else argv)
    try:
        return run_command(options)
    except KeyboardInterrupt:
        print("\ninterrupted; --resume goes on from here", file=sys.stderr)
        return INTERRUPTED
    except (CommandError, WorkloadError, ConfigError, OSError) as error:
        print(f"bench.sim: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
