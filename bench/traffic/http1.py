"""As much HTTP/1.1 as both ends of a bench need: cut a connection's bytes into messages.

Bodies are counted and dropped. What the other end sends is Envoy's or our own, so framing that
neither uses (no length at all, trailers) is an error of the bench.
"""

from __future__ import annotations

from typing import NamedTuple

HEAD_BYTES_MAX = 65_536


class Message(NamedTuple):
    """A request or response whose body has ended."""

    head: bytes
    """First line and headers, without the empty line."""
    body_bytes: int

    def header(self, name: bytes) -> bytes | None:
        """Value of a header; `name` is lower-case."""
        return header_of(self.head, name)

    @property
    def status(self) -> int:
        """Of a response."""
        return int(self.head[9:12])


def header_of(head: bytes, name: bytes) -> bytes | None:
    """Value of a header in a message's head; `None` when it is not there."""
    at = head.lower().find(b"\r\n" + name + b":")
    if at < 0:
        return None
    return head[at + len(name) + 3 :].partition(b"\r\n")[0].strip()


class Reader:
    """Reads one direction of one keep-alive connection."""

    def __init__(self) -> None:
        self._data = b""
        self._head: bytes | None = None
        self._chunked = False
        self._skip_bytes = 0
        self._body_bytes = 0

    def feed(self, data: bytes) -> list[Message]:
        """The messages that end in `data`, cut anywhere.

        Raises: ValueError when it is no HTTP/1.1 we read.
        """
        data = self._data + data if self._data else data
        done = []
        at = 0
        while True:
            skipped = min(self._skip_bytes, len(data) - at)
            at += skipped
            self._skip_bytes -= skipped
            if self._skip_bytes:
                break
            if self._head is not None and not self._chunked:
                done.append(Message(self._head, self._body_bytes))
                self._head = None
            end = data.find(b"\r\n" if self._chunked else b"\r\n\r\n", at)
            if end < 0:
                break
            if self._chunked:
                self._start_chunk(int(data[at:end], 16))
                at = end + 2
            else:
                self._start_message(data[at:end])
                at = end + 4
        self._data = data[at:]
        if len(self._data) > HEAD_BYTES_MAX:
            raise ValueError("no end of the HTTP head")
        return done

    def _start_message(self, head: bytes) -> None:
        self._head = head
        length = header_of(head, b"content-length")
        self._chunked = length is None and header_of(head, b"transfer-encoding") == b"chunked"
        self._body_bytes = self._skip_bytes = int(length or 0)

    def _start_chunk(self, size: int) -> None:
        self._chunked = size > 0
        self._body_bytes += size
        self._skip_bytes = size + 2  # with the line end behind it, or behind the last chunk
