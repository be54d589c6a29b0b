"""Finds where a JSON text says its model, in whatever pieces the text comes.

Looked for are strings that are the value of a key `model` of the outermost object, or of an object
that is the value of its key `response` or `message`. The scanner follows strings and brackets, so
that text which only looks like such a key is never taken for one, and builds nothing. What is
undecided at the end of a piece is one string at most: a key that may still become a known one, or a
value that may still become the wanted one. Text that is no JSON object is left alone as soon as
that shows.

Keys are known in their plain spelling only, which is how engines write them. It runs in step with
the bytes, each looked at once.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Final

MODEL: Final = b'"model"'

_INNER: Final = (b'"response"', b'"message"')

_KEY_BYTES_MAX: Final = 16
"""No key that is looked for is longer, quotes included."""

_DEAD: Final = 0
_START: Final = 1
_KEY: Final = 2
_COLON: Final = 3
_VALUE: Final = 4
_REST: Final = 5
_NESTED: Final = 6

_QUOTE: Final = 0x22
_COMMA: Final = 0x2C
_COLON_SIGN: Final = 0x3A
_BACKSLASH: Final = 0x5C
_OPEN: Final = b"{["
_OPEN_OBJECT: Final = 0x7B
_CLOSE_OBJECT: Final = 0x7D

_blank: Final = re.compile(rb"[ \t\r\n]*+").match
_marks: Final = re.compile(rb"[\xef\xbb\xbf \t\r\n]*+").match
_bracket: Final = re.compile(rb'["{}\[\]]').search
_scalar: Final = re.compile(rb'[^,"{}\[\]]*+').match
_dull: Final = re.compile(
    rb"""(?:[ \t\r\n]*+"(?!model")[^"\\]{0,64}+"[ \t\r\n]*+:[ \t\r\n]*+"""
    rb"""(?:"[^"\\]{0,64}+"|[-+.\w]{1,64}+)[ \t\r\n]*+,)*+"""
).match
"""Short members that nobody looks for, as many as there are: the rest is followed step by step."""


class Name:
    """A model's name as it stands in JSON.

    Args:
        name: as it is meant, unescaped.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._plain = json.dumps(name, ensure_ascii=False).encode("utf-8", "surrogatepass")
        self.bytes_max = 3 * len(name.encode("utf-16-le", "surrogatepass")) + 2
        """Of its longest spelling: all of it escaped."""

    def is_spelled(self, token: bytes) -> bool:
        """Whether this JSON string means the name."""
        if token == self._plain:
            return True
        if b"\\" not in token:
            return False
        try:
            return bool(json.loads(token) == self._name)
        except ValueError:
            return False


class ModelScanner:
    """Scans one JSON text after another.

    Args:
        wanted: only values that are this name are reported.
        inner: look also into the objects that are the values of `response` and `message`, and at
            every `model`; else at the first one of the outermost object, and at nothing behind it.
    """

    def __init__(self, wanted: Name, *, inner: bool) -> None:
        self._wanted = wanted
        self._within = _INNER if inner else ()
        self.restart()

    def restart(self) -> None:
        """Whatever comes next is the beginning of another text."""
        self.fresh = True
        """Nothing of the text was seen."""
        self._state = _START
        self._inner = False
        """In the object of one of `_INNER`; else in the outermost one."""
        self._key = b""
        self._depth = 0
        """Of brackets below the object whose keys are looked at."""
        self._in_text = False
        """In a string that is passed over."""
        self._escaped = False
        """The next byte of that string is escaped."""

    @property
    def is_over(self) -> bool:
        """Nothing will be found in what comes, until `restart`."""
        return self._state == _DEAD

    def stop(self) -> None:
        """Find nothing in what comes, until `restart`."""
        self._state = _DEAD
        self._in_text = False

    def end_line(self, undecided: bool) -> None:
        """A line ends here; a string that does not end with it is no JSON."""
        if undecided or self._in_text:
            self.stop()

    def scan(
        self,
        data: bytes,
        at: int,
        stop: int,
        found: list[tuple[int, int]],
        *,
        last_at: int = sys.maxsize,
    ) -> int:
        """Read `data[at:stop]`, which follows on what was read before.

        Args:
            found: gets start and end of each value, quotes included.
            last_at: where the last text `MODEL` begins. What is behind it is not read to the end,
                so `restart` has to follow.
        Returns: where the undecided begins, to be given again with more behind it; else `stop`.
        """
        self.fresh = False
        while at < stop:
            if self._in_text:
                at = self._pass_text(data, at, stop)
            elif self._state == _NESTED:
                at = self._pass_nested(data, at, stop)
            elif self._state == _DEAD or (at > last_at and not self._awaits_model()):
                return stop
            else:
                next_at = self._step(data, at, stop, found)
                if next_at < 0:
                    return ~next_at
                at = next_at
        return stop

    def _awaits_model(self) -> bool:
        return self._state in (_COLON, _VALUE) and self._key == MODEL

    def _step(self, data: bytes, at: int, stop: int, found: list[tuple[int, int]]) -> int:
        """Read one token of an object whose keys are looked at; `~at` when it is undecided."""
        if self._state == _REST:
            at = _end(_scalar(data, at, stop), at)
        elif self._state == _KEY:
            at = _end(_dull(data, at, stop), at)
            at = _end(_blank(data, at, stop), at)
        else:
            at = _end((_marks if self._state == _START else _blank)(data, at, stop), at)
        if at == stop:
            return at
        byte = data[at]
        if self._state == _VALUE:
            return self._value(data, at, stop, found)
        if self._state == _KEY and byte == _QUOTE:
            return self._read_key(data, at, stop)
        if self._state == _START and byte == _OPEN_OBJECT:
            self._state = _KEY
        elif self._state == _COLON and byte == _COLON_SIGN:
            self._state = _VALUE
        elif self._state == _REST and byte == _COMMA:
            self._state = _KEY
        elif byte == _CLOSE_OBJECT and self._inner and self._state in (_KEY, _REST):
            self._inner = False
            self._state = _REST
        else:
            self.stop()
        return at + 1

    def _read_key(self, data: bytes, at: int, stop: int) -> int:
        end = _text_end(data, at + 1, stop) + 1
        if not end and stop - at < _KEY_BYTES_MAX:
            return ~at
        self._state = _COLON
        self._key = data[at:end] if end and end - at <= _KEY_BYTES_MAX else b""
        if not end:
            self._in_text = True
            return at + 1
        return end

    def _value(self, data: bytes, at: int, stop: int, found: list[tuple[int, int]]) -> int:
        is_model = self._key == MODEL
        byte = data[at]
        if byte == _QUOTE:
            end = _text_end(data, at + 1, stop) + 1
            if is_model and not end and stop - at < self._wanted.bytes_max:
                return ~at
            if is_model and end and self._wanted.is_spelled(data[at:end]):
                found.append((at, end))
            self._in_text = not end
            at = end - 1 if end else at
            self._state = _REST
        elif byte == _OPEN_OBJECT and not self._inner and self._key in self._within:
            self._inner = True
            self._state = _KEY
        elif byte in _OPEN:
            self._depth = 1
            self._state = _NESTED
        else:
            self._state = _REST
        if is_model and not self._within:
            self.stop()
        return at + 1

    def _pass_text(self, data: bytes, at: int, stop: int) -> int:
        if self._escaped:
            self._escaped = False
            at += 1
        end = _text_end(data, at, stop)
        if end >= 0:
            self._in_text = False
            return end + 1
        first = stop
        while first > at and data[first - 1] == _BACKSLASH:
            first -= 1
        self._escaped = (stop - first) % 2 == 1
        return stop

    def _pass_nested(self, data: bytes, at: int, stop: int) -> int:
        while (match := _bracket(data, at, stop)) is not None:
            at = match.end()
            byte = data[at - 1]
            if byte == _QUOTE:
                end = _text_end(data, at, stop)
                if end < 0:
                    self._in_text = True
                    return at
                at = end + 1
            elif byte in _OPEN:
                self._depth += 1
            else:
                self._depth -= 1
                if not self._depth:
                    self._state = _REST
                    return at
        return stop


def _end(match: re.Match[bytes] | None, at: int) -> int:
    return at if match is None else match.end()


def _text_end(data: bytes, at: int, stop: int) -> int:
    """Where the quote is that closes a string; -1 when it is not there yet.

    Args:
        at: within the string, not behind a backslash that escapes.
    """
    quote = data.find(b'"', at, stop)
    while quote > at and data[quote - 1] == _BACKSLASH:
        first = quote - 1
        while first > at and data[first - 1] == _BACKSLASH:
            first -= 1
        if (quote - first) % 2 == 0:
            break
        quote = data.find(b'"', quote + 1, stop)
    return quote
