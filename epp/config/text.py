"""YAML text to plain values (dict, list, str, int, float, bool, None), and back.

Built on PyYAML's safe event parser with a loop of our own instead of its constructor, because a
configuration needs more than that gives: a key that stands twice is an error, not a silent
overwrite; only `true` and `false` are booleans (`yes`, `on` stay text, and a text where a boolean
is expected is refused); `1:30` and `007` are no numbers; infinity and NaN do not exist; invisible
characters (control characters, a pasted no-break space) are refused; anchors and aliases work but
cannot blow up; depth, size and number of values are bounded, without recursion.

Cost, once at start-up: a usual file 0.2 ms, the largest 0.2 s; ten times that where PyYAML lacks
libyaml."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import yaml

from epp.config.units import shown
from epp.core.errors import ConfigError

TEXT_BYTES_MAX = 1 << 20
"""Largest file; a Kubernetes ConfigMap cannot be larger either."""
DEPTH_MAX = 32
VALUES_MAX = 20_000
"""Values in a file with its aliases written out. Every plugin and key is a few."""
WORD_CHARS_MAX = 4096
"""Longest single text, such as a path."""
DIGITS_MAX = 18
"""Digits of a whole number, so that it fits 64 bits."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)", re.ASCII)
_FLOAT = re.compile(
    r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", re.ASCII
)
_WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS_BOOL = {"true": True, "false": False}
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*", re.ASCII)
_STR_TAG = "tag:yaml.org,2002:str"


def key_path(path: str, key: str) -> str:
    """JSON path of a key of the mapping at `path`."""
    return f"{path}.{key}" if _PLAIN_KEY.fullmatch(key) else f"{path}[{shown(key)}]"


def read_yaml(text: str) -> Any:
    """Read one YAML (or JSON) document; `None` when there is none.

    Raises: ConfigError, with the line, for anything that is not one plain document in bounds.
    """
    try:
        size_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise ConfigError("the configuration is not valid UTF-8: save it as UTF-8") from error
    if size_bytes > TEXT_BYTES_MAX:
        raise ConfigError(
            f"the configuration has {size_bytes} bytes, more than {TEXT_BYTES_MAX}: shorten it"
        )
    builder = _Builder()
    try:
        for event in _events(text):
            builder.add(event)
    except yaml.MarkedYAMLError as error:
        where = _where(error.problem_mark) if error.problem_mark else ""
        raise ConfigError(f"not valid YAML: {error.problem or error.context}{where}") from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"not valid YAML: {reason}") from error
    return builder.value


def _events(text: str) -> Iterator[yaml.Event]:
    events: Iterator[yaml.Event] = yaml.parse(text, Loader=_LOADER)
    return events


def _where(mark: Any) -> str:
    return f" (line {mark.line + 1}, column {mark.column + 1})"


class _Frame:
    """A mapping or list that is being filled."""

    __slots__ = ("anchor", "first_value", "key", "value")

    def __init__(self, value: dict[str, Any] | list[Any], anchor: str | None, count: int) -> None:
        self.value = value
        self.anchor = anchor
        self.first_value = count
        self.key: str | None = None


class _Builder:
    """Folds events into one value."""

    def __init__(self) -> None:
        self.value: Any = None
        self._documents = 0
        self._frames: list[_Frame] = []
        self._anchors: dict[str, tuple[Any, int]] = {}
        """Complete anchored values, and how many values each holds."""
        self._count = 0

    def add(self, event: yaml.Event) -> None:
        """Take the next event."""
        match event:
            case yaml.ScalarEvent():
                self._scalar(event)
            case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                self._open(event)
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                self._close()
            case yaml.AliasEvent():
                self._alias(event)
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    raise self._error(event, "a second document: keep one, without `---` between")

    def _scalar(self, event: yaml.ScalarEvent) -> None:
        if event.tag not in (None, "!", _STR_TAG):
            raise self._error(event, f"the YAML tag `{event.tag}` is not supported: remove it")
        if len(event.value) > WORD_CHARS_MAX:
            raise self._error(event, f"a text is longer than {WORD_CHARS_MAX} characters")
        if not event.value.isprintable():
            hidden = next(c for c in event.value if not c.isprintable())
            raise self._error(
                event, f"a text holds the invisible character U+{ord(hidden):04X}: remove it"
            )
        if self._expects_key():
            self._key(event, event.value)
            return
        value = self._resolve(event) if event.implicit[0] and event.tag is None else event.value
        self._put(event, value, 1)
        self._done()
        if event.anchor:
            self._anchors[event.anchor] = (value, 1)

    def _resolve(self, event: yaml.ScalarEvent) -> Any:
        text = event.value
        if text in _WORDS:
            return None
        if text in _WORDS_BOOL:
            return _WORDS_BOOL[text]
        if _INT.fullmatch(text):
            if len(text.lstrip("+-")) > DIGITS_MAX:
                raise self._error(event, f"a number has more than {DIGITS_MAX} digits")
            return int(text)
        if _FLOAT.fullmatch(text):
            number = float(text)
            if math.isinf(number):
                raise self._error(event, f"{text} is too large for a number")
            return number
        return text

    def _expects_key(self) -> bool:
        frame = self._frames[-1] if self._frames else None
        return frame is not None and isinstance(frame.value, dict) and frame.key is None

    def _key(self, event: yaml.Event, key: str) -> None:
        if key == "<<":
            raise self._error(event, "merge keys (`<<`) are not supported: write the keys out")
        frame = self._frames[-1]
        if key in frame.value:
            frame.key = key
            raise self._error(event, f"the key `{key}` stands twice in one mapping: keep one")
        frame.key = key

    def _open(self, event: Any) -> None:
        if event.tag not in (None, "!"):
            raise self._error(event, f"the YAML tag `{event.tag}` is not supported: remove it")
        if self._expects_key():
            raise self._error(event, "a key must be text")
        if len(self._frames) >= DEPTH_MAX:
            raise self._error(event, f"nested deeper than {DEPTH_MAX} levels")
        value: dict[str, Any] | list[Any] = {} if isinstance(event, yaml.MappingStartEvent) else []
        first_value = self._count
        self._put(event, value, 1)
        self._frames.append(_Frame(value, event.anchor, first_value))

    def _close(self) -> None:
        frame = self._frames.pop()
        if frame.anchor:
            self._anchors[frame.anchor] = (frame.value, self._count - frame.first_value)
        self._done()

    def _alias(self, event: yaml.AliasEvent) -> None:
        if event.anchor not in self._anchors:
            raise self._error(
                event, f"`*{event.anchor}` has no complete anchor `&{event.anchor}` before it"
            )
        value, count = self._anchors[event.anchor]
        if not self._expects_key():
            self._put(event, value, count)
            self._done()
        elif isinstance(value, str):
            self._key(event, value)
        else:
            raise self._error(event, "a key must be text")

    def _put(self, event: yaml.Event, value: Any, count: int) -> None:
        self._count += count
        if self._count > VALUES_MAX:
            raise self._error(event, f"more than {VALUES_MAX} values, aliases written out")
        if not self._frames:
            self.value = value
            return
        frame = self._frames[-1]
        if isinstance(frame.value, list):
            frame.value.append(value)
        else:
            assert frame.key is not None
            frame.value[frame.key] = value

    def _done(self) -> None:
        """The value of the current key is complete."""
        if self._frames:
            self._frames[-1].key = None

    def _error(self, event: Any, message: str) -> ConfigError:
        path = "$"
        for frame in self._frames:
            if isinstance(frame.value, list):
                # An inner mapping or list is appended when it opens, a text once it is read.
                path += f"[{len(frame.value) - (frame is not self._frames[-1])}]"
            elif frame.key is not None:
                path = key_path(path, frame.key)
        return ConfigError(message + _where(event.start_mark), path=path)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that either YAML 1.1 or `read_yaml` would take for something else."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(rf"(?:{_FLOAT.pattern})\Z"), list("-+.0123456789")
)


def write_yaml(value: Any) -> str:
    """Plain values as YAML that `read_yaml` reads back as the same."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=96))
