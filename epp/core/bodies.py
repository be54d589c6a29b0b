"""Request bodies while they are coming in: each bounded, and all of them together.

A body must be whole before the pick, so it is held until then. `Bodies` counts what is held over
all requests; a piece that would exceed the bound refuses its own request (429) and leaves the
others alone."""

from __future__ import annotations

from typing import Final

from epp.core.errors import DropReason, RequestDropped

PIECES_MAX: Final = 1_000
"""A list of more pieces costs more than their bytes: they are joined."""


class Bodies:
    """The account of all bodies that are held.

    Args:
        bytes_max: bound over all requests.
    """

    def __init__(self, bytes_max: int = 2 << 30) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0


class Body:
    """One request's body. `take` or `drop` gives its bytes back to the account."""

    __slots__ = ("_bodies", "_bytes_max", "_pieces", "size")

    def __init__(self, bodies: Bodies, bytes_max: int) -> None:
        self._bodies = bodies
        self._bytes_max = bytes_max
        self._pieces: list[bytes] = []
        self.size = 0
        """Bytes received, also of what was taken since."""

    def add(self, piece: bytes) -> None:
        """Hold one more piece.

        Raises: RequestDropped when this body, or all together, would be too large.
        """
        self.size += len(piece)
        if self.size > self._bytes_max:
            raise RequestDropped(DropReason.BODY_TOO_LARGE, f"more than {self._bytes_max} bytes")
        if self._bodies.held_bytes + len(piece) > self._bodies.bytes_max:
            raise RequestDropped(
                DropReason.SATURATED,
                f"the picker holds {self._bodies.held_bytes} bytes of unfinished request bodies",
            )
        if not piece:
            return
        self._bodies.held_bytes += len(piece)
        self._pieces.append(piece)
        if len(self._pieces) > PIECES_MAX:
            self._pieces = [b"".join(self._pieces)]

    def whole(self) -> bytes:
        """The body as received so far; it is still held."""
        if len(self._pieces) > 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0] if self._pieces else b""

    def take(self) -> bytes:
        """The body as received so far; it is no longer held."""
        whole = self.whole()
        self.drop()
        return whole

    def replace(self, body: bytes) -> None:
        """Hold this in place of what was received."""
        self._bodies.held_bytes += len(body) - sum(map(len, self._pieces))
        self._pieces = [body]

    def drop(self) -> None:
        """Hold nothing any more."""
        if self._pieces:
            self._bodies.held_bytes -= sum(map(len, self._pieces))
            self._pieces = []
