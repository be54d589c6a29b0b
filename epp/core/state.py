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
    name: str
    parameters: Mapping[str, Any]
    """All of them, as the configuration file spells them."""
    weight: Ratio | None = None
    """Of a scorer."""


class ProfileState(msgspec.Struct, frozen=True):
    """What chooses."""

    name: str
    filters: tuple[PluginState, ...]
    scorers: tuple[PluginState, ...]
    cost: PluginState | None
    """In place of scorers: the policy that weighs everything itself, in seconds."""
    picker: PluginState
    predicts: bool
    """Whether plugins are told predicted latency: `predicted-latency-producer`."""
    tpot_ratio: Ratio
    """Factor of the predicted time per output token that they are told."""


class InflightState(msgspec.Struct, frozen=True):
    """How requests are charged: `inflight-load-producer`."""

    add_estimated_output_tokens: bool
    output_ratio: Ratio
    max_estimated_output_tokens: Count | None


class PrefixIndexState(msgspec.Struct, frozen=True):
    """How much of prompts is remembered, and how: `approx-prefix-cache-producer`."""

    block_tokens: Annotated[int, Meta(ge=1)]
    """Tokens per prefix block now."""
    distinct_blocks: Count
    held_blocks: Count
    held_blocks_max: Count
    auto_tune: bool
    tokens_max: Count
    endpoint_blocks_max: Count


class ForecastState(msgspec.Struct, frozen=True):
    """Running means over all endpoints."""

    work_s_mean: Seconds
    """Prefill work of a request."""
    output_tokens_mean: Seconds


class LoadState(msgspec.Struct, frozen=True):
    """The last scrape that worked; `null` = not reported."""

    stale: bool
    """Too old to be believed, or there was none."""
    age_s: float | None
    waiting: int | None
    running: int | None
    kv_usage_ratio: float | None
    kv_block_tokens: int | None
    kv_blocks: int | None
    lora_running: tuple[str, ...] | None
    lora_waiting: tuple[str, ...] | None
    lora_max_adapters: int | None
    attributes: Mapping[str, float | None]
    """Custom metrics; `null` where one is no finite number."""


class LearnedState(msgspec.Struct, frozen=True):
    """How fast an endpoint is, in seconds per unit of work (`core.latency.rates`)."""

    token_s: Rate
    pair_s: Rate
    step_s: Rate
    step_request_s: Rate
    step_token_s: Rate
    prefill_tokens_per_s: float
    """1 / `token_s`: prompt tokens a second, without their attention to each other."""
    speed_ratio: float
    """Prefill speed / the pool's."""
    prefills: int
    """Learned from since it joined."""
    answers: int
    error_ratio: float | None
    """Mean of |observed - predicted| / predicted of its newest prefills; `null` = none yet."""
    age_s: float | None
    """Since the newest evidence; `null` = these are the pool's rates."""


class EndpointState(msgspec.Struct, frozen=True):
    """One endpoint."""

    address: str
    name: str
    namespace: str
    labels: Mapping[str, str]
    eligible: bool
    ejected_for_s: Seconds
    on_probation: bool
    failures_in_a_row: Count
    scrape_failures_in_a_row: Count
    inflight_requests: Requests
    """Sent there by us, not ended."""
    waiting_for_first_byte: Requests
    """Of these, the ones without a first response byte: their prefill is the backlog."""
    inflight_tokens: Count
    context_tokens: Count
    """Prompt tokens of all requests in flight."""
    kv_tokens: Count
    """KV cache that the requests in flight hold, by our own count."""
    backlog_s: Seconds
    """Prefill work in front of a new request, ours and others', in seconds."""
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
    learned: LearnedState


class HeldBlocks(msgspec.Struct, frozen=True):
    """The blocks one endpoint is thought to hold, youngest first."""

    held: Count
    runs: tuple[str, ...]
    """Pieces of prompts, head first: names of 16 hexadecimal digits."""
    left_out: Count
    """The oldest ones, where there are too many for a page."""
    shared: Mapping[str, Requests]
    """Names of those that end a unit of some 512 tokens which more than one request in flight
    holds: how many hold it."""


class State(msgspec.Struct, frozen=True):
    """See the module."""

    version: str
    synced: bool
    """Discovery has told which endpoints there are."""
    inflight_requests: Count
    held_requests: Count
    """Kept until the endpoint they want has room: `hold` of `expected-latency`."""
    stale_after_s: Annotated[float, Meta(gt=0.0)]
    profile: ProfileState
    inflight: InflightState
    forecast: ForecastState
    prefix_index: PrefixIndexState | None
    """`null`: nothing reads prefix matches."""
    endpoints_not_listed: Count
    endpoints: tuple[EndpointState, ...]
    prefix_blocks: Mapping[str, HeldBlocks] | UnsetType = UNSET
    """By address; absent unless asked for."""


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
