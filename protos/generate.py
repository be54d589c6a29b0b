"""Generate `epp/wire/pb` from the `.proto` files beside this script; `--check` only compares.

The version of the compiler, which it writes into each file, does not count as a difference.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

PROTOS = Path(__file__).resolve().parent
PB = PROTOS.parent / "epp" / "wire" / "pb"

_VERSION = re.compile(r"# Protobuf Python Version: .*|Domain\.PUBLIC,\s*\d+,\s*\d+,\s*\d+,\s*'.*',")


def generate(target: Path) -> list[Path]:
    """Compile every `.proto` here into `target`: the files written, in order of name.

    Raises: SystemExit when grpcio-tools is missing or refuses a file.
    """
    try:
        from grpc_tools import protoc
    except ImportError as error:
        raise SystemExit(f"{error}; install the dev extra: pip install -e '.[dev]'") from error
    sources = sorted(PROTOS.glob("*.proto"))
    well_known = Path(protoc.__file__).parent / "_proto"
    includes = [f"-I{PROTOS}", f"-I{well_known}"]
    if protoc.main(["protoc", *includes, f"--python_out={target}", *map(str, sources)]):
        raise SystemExit("protoc refused a file; its message is above")
    return [target / f"{source.stem}_pb2.py" for source in sources]


def stale() -> list[str]:
    """Names of the generated files that are missing, left over or other than they should be."""
    with tempfile.TemporaryDirectory() as scratch:
        wanted = {path.name: path.read_text() for path in generate(Path(scratch))}
    present = {path.name: path.read_text() for path in PB.glob("*_pb2.py")}
    return sorted(
        name
        for name in wanted.keys() | present.keys()
        if name not in wanted
        or name not in present
        or _VERSION.sub("", wanted[name]) != _VERSION.sub("", present[name])
    )


def main() -> int:
    """Run from the command line; 0 when all is up to date or was written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if stale")
    if not parser.parse_args().check:
        PB.mkdir(exist_ok=True)
        for path in PB.glob("*_pb2.py"):
            path.unlink()
        generate(PB)
        return 0
    names = stale()
    if names:
        sys.stderr.write(f"stale: {', '.join(names)}; run `python protos/generate.py`\n")
    return 1 if names else 0


if __name__ == "__main__":
    raise SystemExit(main())
