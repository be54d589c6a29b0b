"""Promises in headers: milliseconds in, seconds out, nonsense is no promise."""

from __future__ import annotations

import pytest

from epp.core.model import Request
from epp.core.parse import parse_request

NEW = ("x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms")
OLD = ("x-slo-ttft-ms", "x-slo-tpot-ms")


def parsed(**headers: str) -> Request:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return parse_request({":method": "POST", ":path": "/v1/completions", **given}, None)


def promises(headers: dict[str, str]) -> tuple[float | None, float | None]:
    request = parsed(**headers)
    return request.slo_ttft_s, request.slo_tpot_s


@pytest.mark.parametrize(
    ("ms", "seconds"), [("200", 0.2), ("0.5", 0.0005), ("1e3", 1.0), (" 70 ", 0.07), ("1", 0.001)]
)
def test_milliseconds_become_seconds(ms: str, seconds: float) -> None:
    for at, name in enumerate(NEW):
        expected: list[float | None] = [None, None]
        expected[at] = pytest.approx(seconds)
        assert list(promises({name: ms})) == expected


@pytest.mark.parametrize(
    "ms",
    [
        "", " ", "0", "-0", "-1", "-inf", "inf", "Infinity", "nan", "NaN", "1e309", "1e10", "fast",
        "200ms", "200,5", "0x10", "1 2", "--1", "1" * 5000, "²", "\x00", "true", "null",
    ],
)  # fmt: skip
def test_what_is_no_positive_time_is_no_promise(ms: str) -> None:
    for name in (*NEW, *OLD):
        assert promises({name: ms}) == (None, None)


def test_the_old_names_are_read_and_the_new_ones_win() -> None:
    old = dict(zip(OLD, ("100", "10"), strict=True))
    new = dict(zip(NEW, ("300", "30"), strict=True))
    assert promises(old) == (0.1, 0.01)
    assert promises({**old, **new}) == (0.3, 0.03)
    assert promises({**old, NEW[0]: ""}) == (0.1, 0.01), "an empty header is none"


def test_no_header_is_no_promise() -> None:
    assert promises({}) == (None, None)
