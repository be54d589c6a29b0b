"""Durations, quantities and metric specs of the configuration file."""

from __future__ import annotations

import pytest

from epp.config.units import MetricSpec, Quantity, Seconds
from epp.wire import exposition


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60s", 60.0),
        ("1m30s", 90.0),
        ("200ms", 0.2),
        ("0s", 0.0),
        ("0", 0.0),
        ("1h", 3600.0),
        ("1.5s", 1.5),
        ("+2s", 2.0),
        (".5s", 0.5),
        ("7us", 7e-6),
        ("7µs", 7e-6),
        ("3ns", 3e-9),
    ],
)
def test_durations_are_read_as_go_writes_them(text: str, seconds: float) -> None:
    assert Seconds.parse(text) == seconds


@pytest.mark.parametrize(
    "value", ["", "5", "s", "1 s", "1d", "1S", "-1s", "1m30", "٣s", "1e3s", 5, 1.0, None, True, []]
)
def test_what_is_no_duration_is_refused_with_an_example(value: object) -> None:
    with pytest.raises(ValueError, match="such as 60s, 1m30s or 200ms"):
        Seconds.parse(value)


def test_a_duration_out_of_range_names_the_range() -> None:
    with pytest.raises(ValueError, match="out of range: choose 0s to 604800s"):
        Seconds.parse("169h")
    with pytest.raises(ValueError, match="expected a duration"):
        Seconds.parse("1" * 1_000_000 + "s")


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1000, 1000),
        (0, 0),
        ("5k", 5000),
        ("10Gi", 10 << 30),
        ("64Mi", 64 << 20),
        ("1Ki", 1024),
        ("1G", 10**9),
        ("1e6", 10**6),
        ("1E3", 1000),
        ("1E", 10**18),
        ("1.5k", 1500),
        ("0.1", 1),
        (".5Ki", 512),
        ("12e-1", 2),
        (1e6, 10**6),
    ],
)
def test_quantities_are_read_as_kubernetes_writes_them(value: object, number: int) -> None:
    assert Quantity.parse(value) == number


@pytest.mark.parametrize("value", ["", "-1", -1, "5K", "5 k", "1m", "Gi", 1.5, True, None, [], "٣"])
def test_what_is_no_quantity_is_refused_with_an_example(value: object) -> None:
    with pytest.raises(ValueError, match="such as 1000, 5k or 10Gi"):
        Quantity.parse(value)


def test_a_quantity_beyond_64_bits_is_out_of_range() -> None:
    with pytest.raises(ValueError, match="out of range"):
        Quantity.parse("9Ei")
    with pytest.raises(ValueError, match="out of range"):
        Quantity.parse("1e99")


@pytest.mark.parametrize(
    "text",
    [
        "vllm:num_requests_waiting",
        "m{a=b}",
        'm{a="b c",d=e}',
        "m{a=}",
        "m { a = b , d = e , } ",
        "m{}",
        'm{a="x{y},z"}',
    ],
)
def test_metric_specs_accepted_here_are_understood_by_the_reader(text: str) -> None:
    spec = MetricSpec.parse(text)
    assert exposition.MetricSpec.parse(spec) == exposition.MetricSpec.parse(text)


@pytest.mark.parametrize("value", ["a b", "m{", "m{a}", "m}", "1m", "m{a=b}c", "m{a=b", 7, None])
def test_what_is_no_metric_spec_is_refused_and_the_reader_agrees(value: object) -> None:
    with pytest.raises(ValueError, match="expected a metric"):
        MetricSpec.parse(value)
    if isinstance(value, str):
        with pytest.raises(exposition.ConfigError):
            exposition.MetricSpec.parse(value)


def test_an_empty_metric_spec_means_not_read() -> None:
    assert MetricSpec.parse("  ") == ""


def test_a_hostile_metric_spec_takes_no_time() -> None:
    for text in ("m{" + "a=b," * 240 + "!", "m{a=" + " " * 900 + "{}", "m{a" + " " * 900 + "}"):
        with pytest.raises(ValueError, match="expected a metric"):
            MetricSpec.parse(text)
