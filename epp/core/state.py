"""What a decision depends on, as plain values: what `/debug/state` shows, `epp explain` reads.

`capture` copies it out of a live decider, `core.restore` makes a decider of it that decides alike.
So numbers are not rounded, and times are ages, since a monotonic clock means nothing elsewhere. The
blocks of the prefix index may be millions and come apart (`core.decide.PrefixKeeper.runs_of`).
Nothing here holds prompt text.

Cost: 10 us per endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from epp.core.decide import Decider, PrefixKeeper
from epp.core.flow.hold import Hold
from epp.core.latency.rates import RateState
from epp.core.model import Endpoint, Load, Plugin
from epp.core.registry import COSTS, FILTERS, PICKERS, SCORERS
from epp.core.schedule import Profile

ENDPOINTS_MAX = 1_000
"""Endpoints listed; the rest is counted."""

Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Requests = Annotated[int, Meta(ge=0, le=1_000_000)]
Ratio = Annotated[float, Meta(ge=0.0, le=1e9)]
# Far beyond what a picker says, and so that products of a few of them are finite.
Seconds = Annotated[float, Meta(ge=0.0, le=1e30)]
Rate = Annotated[float, Meta(ge=1e-18, le=1e6)]


class PluginState(msgspec.Struct, frozen=True):
    """A plugin of the profile."""

    type: str
    """As the configuration file names it."""
    name: str
    """The one that the configuration gives it; its type where none is given."""
    parameters: Mapping[str, Any]
    """All of them, as the configuration file spells them."""
    weight: Ratio | None = None
    """Factor of a scorer's score in the total; `null` = it is no scorer."""


class ProfileState(msgspec.Struct, frozen=True):
    """What chooses."""

    name: str
    """The one that the configuration gives it."""
    filters: tuple[PluginState, ...]
    """In the order in which they run."""
    scorers: tuple[PluginState, ...]
    """Empty where a cost policy chooses."""
    cost: PluginState | None
    """In place of scorers: the policy that weighs everything itself, in seconds."""
    picker: PluginState
    """Takes one of those that scored best; with a cost policy only its number of endpoints
    counts."""
    predicts: bool
    """Whether plugins are told predicted latency: `predicted-latency-producer`."""
    tpot_ratio: Ratio
    """Factor of the predicted time per output token that they are told."""


class InflightState(msgspec.Struct, frozen=True):
    """How requests are charged: `inflight-load-producer`."""

    add_estimated_output_tokens: bool
    """Whether a request is charged an estimated output too, and all its tokens until its end."""
    output_ratio: Ratio
    """Estimated output tokens per prompt token."""
    max_estimated_output_tokens: Count | None
    """Bound of that estimate; `null` = none."""


class PrefixIndexState(msgspec.Struct, frozen=True):
    """How much of prompts is remembered, and how: `approx-prefix-cache-producer`."""

    block_tokens: Annotated[int, Meta(ge=1)]
    """Tokens per prefix block now."""
    distinct_blocks: Count
    """Different blocks that are remembered."""
    held_blocks: Count
    """Summed over the endpoints: a block that two hold counts twice."""
    held_blocks_max: Count
    """Bound of that sum; beyond it the oldest are forgotten."""
    auto_tune: bool
    """Whether block size and capacity follow what the engines report."""
    tokens_max: Count
    """Most of a prompt that is looked at."""
    endpoint_blocks_max: Count
    """Most that is remembered of an endpoint that does not report its KV capacity."""


class ForecastState(msgspec.Struct, frozen=True):
    """Running means over all endpoints."""

    work_s_mean: Seconds
    """Prefill work of a request, by the learned rates."""
    output_tokens_mean: Seconds
    """Output tokens of an answer."""


class LoadState(msgspec.Struct, frozen=True):
    """The last scrape that worked; `null` = not reported."""

    stale: bool
    """Whether it is too old to be believed, or there was none."""
    age_s: float | None
    """Seconds since it was taken."""
    waiting: int | None
    """Requests queued in the engine, summed over its data-parallel ranks."""
    running: int | None
    """Requests in its running batch, summed over its ranks."""
    kv_usage_ratio: float | None
    """Part of its KV cache that running requests hold, 0..1; of the fullest rank."""
    kv_block_tokens: int | None
    """Tokens per block of its KV cache."""
    kv_blocks: int | None
    """Blocks of its KV cache, summed over its ranks."""
    lora_running: tuple[str, ...] | None
    """Adapters of running requests."""
    lora_waiting: tuple[str, ...] | None
    """Adapters of queued requests."""
    lora_max_adapters: int | None
    """Adapters that fit at once."""
    attributes: Mapping[str, float | None]
    """Custom metrics; `null` where one is no finite number."""


class LearnedState(msgspec.Struct, frozen=True):
    """How fast an endpoint is, in seconds per unit of work (`core.latency.rates`)."""

    token_s: Rate
    """To compute one prompt token."""
    pair_s: Rate
    """For one prompt token to attend to one token before it."""
    step_s: Rate
    """Of one decode step with next to nothing in it."""
    step_request_s: Rate
    """More per request in the step."""
    step_token_s: Rate
    """More per token of context in the step."""
    prefill_tokens_per_s: float
    """1 / `token_s`: prompt tokens a second, without their attention to each other."""
    speed_ratio: float
    """Prefill speed / the pool's."""
    prefills: int
    """Prefills learned from since it joined."""
    answers: int
    """Answers whose pace was learned from, likewise."""
    error_ratio: float | None
    """Mean of |observed - predicted| / predicted of its newest prefills; `null` = none yet."""
    age_s: float | None
    """Since the newest evidence; `null` = these are the pool's rates."""


class EndpointState(msgspec.Struct, frozen=True):
    """One endpoint."""

    address: str
    """Where it is reached: host and port."""
    name: str
    """What people call it; its address where it has no name."""
    namespace: str
    """Of its pod; empty where there is none: without Kubernetes."""
    labels: Mapping[str, str]
    """As discovery gives them."""
    eligible: bool
    """Whether it may be picked now."""
    ejected_for_s: Seconds
    """Until it may be picked again after failing; 0 = it may."""
    on_probation: bool
    """Its ejection is over, but no request has succeeded since: one at a time."""
    failures_in_a_row: Count
    """Requests that failed, since the last one that did not."""
    scrape_failures_in_a_row: Count
    """Scrapes that failed, since the last one that did not."""
    inflight_requests: Requests
    """Sent there by us, not ended."""
    waiting_for_first_byte: Requests
    """Of these, the ones without a first response byte: their prefill is the backlog."""
    inflight_tokens: Count
    """Uncached prompt tokens of requests without a first response byte, and estimated output where
    that is charged."""
    context_tokens: Count
    """Prompt tokens of all requests in flight."""
    kv_tokens: Count
    """KV cache that the requests in flight hold, by our own count."""
    backlog_s: Seconds
    """Prefill work in front of a new request, ours and others'."""
    own_backlog_s: Seconds
    """Of this, ours."""
    foreign_requests: Count
    """In the engine and not ours, by its last scrapes."""
    foreign_waiting: Count
    """Of these, the ones without a first token."""
    held_requests: Requests
    """Kept in the picker until it has room for them."""
    longest_held_s: Seconds | None
    """How long the oldest of these has waited; `null` = there is none."""
    proven: bool
    """It has answered since it started; until then it is started slowly."""
    last_pick_number: Count
    """Of the pool's picks, counted from 1, the last one that chose it; 0 = none."""
    cold_pick_number: Count
    """The same, of requests that matched nothing anywhere."""
    prefix_blocks: int | None
    """Blocks it is thought to hold; `null` = prompts are not read."""
    load: LoadState
    """What its engine told of itself."""
    learned: LearnedState
    """What was learned of its speed."""


class HeldBlocks(msgspec.Struct, frozen=True):
    """The blocks one endpoint is thought to hold, youngest first."""

    held: Count
    """How many there are, those left out included."""
    runs: tuple[str, ...]
    """Pieces of prompts, head first: names of 16 hexadecimal digits."""
    left_out: Count
    """How many of the oldest are not in `runs`: there are too many for a page."""
    shared: Mapping[str, Requests]
    """Names of those that end a unit of some 512 tokens which requests in flight hold: how many
    hold it."""


class State(msgspec.Struct, frozen=True):
    """See the module."""

    version: str
    """Version of the picker."""
    synced: bool
    """Discovery has told which endpoints there are."""
    inflight_requests: Count
    """Sent by this picker and not ended, over all endpoints."""
    held_requests: Count
    """Kept until the endpoint they want has room: `hold` of `expected-latency`."""
    stale_after_s: Annotated[float, Meta(gt=0.0)]
    """Age from which a scrape is not believed."""
    profile: ProfileState
    """What chooses."""
    inflight: InflightState
    """How requests are charged to endpoints."""
    forecast: ForecastState
    """Running means of what requests take."""
    prefix_index: PrefixIndexState | None
    """How much of prompts is remembered; `null` = nothing reads prefix matches."""
    endpoints_not_listed: Count
    """How many more than those below there are."""
    endpoints: tuple[EndpointState, ...]
    """Those alive, by address."""
    pool: str = ""
    """Whose state this is: `namespace/pool`, or `static` where there is no such object."""
    pools: tuple[str, ...] = ()
    """All that are served; ask for another with `?pool=`."""
    objectives: Mapping[str, int] = {}
    """The pool's InferenceObjectives: name -> priority."""
    rewrites: tuple[str, ...] = ()
    """Names of its InferenceModelRewrites, one for each rule, the first that fits wins."""
    prefix_blocks: Mapping[str, HeldBlocks] | UnsetType = UNSET
    """What each endpoint is thought to hold of prompts, by address; absent unless asked for."""


def capture(decider: Decider, now_s: float, version: str, hold: Hold | None = None) -> State:
    """What the decider knows at `now_s`.

    Args:
        version: of this program.
        hold: where requests are held; `None` = none are.
    """
    pool, forecast, params = decider.pool, decider.forecast, decider.inflight.params
    eligible = set(pool.snapshot(now_s).endpoints)
    listed = pool.endpoints[:ENDPOINTS_MAX]
    return State(
        version=version,
        synced=pool.synced,
        inflight_requests=decider.inflight.requests,
        held_requests=0 if hold is None else hold.requests,
        stale_after_s=pool.stale_after_s,
        profile=_profile(decider.profile),
        inflight=InflightState(
            add_estimated_output_tokens=params.add_estimated_output_tokens,
            output_ratio=params.output_ratio,
            max_estimated_output_tokens=params.max_estimated_output_tokens,
        ),
        forecast=ForecastState(forecast.work_s_mean, forecast.output_tokens_mean),
        prefix_index=_prefix_index(decider),
        endpoints_not_listed=len(pool.endpoints) - len(listed),
        endpoints=tuple([_endpoint(e, decider, hold, e in eligible, now_s) for e in listed]),
    )


def _profile(profile: Profile) -> ProfileState:
    return ProfileState(
        name=profile.name,
        filters=tuple(_plugin(f.filter, f.name, FILTERS) for f in profile.filters),
        scorers=tuple(_plugin(s.scorer, s.name, SCORERS, s.weight) for s in profile.scorers),
        cost=None if profile.cost is None else _plugin(profile.cost, "", COSTS),
        picker=_plugin(profile.picker, "", PICKERS),
        predicts=profile.predicts,
        tpot_ratio=profile.tpot_ratio,
    )


def _plugin(
    plugin: object, name: str, table: Mapping[str, type[Plugin]], weight: float | None = None
) -> PluginState:
    type_ = next((t for t, cls in table.items() if cls is type(plugin)), type(plugin).__name__)
    parameters = msgspec.to_builtins(plugin) if isinstance(plugin, Plugin) else {}
    return PluginState(type_, name or type_, parameters, weight)


def _prefix_index(decider: Decider) -> PrefixIndexState | None:
    keeper = decider.prefix
    if not isinstance(keeper, PrefixKeeper):
        return None
    state, params = keeper.state(), keeper.params
    return PrefixIndexState(
        block_tokens=state.block_tokens,
        distinct_blocks=state.distinct_blocks,
        held_blocks=state.held_blocks,
        held_blocks_max=state.held_blocks_max,
        auto_tune=params.auto_tune,
        tokens_max=params.tokens_max,
        endpoint_blocks_max=params.endpoint_blocks_max,
    )


def _endpoint(
    endpoint: Endpoint, decider: Decider, hold: Hold | None, eligible: bool, now_s: float
) -> EndpointState:
    prefix, forecast = decider.prefix, decider.forecast
    return EndpointState(
        address=endpoint.address,
        name=endpoint.name,
        namespace=endpoint.namespace,
        labels=dict(endpoint.labels),
        eligible=eligible,
        ejected_for_s=max(0.0, endpoint.ejected_until_s - now_s),
        on_probation=endpoint.on_probation,
        failures_in_a_row=endpoint.failures,
        scrape_failures_in_a_row=endpoint.scrape_failures,
        inflight_requests=endpoint.inflight_requests,
        waiting_for_first_byte=endpoint.waiting_requests,
        inflight_tokens=endpoint.inflight_tokens,
        context_tokens=endpoint.context_tokens,
        kv_tokens=endpoint.kv.tokens,
        backlog_s=forecast.backlog_s(endpoint, now_s),
        own_backlog_s=endpoint.backlog.seconds(now_s),
        foreign_requests=endpoint.foreign_requests,
        foreign_waiting=endpoint.foreign_waiting,
        held_requests=0 if hold is None else hold.held_for(endpoint),
        longest_held_s=None if hold is None else hold.longest_s(endpoint, now_s),
        proven=endpoint.proven,
        last_pick_number=endpoint.last_pick_number,
        cold_pick_number=endpoint.cold_pick_number,
        prefix_blocks=None if prefix is None else prefix.held_by(endpoint),
        load=_load(endpoint, now_s),
        learned=_learned(forecast.learner.state(endpoint.slot), now_s),
    )


def _load(endpoint: Endpoint, now_s: float) -> LoadState:
    load: Load = endpoint.last_load
    lora = load.lora
    return LoadState(
        stale=endpoint.load.at_s is None,
        age_s=None if load.at_s is None else now_s - load.at_s,
        waiting=load.waiting,
        running=load.running,
        kv_usage_ratio=load.kv_usage_ratio,
        kv_block_tokens=load.kv_block_tokens,
        kv_blocks=load.kv_blocks,
        lora_running=None if lora is None else tuple(sorted(lora.running)),
        lora_waiting=None if lora is None else tuple(sorted(lora.waiting)),
        lora_max_adapters=None if lora is None else lora.max_adapters,
        attributes=dict(load.attributes),
    )


def _learned(state: RateState, now_s: float) -> LearnedState:
    rates = state.rates
    return LearnedState(
        token_s=rates.token_s,
        pair_s=rates.pair_s,
        step_s=rates.step_s,
        step_request_s=rates.step_request_s,
        step_token_s=rates.step_token_s,
        prefill_tokens_per_s=1 / rates.token_s,
        speed_ratio=state.speed_ratio,
        prefills=state.prefills,
        answers=state.answers,
        error_ratio=state.error_ratio,
        age_s=None if state.learned_s is None else now_s - state.learned_s,
    )
