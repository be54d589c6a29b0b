"""Files of lines, read one at a time: bounded, compressed or not, with the place in every error."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from bench.sim.plan import WorkloadError
from epp.core.rawjson import explain, repaired

LINE_BYTES_MAX = 16 << 20
"""A longer line is refused: it holds up memory, and the product routes such a body by load."""
_REPAIRED_BYTES_MAX = 4 << 20

T = TypeVar("T")


class LineError(WorkloadError):
    """A line that cannot be used."""

    def __init__(self, path: Path, number: int, what: str) -> None:
        super().__init__(f"{path}, line {number} {what}")
        self.number = number
        self.what = what
        """Wrong with it; begins with a verb."""


def read_lines(
    path: Path, on_long: Callable[[LineError], None] | None = None
) -> Iterator[tuple[int, bytes]]:
    """Line numbers from 1 and lines without their ends; blank ones are left out.

    Args:
        path: a name that ends in `.gz` is decompressed on the way.
        on_long: told of a line that is too long, which is then left out; `None`: it is raised.

    Raises:
        WorkloadError: the file cannot be read, or a line is too long.
    """
    number = 0
    try:
        with _opened(path) as file:
            while line := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                if len(line) > LINE_BYTES_MAX:
                    error = at(path, number, f"is longer than {LINE_BYTES_MAX} bytes")
                    if on_long is None:
                        raise error
                    on_long(error)
                    _skip_line(file, line)
                    continue
                if text := line.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").strip():
                    yield number, text
    except (OSError, EOFError, zlib.error) as failure:
        reason = (failure.strerror if isinstance(failure, OSError) else None) or failure
        raise at(path, number + 1, f"cannot be read: {reason}") from failure


def _skip_line(file: IO[bytes], part: bytes) -> None:
    while part and not part.endswith(b"\n"):
        part = file.readline(LINE_BYTES_MAX)


def _opened(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]  # a GzipFile reads like one
    return path.open("rb")


def at(path: Path, number: int, what: str) -> LineError:
    """An error that names the place."""
    return LineError(path, number, what)


def decode(decoder: msgspec.json.Decoder[T], path: Path, number: int, line: bytes) -> T:
    """Read a line of JSON, also one that only Python's own parser takes (lone surrogates, NaN).

    Raises:
        LineError: it is no JSON, or not of the decoder's type; none of its text is told.
    """
    try:
        try:
            return decoder.decode(line)
        except msgspec.ValidationError:
            raise
        except ValueError:
            if len(line) > _REPAIRED_BYTES_MAX:
                raise
        return decoder.decode(repaired(line))
    except RecursionError:
        raise at(path, number, "is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise at(path, number, f"is not of the expected form: {error}") from None
    except ValueError as error:
        raise at(path, number, f"is not valid JSON: {explain(error)}") from None
