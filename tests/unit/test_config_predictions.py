"""`predicted-latency-producer` in a configuration: what it sets, and what has no effect here."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from epp.config import Plan, load_config, resolve
from epp.core.decide import Decider
from epp.core.errors import ConfigError
from epp.core.inflight import Inflight
from epp.core.model import Request
from epp.core.pool import Members, Pool
from tests.unit.roundrates import spec

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
ACCEPTED = Path(__file__).parent / "data" / "config" / "accepted"


def plan_of(parameters: str = "", beside: str = "{type: latency-scorer}") -> Plan:
    own = f"{{type: predicted-latency-producer, parameters: {{{parameters}}}}}"
    return resolve(load_config(f"{HEAD}plugins: [{own}, {beside}]"))


def told(plan: Plan) -> Request:
    """A request to which predictions of the plan were made."""
    pool = Pool(stale_after_s=1000.0)
    decider = Decider(
        pool=pool,
        profile=plan.profiles[0],
        inflight=Inflight(),
        prefix=None,
        rng=Random(1),
    )
    pool.apply(Members((spec(0), spec(1))), 0.0)
    request = Request(prompt_tokens=1000)
    decider.wish(request, subset=None, now_s=0.0)
    return request


def tpots_s(parameters: str) -> list[float]:
    return [p.tpot_s for p in told(plan_of(parameters)).predictions.values()]


def test_the_time_per_output_token_counts_only_in_streaming_mode() -> None:
    whole = tpots_s("streamingMode: true")
    assert min(whole) > 0.0
    assert tpots_s("") == tpots_s("streamingMode: false") == [0.0, 0.0]
    ttfts_s = [
        [p.ttft_s for p in told(plan_of(text)).predictions.values()]
        for text in ("streamingMode: true", "streamingMode: false")
    ]
    assert ttfts_s[0] == ttfts_s[1]
    assert min(ttfts_s[0]) > 0.0


def test_a_buffer_of_two_doubles_the_promise_per_output_token() -> None:
    half = tpots_s("streamingMode: true, sloBufferFactor: 2")
    assert half == [s / 2 for s in tpots_s("streamingMode: true")]


def test_nothing_is_predicted_where_that_is_switched_off() -> None:
    plan = plan_of("predictInProduce: false, streamingMode: true")
    assert not plan.profiles[0].needs_predictions
    assert told(plan).predictions == {}


def test_who_reads_predictions_gets_the_producer_with_its_defaults() -> None:
    undeclared = resolve(load_config(f"{HEAD}plugins: [{{type: latency-scorer}}]"))
    assert undeclared.profiles == plan_of().profiles
    assert [p.tpot_s for p in told(undeclared).predictions.values()] == [0.0, 0.0]
    types = {plugin.type for plugin in undeclared.config.plugins}
    assert {"predicted-latency-producer", "approx-prefix-cache-producer"} <= types
    other = resolve(load_config(f"{HEAD}plugins: [{{type: queue-scorer}}]"))
    assert "predicted-latency-producer" not in {p.type for p in other.config.plugins}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("contextTTL", "5m"),
        ("contextTTL", "300000000000"),
        ("endpointRoleLabel", "llm-d.ai/role"),
        ("useEncoderCacheFeatures", "true"),
        ("encoderCacheMatchInfoProducerName", "mm"),
        ("samplingMean", "100.5"),
        ("maxDecodeTokenSamplesForPrediction", "2"),
    ],
)
def test_what_has_no_effect_here_is_accepted_with_a_notice(key: str, value: str) -> None:
    assert plan_of(f"{key}: {value}").notices == (
        f"`{key}` has no effect here: latency is predicted without a sidecar - at "
        f"`$.plugins[0].parameters.{key}`",
    )


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("sloBufferFactor: 0", "sloBufferFactor", ">"),
        ("sloBufferFactor: -1", "sloBufferFactor", ">"),
        ("streamingMode: 1", "streamingMode", "true"),
        ("prefixMatchInfoProducerName: nobody", "prefixMatchInfoProducerName", "is called"),
        ("inFlightLoadProducerName: nobody", "inFlightLoadProducerName", "is called"),
        ("samplingmean: 1", "samplingmean", "samplingMean"),
    ],
)
def test_a_mistake_is_refused_with_its_key(text: str, path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        plan_of(text)
    assert caught.value.path == f"$.plugins[0].parameters.{path}"


def test_who_names_its_producer_must_name_this_one() -> None:
    named = "{type: latency-scorer, parameters: {latencyPredictionInfoProducerName: %s}}"
    assert plan_of(beside=named % "predicted-latency-producer").notices == ()
    with pytest.raises(ConfigError, match='no `predicted-latency-producer` is called "mine"'):
        plan_of(beside=named % "mine")


def test_the_latency_predictor_of_the_reference_resolves_with_one_notice() -> None:
    """All of it but the admitter, which is refused by name (data/config/refused)."""
    plan = resolve(load_config((ACCEPTED / "latency-predictor.yaml").read_text()))
    (profile,) = plan.profiles
    assert [f.name for f in profile.filters] == ["strict", "slo-headroom-tier-filter", "loose"]
    assert [s.name for s in profile.scorers] == ["latency-scorer"]
    assert (profile.needs_predictions, profile.tpot_ratio) == (True, 1.0)
    assert plan.prefix is not None
    assert plan.notices == (
        "`predicted-latency-producer` has no effect in a profile: a data producer works for all - "
        "at `$.schedulingProfiles[0].plugins[0].pluginRef`",
    )
