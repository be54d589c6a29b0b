"""Laws every plugin keeps, with any parameters; a new one is covered by being registered."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, nan
from random import Random
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from epp.core.filters.label_selector import LabelRequirement
from epp.core.model import (
    UNKNOWN,
    Endpoint,
    EndpointSpec,
    Load,
    Lora,
    Plugin,
    Prediction,
    PrefixMatch,
    Reads,
    Request,
)
from epp.core.pool import Snapshot
from epp.core.registry import FILTERS, PICKERS, SCORERS
from epp.core.schedule import Profile, Scheduler, WeightedScorer

# Worlds are large, and a busy machine draws them slowly, which says nothing about a plugin.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
NAMES = st.sampled_from(["m", "a", "b", "c", ""])
COUNTS = st.integers(0, 10**9)
RATIOS = st.floats(0.0, 1.0)
LORAS = st.builds(
    Lora,
    running=st.frozensets(NAMES),
    waiting=st.frozensets(NAMES),
    max_adapters=st.none() | st.integers(0, 4),
)
LOADS = st.just(UNKNOWN) | st.builds(
    Load,
    at_s=st.just(1.0),
    waiting=st.none() | COUNTS,
    running=st.none() | COUNTS,
    kv_usage_ratio=st.none() | RATIOS,
    lora=st.none() | LORAS,
    attributes=st.dictionaries(
        st.sampled_from(["a", "b"]),
        st.sampled_from([0.0, 0.5, -3, 9, nan, inf, -inf, 1.7e308, 5e-324]),
    ),
)
RANGE_LABEL = "llm-d.ai/context-length-range"
RANGES = st.builds(lambda low, high: f"{low}-{high}", COUNTS, COUNTS) | st.sampled_from(
    ["0-2048", "0-0", "9-1", "x-y"]
)
LABELS = st.dictionaries(NAMES | st.just(RANGE_LABEL), NAMES | RANGES, max_size=3)
TIMES_S = st.floats(0.0, 1e6) | st.sampled_from([0.0, 0.5, 1.0])
PREDICTIONS = st.builds(Prediction, TIMES_S, TIMES_S)


class Inflight(msgspec.Struct, frozen=True):
    """What we have sent to one endpoint."""

    requests: int
    tokens: int
    cold_pick_number: int


INFLIGHTS = st.builds(Inflight, COUNTS, COUNTS, st.integers(0, 6) | COUNTS)


class World(msgspec.Struct, frozen=True):
    """All a plugin can see: as many loads, in-flight counts and labels as endpoints."""

    labels: list[dict[str, str]]
    loads: list[Load]
    inflights: list[Inflight]
    request: Request

    def endpoints(self) -> list[Endpoint]:
        pool = []
        for slot, (labels, load, inflight) in enumerate(
            zip(self.labels, self.loads, self.inflights, strict=True)
        ):
            endpoint = Endpoint(EndpointSpec(f"10.0.0.{slot}", 8000, labels=labels), slot)
            endpoint.load = load
            endpoint.inflight_requests = inflight.requests
            endpoint.inflight_tokens = inflight.tokens
            endpoint.cold_pick_number = inflight.cold_pick_number
            endpoint.last_pick_number = inflight.cold_pick_number
            pool.append(endpoint)
        return pool


@st.composite
def requests(draw: st.DrawFn, endpoints: int) -> Request:
    blocks = draw(st.integers(0, 50))
    most = max(1, blocks)
    held = st.just(most) | st.integers(1, most)
    matched = st.dictionaries(st.integers(0, endpoints + 1), held)
    return Request(
        model=draw(NAMES),
        prompt_tokens=draw(st.integers(0, 10**6)),
        headers={
            "test-epp-endpoint-selection": f"10.0.0.{draw(st.integers(0, endpoints))}",
            **draw(st.dictionaries(NAMES, NAMES, max_size=2)),
        },
        slo_ttft_s=draw(st.none() | TIMES_S),
        slo_tpot_s=draw(st.none() | TIMES_S),
        predictions=draw(st.dictionaries(st.integers(0, endpoints + 1), PREDICTIONS)),
        match=PrefixMatch(
            blocks=blocks,
            block_tokens=draw(st.sampled_from([1, 16, 64])),
            by_slot=draw(matched) if blocks else {},
        ),
    )


@st.composite
def worlds(draw: st.DrawFn, endpoints: int | None = None) -> World:
    n = draw(st.integers(1, 8)) if endpoints is None else endpoints
    several = {"min_size": n, "max_size": n}
    return World(
        labels=draw(st.lists(LABELS, **several)),
        loads=draw(st.lists(LOADS, **several)),
        inflights=draw(st.lists(INFLIGHTS, **several)),
        request=draw(requests(n)),
    )


def values_of(kind: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    """Values that a parameter of this type accepts, as YAML gives them."""
    match kind:
        case msgspec.inspect.FloatType(ge=low, le=high):
            return st.floats(low or 0.0, high or 1e9) | st.sampled_from([0.0, 0.5, 1.0])
        case msgspec.inspect.IntType(ge=low):
            return st.integers(low or 0, 10**7)
        case msgspec.inspect.StrType():
            return NAMES.filter(bool)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.VarTupleType(item_type=msgspec.inspect.StrType()):
            return st.lists(NAMES, min_size=1)
        case msgspec.inspect.DictType():
            return LABELS
        case msgspec.inspect.EnumType(cls=choices):
            return st.sampled_from([choice.value for choice in choices])
        case msgspec.inspect.LiteralType(values=choices):
            return st.sampled_from(choices)
        case msgspec.inspect.StructType(cls=cls) if cls is not LabelRequirement:
            return parameters(cls)
        case msgspec.inspect.UnionType(types=types):  # a struct or nothing
            return st.none() | values_of(types[0])
        case msgspec.inspect.VarTupleType(item_type=item, min_length=1):
            return st.lists(values_of(item), min_size=1, max_size=3)
        case _:
            return st.just([])


def parameters(kind: type[msgspec.Struct]) -> st.SearchStrategy[dict[str, Any]]:
    """Any accepted parameters, required ones always given."""
    fields = msgspec.inspect.type_info(kind).fields
    required = {f.encode_name: values_of(f.type) for f in fields if f.required}
    optional = {f.encode_name: values_of(f.type) for f in fields if not f.required}
    if kind is FILTERS["by-label"]:
        required["validValues"] = optional.pop("validValues")
    shape = st.fixed_dictionaries(required, optional=optional)
    return shape.filter(lambda values: accepted(values, kind))


def accepted(values: dict[str, Any], kind: type[msgspec.Struct]) -> bool:
    """Whether the fields go together."""
    try:
        msgspec.convert(values, kind)
    except msgspec.ValidationError:
        return False
    return True


def plugins(kind: type[Plugin]) -> st.SearchStrategy[Plugin]:
    """Instances with any accepted parameters."""
    return parameters(kind).map(lambda values: msgspec.convert(values, kind))


def run(plugin: Plugin, world: World, pool: list[Endpoint] | None = None) -> list[Any]:
    """What the plugin returns, the dice falling as in every other run of that world."""
    world.request.rng = Random(0)
    return list(plugin(world.request, world.endpoints() if pool is None else pool))


def check_scores(scorer: Plugin, world: World, rng: Random) -> None:
    """One number in 0..1 per endpoint, which follows the endpoint wherever it stands."""
    pool = world.endpoints()
    scores = scorer(world.request, tuple(pool))
    assert isinstance(scores, list)
    assert len(scores) == len(pool)
    assert all(isinstance(s, float) and 0.0 <= s <= 1.0 for s in scores)
    of = dict(zip(pool, scores, strict=True))
    rng.shuffle(pool)
    assert scorer(world.request, pool) == [of[e] for e in pool]


def seen_by(plugin: Plugin, world: World, other: World) -> World:
    """`world` where the plugin says it looks, `other` elsewhere."""
    reads = plugin.reads
    request = world.request if Reads.REQUEST in reads else other.request
    if not getattr(plugin, "needs_predictions", False):
        request = msgspec.structs.replace(request, predictions=other.request.predictions)
    return World(
        labels=world.labels,
        loads=world.loads if Reads.LOAD in reads else other.loads,
        inflights=world.inflights if Reads.INFLIGHT in reads else other.inflights,
        request=request,
    )


def check_reads(plugin: Plugin, world: World, other: World) -> None:
    """What a plugin does not declare to read does not change its result: caches rely on it."""
    mixed = seen_by(plugin, world, other)
    slots = [
        [x.slot if isinstance(x, Endpoint) else x for x in run(plugin, w)] for w in (world, mixed)
    ]
    assert slots[0] == slots[1]


@pytest.mark.parametrize("name", sorted(SCORERS))
@settings(PATIENT, max_examples=30)
@given(data=st.data(), world=worlds(), rng=st.randoms(use_true_random=False))
def test_scores_are_in_range_and_follow_the_endpoint(
    name: str, data: st.DataObject, world: World, rng: Random
) -> None:
    check_scores(data.draw(plugins(SCORERS[name])), world, rng)


EITHER = [(name, kind) for table in (SCORERS, FILTERS) for name, kind in table.items()]
EITHER_IDS = [f"{name}-{kind.__module__.rpartition('.')[2]}" for name, kind in EITHER]


@pytest.mark.parametrize("kind", [kind for _, kind in EITHER], ids=EITHER_IDS)
@settings(PATIENT, max_examples=20)
@given(data=st.data(), world=worlds(4), other=worlds(4))
def test_a_plugin_reads_only_what_it_says_it_reads(
    kind: type[Plugin], data: st.DataObject, world: World, other: World
) -> None:
    check_reads(data.draw(plugins(kind)), world, other)


@pytest.mark.parametrize("name", sorted(FILTERS))
@settings(PATIENT, max_examples=30)
@given(data=st.data(), world=worlds(), rng=st.randoms(use_true_random=False))
def test_a_filter_keeps_a_part_of_the_pool_in_its_order_and_the_same_in_any_other(
    name: str, data: st.DataObject, world: World, rng: Random
) -> None:
    plugin, pool = data.draw(plugins(FILTERS[name])), world.endpoints()
    before = list(pool)
    kept = run(plugin, world, pool)
    assert pool == before
    assert kept == [e for e in pool if e in kept]
    rng.shuffle(pool)
    assert run(plugin, world, pool) == [e for e in pool if e in kept]


LOAD_SCORERS = sorted(
    name
    for name, s in SCORERS.items()
    if s.reads is Reads.LOAD and "unknown" in s.__struct_fields__
)


def test_the_scorers_of_scraped_load_are_all_held_to_the_rule_below() -> None:
    assert LOAD_SCORERS == [
        "kv-cache-utilization-scorer",
        "load-aware-scorer",
        "queue-scorer",
        "running-requests-size-scorer",
    ]


@pytest.mark.parametrize("name", LOAD_SCORERS)
@settings(PATIENT, max_examples=40)
@given(data=st.data(), world=worlds())
def test_an_unknown_endpoint_never_beats_a_known_idle_one(
    name: str, data: st.DataObject, world: World
) -> None:
    idle = Load(at_s=1.0, waiting=0, running=0, kv_usage_ratio=0.0)
    world.loads[0] = idle
    scores = data.draw(plugins(SCORERS[name]))(world.request, world.endpoints())
    silent = [s for s, load in zip(scores, world.loads, strict=True) if load is UNKNOWN]
    assert all(s <= scores[0] for s in silent)
    assert scores[0] == max(scores)


@pytest.mark.parametrize("usage", [0.0, 5e-324, 1e-17, 0.1, 0.9999999999999999, 1.0])
def test_F05_no_usage_a_scrape_can_report_makes_a_score_out_of_range(usage: float) -> None:
    endpoint = Endpoint(EndpointSpec("10.0.0.1", 8000))
    endpoint.load = Load(at_s=1.0, kv_usage_ratio=usage)
    [score] = SCORERS["kv-cache-utilization-scorer"]()(Request(), [endpoint])
    assert 0.0 <= score <= 1.0


LOWEST = {"type": "linear_lower_is_better"}
REQUIRED: Mapping[str, dict[str, Any]] = {
    "endpoint-attribute-scorer": {"attributeKey": "a", "algorithm": LOWEST},
    "header-label-affinity-scorer": {"headerName": "a", "labelKey": "a"},
}


@pytest.mark.parametrize("name", sorted(SCORERS))
@pytest.mark.parametrize("load", [UNKNOWN, Load(at_s=1.0, waiting=0, running=0, kv_usage_ratio=0)])
@pytest.mark.parametrize("count", [1, 2])
def test_K03_nothing_is_divided_by_zero_in_an_idle_pool(name: str, load: Load, count: int) -> None:
    endpoints = [Endpoint(EndpointSpec("10.0.0.1", 8000 + i), i) for i in range(count)]
    for endpoint in endpoints:
        endpoint.load = load
    scorer = msgspec.convert(REQUIRED.get(name, {}), SCORERS[name])
    scores = scorer(Request(model="m"), endpoints)
    assert len(scores) == count
    assert len(set(scores)) == 1


TOTALS = st.lists(st.floats(-10.0, 10.0) | st.sampled_from([0.0, 1.0]), min_size=1, max_size=12)


@pytest.mark.parametrize("name", sorted(PICKERS))
@settings(PATIENT, max_examples=60)
@given(data=st.data(), totals=TOTALS, wanted=st.integers(1, 14), seed=st.integers(0, 2**32))
def test_a_picker_names_distinct_endpoints_and_the_same_ones_for_the_same_seed(
    name: str, data: st.DataObject, totals: list[float], wanted: int, seed: int
) -> None:
    picker = msgspec.convert({"maxNumOfEndpoints": wanted}, PICKERS[name])
    endpoints = [Endpoint(EndpointSpec("10.0.0.1", 8000 + i), i) for i in range(len(totals))]
    runs = [
        [picker(endpoints, totals, rng) for _ in range(3)] for rng in (Random(seed), Random(seed))
    ]
    assert runs[0] == runs[1]
    for order in runs[0]:
        assert len(order) == min(wanted, len(totals)) == len(set(order))
        assert all(0 <= i < len(totals) for i in order)


@settings(PATIENT, max_examples=60)
@given(totals=TOTALS, wanted=st.integers(1, 14), seed=st.integers(0, 2**32))
def test_the_max_score_picker_leaves_no_better_endpoint_behind(
    totals: list[float], wanted: int, seed: int
) -> None:
    picker = msgspec.convert({"maxNumOfEndpoints": wanted}, PICKERS["max-score-picker"])
    endpoints = [Endpoint(EndpointSpec("10.0.0.1", 8000 + i), i) for i in range(len(totals))]
    order = picker(endpoints, totals, Random(seed))
    assert [totals[i] for i in order] == sorted(totals, reverse=True)[: len(order)]


class SlotScorer(Plugin, frozen=True):
    """Prefer low slots: the least a scorer can be."""

    reads: ClassVar[Reads] = Reads.LABELS
    steepness: float = 1.0

    def __call__(self, request: Request, endpoints: list[Endpoint]) -> list[float]:
        return [1.0 / (1.0 + self.steepness * e.slot) for e in endpoints]


@settings(PATIENT, max_examples=30)
@given(data=st.data(), world=worlds(4), other=worlds(4), rng=st.randoms(use_true_random=False))
def test_a_new_scorer_is_one_class_and_one_line(
    data: st.DataObject, world: World, other: World, rng: Random
) -> None:
    table = {**SCORERS, "slot-scorer": SlotScorer}  # the line
    scorer = msgspec.convert({"steepness": 2.0}, table["slot-scorer"])
    check_scores(data.draw(plugins(table["slot-scorer"])), world, rng)
    check_reads(scorer, world, other)
    weighted = WeightedScorer("mine", 1.0, scorer)
    profile = Profile("default", (), (weighted,), PICKERS["max-score-picker"]())
    endpoints = tuple(world.endpoints())
    pick = Scheduler(profile, rng).pick(world.request, Snapshot(endpoints, 1))
    assert pick.endpoint is endpoints[0]
    assert pick.terms[0].scores == [1.0, 1 / 3, 1 / 5, 1 / 7]


class SecretiveScorer(SlotScorer, frozen=True):
    """Reads what it does not declare."""

    def __call__(self, request: Request, endpoints: list[Endpoint]) -> list[float]:
        return [1.0 / (1.0 + e.inflight_requests) for e in endpoints]


def test_the_law_on_reading_catches_a_scorer_that_breaks_it() -> None:
    def world(requests: int) -> World:
        return World([{}], [UNKNOWN], [Inflight(requests, 0, 0)], Request())

    check_reads(SecretiveScorer(), world(1), world(1))
    with pytest.raises(AssertionError):
        check_reads(SecretiveScorer(), world(1), world(2))
