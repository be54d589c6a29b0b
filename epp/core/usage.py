"""Token usage and events of an answer, read as its bytes pass; nothing here can fail.

An event stream is cut into lines as the HTML standard says (CR, LF, CRLF, comments, a mark at the
beginning), across any chunking; only events that hold the text `"usage"` are decoded. Generated
text cannot bring that about, its quotes are escaped. Counts are merged field by field and the last
one stands: engines report running totals, so nothing is added up.

Any other answer is one JSON document. Its last `window_bytes` are kept. If that is all of it, it is
parsed as a whole; of a longer one, the last `"usage": {` is taken from which to the end the text,
with a `{` before it, is again one JSON object: only a key of the outermost object satisfies that.

What is malformed or too large is passed over. Cost: 1.5 us per event of 200 bytes that comes in a
chunk of its own, 5 us with usage in it.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from msgspec import Raw

from epp.core.model import Api, Usage
from epp.core.rawjson import EMPTY, first_byte, repaired
from epp.core.shapes import Counts, Envelope

EVENT_BYTES_MAX: Final = 1 << 20
"""A longer event is counted, but not decoded. An image or audio event can be larger."""
WINDOW_BYTES: Final = 1 << 18
"""End of a JSON answer that is kept per request in flight."""

_USAGE_BYTES_MAX: Final = 1 << 16
_REPAIRED_BYTES_MAX: Final = 1 << 14
"""A longer text that msgspec refuses is not read again by Python's parser, which can take 0.3 us
per byte."""
_TOKENS_MAX: Final = 1 << 40
_LINE_HEAD_BYTES: Final = 16
_CANDIDATES_MAX: Final = 8
_BOM: Final = b"\xef\xbb\xbf"
_MARK: Final = b'"usage"'
_KEY: Final = re.compile(rb'"usage"\s*:\s*\{')
_TERMINAL: Final = frozenset(
    (b'"response.completed"', b'"response.incomplete"', b'"response.failed"')
)


class UsageReader:
    """Reads one answer.

    Args:
        api: of the request; with `Api.OTHER` events are counted and nothing is decoded.
        event_stream: the answer's media type is `text/event-stream`.
        readable: the answer is not compressed; if it is, its bytes are passed over.
    """

    def __init__(self, api: Api, *, event_stream: bool, readable: bool = True) -> None:
        self.usage = Usage()
        self.events = 0
        """Events with data so far, without the final `[DONE]`."""
        self._stream = _EventStream() if event_stream and readable else None
        self._document = (
            _Document() if readable and not event_stream and api is not Api.OTHER else None
        )
        self._decodes = api is not Api.OTHER

    def feed(self, chunk: bytes) -> None:
        """The next bytes of the body, cut anywhere."""
        if self._stream is not None:
            self._take(self._stream.feed(chunk))
        elif self._document is not None:
            self._document.feed(chunk)

    def end(self) -> None:
        """The body is over, whether complete or not. A second call changes nothing."""
        if self._stream is not None:
            self._take(self._stream.feed(b"\n\n"))
            self._stream = None
        elif self._document is not None:
            self._merge(self._document.envelope())
            self._document = None

    def _take(self, events: list[bytes]) -> None:
        for data in events:
            if data == b"[DONE]":
                continue
            self.events += 1
            if self._decodes and _MARK in data:
                self._merge(_envelope(data))

    def _merge(self, envelope: Envelope | None) -> None:
        if envelope is None:
            return
        try:
            counts = _counts(_usage_object(envelope))
        except (msgspec.DecodeError, RecursionError):
            return
        usage = self.usage
        if counts.prompt_tokens is not None:
            usage.prompt_tokens = counts.prompt_tokens
        if counts.completion_tokens is not None:
            usage.completion_tokens = counts.completion_tokens
        if counts.cached_tokens is not None:
            usage.cached_tokens = counts.cached_tokens


class _EventStream:
    """Cuts a byte stream into events. What is held between chunks is at most one unfinished line
    and the data lines of one unfinished event, together `EVENT_BYTES_MAX`."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._oversize = False
        self._after_cr = False
        self._started = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data of the events that end within this chunk; `b""` for one that was too large."""
        if not chunk:
            return []
        if self._after_cr and chunk.startswith(b"\n"):
            self._after_cr = False
            return self.feed(chunk[1:])
        self._after_cr = chunk.endswith(b"\r")
        if self._rest:
            if b"\n" not in chunk and b"\r" not in chunk:
                self._hold(chunk)
                return []
            chunk = bytes(self._rest) + chunk
            self._rest.clear()
        lines = chunk.splitlines()
        if chunk[-1] not in b"\r\n":
            self._hold(lines.pop())
        return self._events(lines)

    def _events(self, lines: list[bytes]) -> list[bytes]:
        events = []
        for line in lines:
            if not self._started:
                self._started = True
                line = line.removeprefix(_BOM)
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
                self._data_bytes = 0
                self._oversize = False
            elif line.startswith(b"data:"):
                self._add(line[6:] if line.startswith(b"data: ") else line[5:])
            elif line == b"data":
                self._add(b"")
        return events

    def _add(self, value: bytes) -> None:
        self._data_bytes += len(value) + 1
        if self._oversize or self._data_bytes > EVENT_BYTES_MAX:
            self._oversize = True
            self._data = [b""]
        else:
            self._data.append(value)

    def _hold(self, piece: bytes) -> None:
        """Keep the beginning of a line; of one that is too long only what tells its field."""
        if len(self._rest) + len(piece) + self._data_bytes > EVENT_BYTES_MAX:
            self._oversize = True
        self._rest += piece[:_LINE_HEAD_BYTES] if self._oversize else piece
        if self._oversize:
            del self._rest[_LINE_HEAD_BYTES:]


class _Document:
    """The end of a JSON document: at least `WINDOW_BYTES` of it, at most twice as much."""

    def __init__(self) -> None:
        self._window = bytearray()
        self._is_cut = False

    def feed(self, chunk: bytes) -> None:
        if len(self._window) + len(chunk) > 2 * WINDOW_BYTES:
            self._is_cut = True
            chunk = chunk[-WINDOW_BYTES:]
            del self._window[: max(0, len(self._window) + len(chunk) - WINDOW_BYTES)]
        self._window += chunk

    def envelope(self) -> Envelope | None:
        """The outermost object, or of a longer document the part of it that holds the usage."""
        text = bytes(self._window)
        if not self._is_cut:
            return _envelope(text) if _MARK in text else None
        at = len(text)
        for _ in range(_CANDIDATES_MAX):
            at = text.rfind(_MARK, 0, at)
            if at < 0:
                return None
            if _KEY.match(text, at) and (found := _strict_envelope(b"{" + text[at:])):
                return found
        return None


_read_envelope: Final = msgspec.json.Decoder(Envelope).decode
_read_counts: Final = msgspec.json.Decoder(Counts).decode


def _usage_object(envelope: Envelope) -> Raw:
    """The object with the counts; `EMPTY` when there is none."""
    if first_byte(envelope.usage) == b"{":
        return envelope.usage
    inner = envelope.message
    if first_byte(envelope.response) == b"{" and bytes(envelope.type) in _TERMINAL:
        inner = envelope.response
    if first_byte(inner) != b"{":
        return EMPTY
    return _read_envelope(inner).usage


def _strict_envelope(data: bytes) -> Envelope | None:
    try:
        return _read_envelope(data)
    except (msgspec.DecodeError, RecursionError):
        return None


def _envelope(data: bytes) -> Envelope | None:
    """The object in `data`, also when only Python's own parser reads it (NaN)."""
    envelope = _strict_envelope(data)
    if envelope is None and len(data) <= _REPAIRED_BYTES_MAX and data.lstrip()[:1] == b"{":
        try:
            envelope = _strict_envelope(repaired(data))
        except (ValueError, RecursionError):
            return None
    return envelope


def _counts(usage: Raw) -> Usage:
    if first_byte(usage) != b"{" or len(usage) > _USAGE_BYTES_MAX:
        return Usage()
    counts = _read_counts(usage)
    return Usage(
        prompt_tokens=_first_count(counts.prompt_tokens, counts.input_tokens),
        completion_tokens=_first_count(counts.completion_tokens, counts.output_tokens),
        cached_tokens=_first_count(
            _cached(counts.prompt_tokens_details),
            _cached(counts.input_tokens_details),
            counts.cache_read_input_tokens,
        ),
    )


def _cached(details: Raw) -> Raw:
    return _read_counts(details).cached_tokens if first_byte(details) == b"{" else EMPTY


def _first_count(*candidates: Raw) -> int | None:
    """The first that is a count: a non-negative integer, as a number (`12`, `12.0`) or a string."""
    for raw in candidates:
        if raw is EMPTY:
            continue
        if len(raw) >= _LINE_HEAD_BYTES:
            continue
        digits = bytes(raw)
        if not digits.isdigit():
            digits = digits.strip(b'"').removesuffix(b".0")
        if digits.isdigit() and (count := int(digits)) <= _TOKENS_MAX:
            return count
    return None
