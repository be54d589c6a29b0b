"""LoRA affinity: the reference's order, and what an endpoint does not say."""

from __future__ import annotations

import pytest

from epp.core.model import UNKNOWN, Endpoint, EndpointSpec, Load, Lora, Request
from epp.core.scorers.lora import LoraAffinityScorer


def scores_of(model: str, *loads: Load, unknown: float = 0.5) -> list[float]:
    endpoints = [Endpoint(EndpointSpec(f"10.0.0.{i}", 8000), i) for i in range(len(loads))]
    for endpoint, load in zip(endpoints, loads, strict=True):
        endpoint.load = load
    return LoraAffinityScorer(unknown=unknown)(Request(model=model), endpoints)


def lora(running: str = "", waiting: str = "", places: int | None = 2) -> Load:
    return Load(
        at_s=1.0,
        lora=Lora(frozenset(running.split()), frozenset(waiting.split()), max_adapters=places),
    )


def test_a_loaded_adapter_beats_room_beats_a_waiting_one_beats_a_full_endpoint() -> None:
    assert scores_of(
        "target",
        lora("target other", places=5),
        lora("other", places=2),
        lora(places=1),
        lora("other", "target", places=2),
        lora("other more", places=2),
    ) == [1.0, 0.8, 0.8, 0.6, 0.0]


def test_an_adapter_both_running_and_waiting_takes_one_place() -> None:
    assert scores_of("target", lora("a b", "a b", places=3), lora("a b", "a b", places=2)) == [
        0.8,
        0.0,
    ]


def test_I05_an_adapter_nobody_knows_goes_where_there_is_room() -> None:
    assert scores_of("never-heard-of", lora("a b"), lora("a")) == [0.0, 0.8]


def test_I02_an_adapter_without_traffic_is_not_taken_for_one_that_does_not_fit() -> None:
    assert scores_of("loaded-but-quiet", lora(places=4)) == [0.8]


def test_a_request_for_the_base_model_goes_where_there_is_room() -> None:
    assert scores_of("base", lora("a"), lora("a b")) == [0.8, 0.0]


def test_a_silent_endpoint_is_unknown_and_one_without_adapters_is_not() -> None:
    assert scores_of("target", UNKNOWN, Load(at_s=1.0)) == [0.5, 0.0]
    assert scores_of("target", UNKNOWN, unknown=0.25) == [0.25]


@pytest.mark.parametrize(
    ("load", "score"),
    [
        (lora("target", places=None), 1.0),
        (lora("a", "target", None), 0.6),
        (lora("a", "", None), 0.5),
    ],
)
def test_I03_an_endpoint_that_does_not_say_how_many_fit_is_unknown_beyond_its_lists(
    load: Load, score: float
) -> None:
    assert scores_of("target", load) == [score]


def test_an_endpoint_with_no_places_is_full() -> None:
    assert scores_of("target", lora(places=0)) == [0.0]


def test_a_body_that_was_not_read_names_no_adapter() -> None:
    assert scores_of("", lora("a"), lora("a b")) == [0.8, 0.0]
