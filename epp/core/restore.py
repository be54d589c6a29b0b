"""From a saved state back to a decider that decides as the live one would have at that moment.

Everything goes in through the classes that the picker itself runs: endpoints join a `Pool`, loads
are scraped into it, requests are charged by `Inflight`, blocks are learned by the index. What of an
endpoint's past is not saved (who waits in which order, say) is replaced by the simplest past that
leaves the same counts and seconds. Time stands still at `NOW_S`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import Random
from typing import cast

import msgspec

from epp.core.decide import Decider, PrefixKeeper, PrefixParams
from epp.core.errors import EppError
from epp.core.inflight import Inflight, InflightParams, Prefill
from epp.core.latency.rates import Rates
from epp.core.model import (
    Endpoint,
    EndpointSpec,
    Filter,
    Load,
    Lora,
    Picker,
    Plugin,
    Scorer,
)
from epp.core.pool import Members, Pool, Scraped
from epp.core.prefix import names_of
from epp.core.registry import COSTS, FILTERS, PICKERS, SCORERS
from epp.core.schedule import Cost, NamedFilter, Profile, WeightedScorer
from epp.core.state import EndpointState, HeldBlocks, LoadState, PluginState, State

NOW_S = 0.0
"""The moment at which the state was saved."""
PORT_DIGITS_MAX = 5
REQUESTS_MAX = 2_000_000
"""In flight over all endpoints; each is charged."""


class Setup(msgspec.Struct, frozen=True):
    """What a configuration decides; the rest of a decider is what it has seen."""

    profile: Profile
    prefix: PrefixParams | None
    inflight: InflightParams


def setup_of(state: State) -> Setup:
    """What ran when the state was saved.

    Raises: EppError naming a plugin that does not exist here or takes other parameters.
    """
    index, inflight = state.prefix_index, state.inflight
    prefix = None
    if index is not None:
        prefix = PrefixParams(
            auto_tune=index.auto_tune,
            block_tokens=index.block_tokens,
            tokens_max=index.tokens_max,
            endpoint_blocks_max=index.endpoint_blocks_max,
            blocks_max_total=index.held_blocks_max,
        )
    return Setup(
        profile=_profile_of(state),
        prefix=prefix,
        inflight=InflightParams(
            add_estimated_output_tokens=inflight.add_estimated_output_tokens,
            output_ratio=inflight.output_ratio,
            max_estimated_output_tokens=inflight.max_estimated_output_tokens,
        ),
    )


def _profile_of(state: State) -> Profile:
    saved = state.profile
    # The registry promises that a class in its table has that table's protocol.
    return Profile(
        name=saved.name,
        filters=tuple(
            NamedFilter(f.name, cast("Filter", _plugin(f, FILTERS))) for f in saved.filters
        ),
        scorers=tuple(
            WeightedScorer(s.name, s.weight or 0.0, cast("Scorer", _plugin(s, SCORERS)))
            for s in saved.scorers
        ),
        picker=cast("Picker", _plugin(saved.picker, PICKERS)),
        cost=None if saved.cost is None else cast("Cost", _plugin(saved.cost, COSTS)),
        predicts=saved.predicts,
        tpot_ratio=saved.tpot_ratio,
    )


def _plugin(saved: PluginState, table: Mapping[str, type[Plugin]]) -> Plugin:
    known = table.get(saved.type)
    if known is None:
        raise EppError(f"its profile has a plugin of type `{saved.type}`, which is not known here")
    try:
        return msgspec.convert(saved.parameters, known)
    except msgspec.ValidationError as error:
        raise EppError(f"plugin `{saved.name}` of its profile: {error}") from None


def restore(state: State, setup: Setup, rng: Random) -> Decider:
    """A decider that decides at `NOW_S` what the saved one would have.

    Args:
        setup: from `setup_of`, or another one to see what that would choose.
    Raises: EppError naming what is wrong with the state.
    """
    if sum(saved.inflight_requests for saved in state.endpoints) > REQUESTS_MAX:
        raise EppError(f"it has more than {REQUESTS_MAX} requests in flight")
    pool = Pool(stale_after_s=state.stale_after_s)
    keeper = None if setup.prefix is None else PrefixKeeper(setup.prefix)
    inflight = Inflight(setup.inflight)
    decider = Decider(pool=pool, profile=setup.profile, inflight=inflight, prefix=keeper, rng=rng)
    pool.apply(Members(tuple(_spec(saved) for saved in state.endpoints)), NOW_S)
    for saved in state.endpoints:
        endpoint = pool.by_address[_spec(saved).address]
        if saved.load.age_s is not None:
            pool.apply(Scraped(endpoint, _load(saved.load, saved.load.age_s)), NOW_S)
        _charge(endpoint, saved, inflight)
        _remember(endpoint, saved)
        decider.forecast.learner.assume(endpoint.slot, _rates(saved))
    decider.forecast.work_s_mean = state.forecast.work_s_mean
    decider.forecast.output_tokens_mean = state.forecast.output_tokens_mean
    if keeper is not None and state.prefix_index is not None:
        # Whatever the setup says: the names are those of blocks of this size.
        keeper.block_tokens = state.prefix_index.block_tokens
        _restore_blocks(keeper, pool, state.prefix_blocks or {})
    return decider


def _spec(saved: EndpointState) -> EndpointSpec:
    host, _, port = saved.address.rpartition(":")
    if not host or not port.isdecimal() or len(port) > PORT_DIGITS_MAX:
        raise EppError(f"`{saved.address}` is no address of an endpoint")
    return EndpointSpec(
        host=host.removeprefix("[").removesuffix("]"),
        port=int(port),
        name=saved.name,
        namespace=saved.namespace,
        labels=saved.labels,
    )


def _load(saved: LoadState, age_s: float) -> Load:
    lora = None
    if saved.lora_running is not None:
        waiting = frozenset(saved.lora_waiting or ())
        lora = Lora(frozenset(saved.lora_running), waiting, saved.lora_max_adapters)
    return Load(
        at_s=NOW_S - age_s,
        waiting=saved.waiting,
        running=saved.running,
        kv_usage_ratio=saved.kv_usage_ratio,
        kv_block_tokens=saved.kv_block_tokens,
        kv_blocks=saved.kv_blocks,
        lora=lora,
        attributes={key: n for key, n in saved.attributes.items() if n is not None},
    )


def _charge(endpoint: Endpoint, saved: EndpointState, inflight: Inflight) -> None:
    """Requests that leave the saved counts: one has all tokens and all seconds, the others none."""
    waiting = min(saved.waiting_for_first_byte, saved.inflight_requests)
    for number in range(saved.inflight_requests):
        # Those that wait come last: a first byte of another then says nothing of them.
        runs = number < saved.inflight_requests - waiting
        last = number == saved.inflight_requests - 1
        charge = inflight.charge(
            endpoint,
            Prefill(
                prompt_tokens=saved.context_tokens if last else 0,
                seconds=saved.own_backlog_s if last else 0.0,
            ),
            tokens=saved.inflight_tokens if last else 0,
            cold=False,
            now_s=NOW_S,
        )
        if runs:
            inflight.first_byte(charge, NOW_S)


def _remember(endpoint: Endpoint, saved: EndpointState) -> None:
    """What is not made of charges and scrapes."""
    endpoint.ejected_until_s = NOW_S + saved.ejected_for_s
    endpoint.on_probation = saved.on_probation
    endpoint.failures = saved.failures_in_a_row
    endpoint.scrape_failures = saved.scrape_failures_in_a_row
    endpoint.foreign_requests = saved.foreign_requests
    endpoint.foreign_waiting = saved.foreign_waiting
    endpoint.proven = saved.proven
    endpoint.kv.assume(saved.kv_tokens, {})
    endpoint.last_pick_number = saved.last_pick_number
    endpoint.cold_pick_number = saved.cold_pick_number


def _rates(saved: EndpointState) -> Rates:
    learned = saved.learned
    return Rates(
        token_s=learned.token_s,
        pair_s=learned.pair_s,
        step_s=learned.step_s,
        step_request_s=learned.step_request_s,
        step_token_s=learned.step_token_s,
    )


def _restore_blocks(keeper: PrefixKeeper, pool: Pool, blocks: Mapping[str, HeldBlocks]) -> None:
    for address, held in blocks.items():
        endpoint = pool.by_address.get(address)
        if endpoint is not None:
            keeper.restore(endpoint, _names(held.runs, address))
            holders = zip(_names(held.shared, address), held.shared.values(), strict=False)
            endpoint.kv.assume(endpoint.kv.tokens, dict(holders))


def _names(runs: Iterable[str], address: str) -> list[int]:
    try:
        # A name that stands twice would end what the index takes.
        return list(dict.fromkeys(name for run in runs for name in names_of(run)))
    except ValueError:
        raise EppError(
            f"the prefix blocks of `{address}` are not names of hexadecimal digits"
        ) from None
