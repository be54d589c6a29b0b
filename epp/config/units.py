"""Values the file writes as text: durations, quantities, metric specs.

Each is a subclass of the plain value it stands for (`Seconds` is a float), so that the rest of the
program reads plain numbers; the class carries the range, reads the text and writes it back. For
every value in range, reading what was written gives the same value."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import ClassVar, Self

TEXT_CHARS_MAX = 64
"""Longest duration or quantity that is looked at."""

_NS_PER_UNIT = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}
_NUMBER = r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+"
_DURATION_PART = re.compile(rf"({_NUMBER})(ns|us|µs|ms|s|m|h)", re.ASCII)
_DURATION = re.compile(rf"\+?(?:(?:{_NUMBER})(?:ns|us|µs|ms|s|m|h))+", re.ASCII)
_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_FACTORS |= {f"{c}i": 1024**n for n, c in enumerate("KMGTPE", start=1)}
_QUANTITY = re.compile(
    rf"\+?(?P<number>{_NUMBER})(?:[eE](?P<exponent>[+-]?[0-9]{{1,2}})|(?P<suffix>[KMGTPE]i|[kMGTPE])?)",
    re.ASCII,
)


def shown(value: object) -> str:
    """A value as an error message shows it: short, on one line."""
    text = {None: "null", True: "true", False: "false"}.get(value) if _is_flag(value) else None
    text = text or (f'"{value}"' if isinstance(value, str) else str(value))
    text = text.encode("unicode_escape").decode("ascii") if not text.isprintable() else text
    return text if len(text) <= 60 else text[:57] + "..."


def _is_flag(value: object) -> bool:
    return value is None or isinstance(value, bool)


class Seconds(float):
    """A duration: `60s`, `1m30s`, `200ms`, `0s`. At most a week, so that no nanosecond is lost."""

    at_least: ClassVar[float] = 0.0
    at_most: ClassVar[float] = 604_800.0

    @classmethod
    def parse(cls, value: object) -> Self:
        """Raises: ValueError if it is not a duration or out of range."""
        text = value if isinstance(value, str) else ""
        if text != "0" and (len(text) > TEXT_CHARS_MAX or not _DURATION.fullmatch(text)):
            raise ValueError(
                f"expected a duration, got {shown(value)}: write a number with its unit (ns, us, "
                "ms, s, m, h), such as 60s, 1m30s or 200ms"
            )
        parts = _DURATION_PART.findall(text)
        ns = int(sum((Fraction(number) * _NS_PER_UNIT[unit] for number, unit in parts), Fraction()))
        seconds = cls(ns / 1e9)
        if not cls.at_least <= seconds <= cls.at_most:
            raise ValueError(f"{shown(value)} is out of range: choose {cls.span()}")
        return seconds

    def written(self) -> str:
        """The shortest text that reads back as this value."""
        ns = round(self * 1e9)
        unit = next(u for u in ("s", "ms", "us", "ns") if ns % _NS_PER_UNIT[u] == 0)
        return f"{ns // _NS_PER_UNIT[unit]}{unit}"

    @classmethod
    def span(cls) -> str:
        """The range, as people read it."""
        return f"{Seconds(cls.at_least).written()} to {Seconds(cls.at_most).written()}"


class Quantity(int):
    """A whole number, plain or with a Kubernetes suffix: `1000`, `5k`, `10Gi`, `1e9`. A fraction
    that remains is rounded up."""

    at_least: ClassVar[int] = 0
    at_most: ClassVar[int] = 2**63 - 1

    @classmethod
    def parse(cls, value: object) -> Self:
        """Raises: ValueError if it is not a quantity or out of range."""
        is_number = isinstance(value, int) and not isinstance(value, bool)
        text = str(value) if is_number else value if isinstance(value, str) else ""
        match = _QUANTITY.fullmatch(text) if len(text) <= TEXT_CHARS_MAX else None
        if match is None:
            raise ValueError(
                f"expected a quantity, got {shown(value)}: write a whole number >= 0, plain or "
                "with a suffix (k, M, G, Ki, Mi, Gi), such as 1000, 5k or 10Gi"
            )
        factor = Fraction(10) ** int(match["exponent"] or 0) * _FACTORS[match["suffix"] or ""]
        number = -(-Fraction(match["number"]) * factor // 1)
        if not cls.at_least <= number <= cls.at_most:
            raise ValueError(f"{shown(value)} is out of range: choose {cls.span()}")
        return cls(number)

    def written(self) -> str | int:
        """The shortest text that reads back as this value; a plain number where no suffix fits."""
        for n, suffix in ((3, "Gi"), (2, "Mi"), (1, "Ki")):
            if self and self % 1024**n == 0:
                return f"{self // 1024**n}{suffix}"
        return int(self)

    @classmethod
    def span(cls) -> str:
        """The range, as people read it."""
        return f"{Quantity(cls.at_least).written()} to {Quantity(cls.at_most).written()}"


_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*", re.ASCII)
_METRIC_LABEL = re.compile(
    r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*(?:"([^"{},]*)"|([^"{},\s][^"{},]*))\s*', re.ASCII
)


class MetricSpec(str):
    """Which series of a `/metrics` page: `name` or `name{label=value,...}`; empty = not read."""

    __slots__ = ()

    @classmethod
    def parse(cls, value: object) -> Self:
        """Raises: ValueError if it is not a metric spec."""
        if isinstance(value, str):
            spec = cls(value.strip())
            if not spec or spec._split() is not None:
                return spec
        raise ValueError(
            f"expected a metric, got {shown(value)}: write its name, or name{{label=value}} to "
            "choose among its series"
        )

    def written(self) -> str:
        """The text as it stood in the file."""
        return str(self)

    @property
    def metric(self) -> str:
        """Name of the metric; empty when none is to be read."""
        return self.partition("{")[0].strip()

    @property
    def labels(self) -> tuple[tuple[str, str], ...]:
        """Labels a series must have, in the order written."""
        return (self._split() if self else ()) or ()

    def _split(self) -> tuple[tuple[str, str], ...] | None:
        """The labels; `None` if the whole is not well formed."""
        name, brace, rest = self.partition("{")
        if not _METRIC_NAME.fullmatch(name.strip()) or (brace and not rest.endswith("}")):
            return None
        pairs = rest[:-1].split(",") if brace and rest[:-1].strip() else []
        labels = [_METRIC_LABEL.fullmatch(pair) for pair in pairs]
        if not all(labels):
            return None
        return tuple((m[1], (m[2] if m[2] is not None else m[3]).strip()) for m in labels if m)


Written = Seconds | Quantity | MetricSpec
