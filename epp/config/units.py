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
    rf"\+?(?P<number>{_NUMBER})"
    r"(?:[eE](?P<exponent>[+-]?[0-9]{1,2})|(?P<suffix>[KMGTPE]i|[kMGTPE])?)",
    re.ASCII,
)


def shown(value: object) -> str:
    """A value as an error message shows it: short, on one line."""
    if value is None or isinstance(value, bool):
        text = "null" if value is None else str(value).lower()
    else:
        text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


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
        if isinstance(value, float) and value.is_integer():  # YAML takes `1e6` for one
            value = int(value)
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


_LABEL = r'\s*[a-zA-Z_][a-zA-Z0-9_]*\s*=(?:\s*"[^"]*"\s*|[^",{}]*)'
_METRIC = re.compile(
    rf"\s*[a-zA-Z_:][a-zA-Z0-9_:]*\s*(?:\{{\s*(?:{_LABEL}(?:,{_LABEL})*,?\s*)?\}}\s*)?", re.ASCII
)
METRIC_CHARS_MAX = 1000
"""Longest metric spec."""


class MetricSpec(str):
    """Which series of a `/metrics` page: `name` or `name{label=value,...}`; empty = none. Only its
    form is checked here; `epp.wire.exposition` takes it apart."""

    __slots__ = ()

    @classmethod
    def parse(cls, value: object) -> Self:
        """Raises: ValueError if it is not a metric spec."""
        if isinstance(value, str) and len(value) <= METRIC_CHARS_MAX:
            text = value.strip()
            if not text or _METRIC.fullmatch(text):
                return cls(text)
        raise ValueError(
            f"expected a metric, got {shown(value)}: write its name, or name{{label=value}} to "
            "choose among its series"
        )

    def written(self) -> str:
        """The text as it stood in the file, without white space around it."""
        return str(self)


Written = Seconds | Quantity | MetricSpec
