"""Changes the model's name in a request's body, and puts the client's own name back in the answer.

Nothing but the name's bytes is changed, wherever it stands.

Request: the name is found by its text; that it is the body's model, and the only one, is then known
from reading what is before and what is behind it as objects of their own, which is one pass of
msgspec over the body. A body that names several models, or that only Python's parser reads, is read
by that. Cost (CPU, chat, 2 / 10 / 200 messages of 1 / 16 / 128 KiB in all): 3 / 12 / 65 us; without
a model 3 / 16 / 120 us; with NaN in it 24 / 100 / 1000 us.

Answer: each event, or the one document, goes through a `ModelScanner`. In an answer's events the
bytes up to the model's name are mostly the same, so those are remembered, and what begins with them
needs no second look. Cost: 2.4 us per event of 200 bytes that comes in a chunk of its own, 0.6 us
of an event without a model, 8 us of one that begins differently, 18 us of one that is cut in two;
half of that when compiled. A document takes 9 us, wherever its model comes early.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final

import msgspec

from epp.core.modelscan import MODEL, ModelScanner, Name
from epp.core.rawjson import EMPTY
from epp.core.shapes import Head

_NEAR_BYTES: Final = 512
"""A name is first looked for this near to the body's beginning, then from its end."""
_TRIED_MAX: Final = 8
"""Each try may parse the whole body."""
_PLACES_MAX: Final = 10_000
"""Looked at, of a body with very many."""
_WALKED_BYTES_MAX: Final = 4 << 20
_WALKED_VALUES_MAX: Final = 100_000
"""Bounds of a body that Python's parser is needed for: those of what it is asked to repair."""
_BOM: Final = b"\xef\xbb\xbf"

_opening: Final = re.compile(rb"[ \t\r\n]*\{[ \t\r\n]*(\}?)").match
_named: Final = re.compile(
    rb'"model"[ \t\r\n]*:[ \t\r\n]*("[^"\\]*+(?:\\.[^"\\]*+)*+"|null|true|false|[-+.eE0-9]+)'
).match
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
_DATA: Final = b"data:"
_CR: Final = 0x0D
_LF: Final = 0x0A
_KNOWN_BYTES_MAX: Final = 1 << 12
_LINE_BYTES: Final = 256

_white: Final = re.compile(r"[ \t\r\n]*").match
_read_value: Final = json.JSONDecoder().raw_decode
_read_head: Final = msgspec.json.Decoder(Head).decode


def renamed(body: bytes, model: str) -> bytes | None:
    """The same body for another model.

    Every value of a `model` key of the outermost object is replaced, of whatever type, so that a
    reader that takes the first one and a reader that takes the last one both see the new name. A
    body without the key gets it as its first one.

    Args:
        body: not compressed; one that the request parser has read.
        model: any text; written in ASCII.
    Returns: `None` when it cannot be changed: not a JSON object in UTF-8 (a mark is allowed), or
        too large for the slow way that an unusual body needs.
    """
    if body.startswith(_BOM):
        changed = renamed(body[len(_BOM) :], model)
        return None if changed is None else _BOM + changed
    name = json.dumps(model).encode()
    for at in _candidates(body):
        if (span := _only_model(body, at)) is not None:
            view = memoryview(body)
            return b"".join((view[: span[0]], name, view[span[1] :]))
    if _is_nameless(body):
        return _with_name(body, name)
    return _renamed_slowly(body, name)


def _candidates(body: bytes) -> Iterator[int]:
    """Where `"model"` stands, likely places first, some of them at most.

    Of many, as schemas of tools have them, those with the outermost one's value.
    """
    near = body.find(MODEL, 0, _NEAR_BYTES)
    if near >= 0:
        yield near
    value = _value_of(body) if body.count(MODEL) > _TRIED_MAX else None
    at = len(body)
    tried = 0
    for _ in range(_PLACES_MAX):
        at = body.rfind(MODEL, 0, at)
        if at < 0 or tried >= _TRIED_MAX:
            return
        if at == near:
            continue
        if value is not None:
            match = _named(body, at)
            if match is None or match[1] != value:
                continue
        tried += 1
        yield at


def _value_of(body: bytes) -> bytes | None:
    """The outermost model as it is written; `None` when msgspec reads none."""
    try:
        model = _read_head(body).model
    except (msgspec.DecodeError, RecursionError):
        return None
    return None if model is EMPTY else bytes(model)


def _only_model(body: bytes, at: int) -> tuple[int, int] | None:
    """The value's place, if at `at` stands the one model that the body names; else, and when it
    would take a closer look to tell, `None`."""
    match = _named(body, at)
    if match is None:
        return None
    start, end = match.span(1)
    view = memoryview(body)
    before = b"".join((view[:at], b'"":', view[start:end], b"}"))
    if _is_nameless(before) and _is_nameless(b"".join((b'{"":0', view[end:]))):
        return start, end
    return None


def _is_nameless(text: bytes) -> bool:
    """It is a JSON object, also for msgspec, and has no key `model`."""
    try:
        return _read_head(text).model is EMPTY
    except (msgspec.DecodeError, RecursionError):
        return False


def _with_name(body: bytes, name: bytes) -> bytes | None:
    match = _opening(body)
    if match is None:
        return None
    at = body.index(b"{") + 1
    comma = b"" if match[1] else b","
    return b"".join((body[:at], MODEL, b":", name, comma, body[at:]))


def _renamed_slowly(body: bytes, name: bytes) -> bytes | None:
    """The same by Python's parser, which is the engine's."""
    values = sum(map(body.count, (b",", b"[", b"{")))
    if len(body) > _WALKED_BYTES_MAX or values > _WALKED_VALUES_MAX:
        return None
    try:
        text = body.decode("utf-8", "surrogatepass")
        spans = list(_models(text))
    except (ValueError, RecursionError):
        return None
    if not spans:
        return _with_name(body, name)
    pieces: list[str] = []
    copied = 0
    for start, end in spans:
        pieces += text[copied:start], name.decode()
        copied = end
    return "".join((*pieces, text[copied:])).encode("utf-8", "surrogatepass")


def _models(text: str) -> Iterator[tuple[int, int]]:
    """Where the values of the outermost object's `model` keys stand, in characters.

    Raises: ValueError when the text is no JSON object, RecursionError.
    """
    at = _after(text, 0, "{")
    more = text[at : at + 1] != "}"
    while more:
        key, at = _read_value(text, at)
        if not isinstance(key, str):
            raise ValueError("a key is no string")
        start = _after(text, at, ":")
        _, at = _read_value(text, start)
        if key == "model":
            yield start, at
        at = _skipped(text, at)
        more = text[at : at + 1] == ","
        if more:
            at = _skipped(text, at + 1)
    if _after(text, at, "}") != len(text):
        raise ValueError("there is more behind the object")


def _after(text: str, at: int, sign: str) -> int:
    """Where the next thing behind a sign stands.

    Raises: ValueError when another one stands there.
    """
    at = _skipped(text, at)
    if text[at : at + 1] != sign:
        raise ValueError(f"`{sign}` is missing")
    return _skipped(text, at + 1)


def _skipped(text: str, at: int) -> int:
    match = _white(text, at)
    return at if match is None else match.end()


class ModelRestorer:
    """Puts the client's name of the model back into an answer, as its bytes go by.

    In a JSON document the first `model` of the outermost object counts, in the data of each
    server-sent event every one of the outermost object and of the objects `response` and `message`
    in it. Only a value that is the upstream's name, in any spelling, is replaced. What is kept back
    until the next piece comes is a key or name that is cut, or the first bytes of a line: fewer
    than 20 bytes or six times the name's length.

    Args:
        upstream: the name that the engine knows.
        client: the name that the client used.
        event_stream: the answer's media type is `text/event-stream`; else it is taken for JSON.
    """

    def __init__(self, upstream: str, client: str, *, event_stream: bool) -> None:
        name = json.dumps(client).encode()
        scanner = ModelScanner(Name(upstream), inner=event_stream)
        self._body: _Events | _Document = (
            _Events(scanner, name) if event_stream else _Document(scanner, name)
        )
        self._is_over = upstream == client
        self.changes_length = len(name) != len(upstream) + 2 or not _one_spelling(upstream)
        """The answer may become longer or shorter, its `content-length` wrong."""

    def feed(self, chunk: bytes, end: bool) -> bytes:
        """The next piece, cut anywhere; returns what is decided of the answer so far.

        Args:
            end: nothing comes after it, so nothing is kept back.
        """
        if self._is_over:
            return chunk
        body = self._body
        made = body.feed(chunk)
        if end or body.is_over:
            self._is_over = True
            return made + body.held if body.held else made
        return made


def _one_spelling(name: str) -> bool:
    """Engines write the name in one way only: nothing of it is ever escaped."""
    return name.isascii() and name.isprintable() and not set(name) & set('"\\/')


class _Document:
    """An answer that is one JSON text."""

    def __init__(self, scanner: ModelScanner, name: bytes) -> None:
        self._scanner = scanner
        self._name = name
        self.held = b""
        """The end of what came, undecided."""
        self.is_over = False
        """All that comes is sent on as it is."""

    def feed(self, chunk: bytes) -> bytes:
        data = self.held + chunk if self.held else chunk
        found: list[tuple[int, int]] = []
        decided = self._scanner.scan(data, 0, len(data), found)
        self.held = data[decided:]
        self.is_over = self._scanner.is_over
        return _spliced(data, decided, found, self._name)


class _Events:
    """An answer of server-sent events, cut into lines as the HTML standard says."""

    def __init__(self, scanner: ModelScanner, name: bytes) -> None:
        self._scanner = scanner
        self._name = name
        self.held = b""
        """The end of what came, undecided."""
        self.is_over = False
        self._begun = False
        """A mark at the stream's beginning is past."""
        self._in_line = False
        self._is_data = False
        """The line that was begun is one of data."""
        self._after_cr = False
        self._known = b""
        """A line of data of an earlier event, from its start to the end of the name in it."""
        self._known_name_at = 0

    def feed(self, chunk: bytes) -> bytes:
        if self._holds_no_name(chunk):
            return chunk
        data = self.held + chunk if self.held else chunk
        found: list[tuple[int, int]] = []
        at = 0
        while at < len(data):
            past = self._read_line(data, at, found)
            if past == at:
                break
            at = past
        self.held = data[at:]
        return _spliced(data, at, found, self._name)

    def _holds_no_name(self, chunk: bytes) -> bool:
        """It is made of whole events without a model: what the loop would find out step by step."""
        if self._in_line or self.held or not self._scanner.fresh:
            return False
        if MODEL in chunk or not chunk.endswith((b"\n\n", b"\r\n\r\n")):
            return False
        self._begun = True
        return True

    def _read_line(self, data: bytes, at: int, found: list[tuple[int, int]]) -> int:
        """Read a line, what there is of it, or a whole event; returns what is behind that, or `at`
        when nothing can be decided."""
        if self._after_cr:
            self._after_cr = False
            if data[at] == _LF:
                return at + 1
        if self._in_line:
            return self._read_rest(data, at, found)
        if not self._begun:
            mark = data[at : at + len(_BOM)]
            if _BOM.startswith(mark):
                self._begun = mark == _BOM
                return at + len(_BOM) if self._begun else at
            self._begun = True
        self._is_data = data.startswith(_DATA, at)
        if not self._is_data:
            if _DATA.startswith(data[at : at + len(_DATA)]):
                return at
            if data[at] in (_CR, _LF):
                self._scanner.restart()
        elif self._scanner.fresh:
            return self._read_event(data, at, found)
        self._in_line = True
        return self._read_rest(data, at + len(_DATA) if self._is_data else at, found)

    def _read_event(self, data: bytes, at: int, found: list[tuple[int, int]]) -> int:
        """Read the first line of an event's data, at a glance where it is the only one, whole, and
        has no model or begins as an earlier one."""
        stop = _line_end(data, at)
        before = len(found)
        past = _past_event(data, stop)
        if past:
            model_at = data.find(MODEL, at, stop)
            if model_at < 0:
                return past
            known_end = at + len(self._known)
            # Another model behind a known beginning may count too, so that needs a look.
            if data.startswith(self._known, at) and data.find(MODEL, known_end, stop) < 0:
                found.append((at + self._known_name_at, known_end))
                return past
            last_at = data.rfind(MODEL, model_at, stop)
            self._scanner.scan(data, at + len(_DATA), stop, found, last_at=last_at)
            self._scanner.restart()
        else:
            self._in_line = True
            past = self._read_rest(data, at + len(_DATA), found)
        if len(found) > before and found[before][1] - at <= _KNOWN_BYTES_MAX:
            start, end = found[before]
            self._known = data[at:end]
            self._known_name_at = start - at
        return past

    def _read_rest(self, data: bytes, at: int, found: list[tuple[int, int]]) -> int:
        """Read on in a line; returns where the next one begins, or the undecided."""
        line_end = _line_end(data, at)
        stop = len(data) if line_end < 0 else line_end
        if self._is_data:
            past = self._scanner.scan(data, at, stop, found)
            if line_end < 0:
                return past
            self._scanner.end_line(past < stop)
        elif line_end < 0:
            return stop
        self._in_line = False
        self._after_cr = data[stop] == _CR
        return stop + 1


def _line_end(data: bytes, at: int) -> int:
    """Where the line ends that `at` is in; -1 when it is not there yet. Takes as long as the line
    is, though it looks for two signs of which one may be missing."""
    window_bytes = _LINE_BYTES
    while at < len(data):
        stop = at + window_bytes
        line_feed = data.find(b"\n", at, stop)
        carriage_return = data.find(b"\r", at, line_feed if line_feed >= 0 else stop)
        if carriage_return >= 0:
            return carriage_return
        if line_feed >= 0:
            return line_feed
        at = stop
        window_bytes *= 4
    return -1


def _past_event(data: bytes, stop: int) -> int:
    """What is behind a line that ends at `stop` and the blank one after it; 0 when these are not
    there yet."""
    if stop < 0 or not data.startswith(_EVENT_ENDS, stop):
        return 0
    return stop + (4 if data[stop : stop + 2] == b"\r\n" else 2)


def _spliced(data: bytes, stop: int, spans: list[tuple[int, int]], name: bytes) -> bytes:
    """`data[:stop]` with the name in place of each span."""
    if not spans:
        return data if stop == len(data) else data[:stop]
    pieces: list[bytes] = []
    copied = 0
    for start, end in spans:
        pieces += data[copied:start], name
        copied = end
    pieces.append(data[copied:stop])
    return b"".join(pieces)
