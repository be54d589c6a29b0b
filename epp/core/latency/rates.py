"""How fast each endpoint is, learned from what passes through: nothing to calibrate.

Rates are seconds per unit of work (`Rates`). Three sources:

    first bytes   the main one: a prompt's tokens, and how long the engine was busy with it
    histograms    vLLM's prefill seconds and computed tokens, where first bytes are not seen
    ends          mean seconds per output token of an answer, for the decode step

First bytes are summed over *groups* (`observe`), prompts the engine computed back to back, whose
time is modelled as

    seconds = level * (w1*token_s*u + w2*pair_s*u*(m + u/2) + w3*steps*S)

with u tokens computed, m matched, and S the decode step that goes with each chunk; the third part
also takes in network and tokenizer. An answer's time per token, less the share of it that the
engine spent on prefills, is `level * (w1*c0 + w2*c1*inflight + w3*c2*tokens)`. How level and
weights are found, and why garbage does not hurt, is told in `fit`.

Learned work is then multiplied by `work_bias_ratio`: a router that thinks an endpoint 30 % too fast
loses 4-8 % of latency, one that thinks it 40 % too slow nothing (simulated).

What this cannot tell apart: an engine that is slow, and one that other routers keep busy or that
has no room in its KV cache. Both look slow, and up to half of the newest prefills may be so before
it shows.
"""

from __future__ import annotations

import math

from mypy_extensions import mypyc_attr

from epp.core.latency.fit import PoolFit, predict_s
from epp.core.latency.observe import FirstBytes, Group, Histograms, PrefillTime
from epp.core.structs import Frozen

CHUNK_TOKENS = 8192
"""Prompt tokens per engine step: vLLM's default `max_num_batched_tokens` on an H100. Wrong by a
factor it changes the number of steps, about 2 % of a prefill each."""
RESTART_COUNT = 4.0
"""Prefills a restarted endpoint remembers: its hardware is likely the same, its load is not."""
CHANGE_RATIO = 0.02
"""Rates are published when one moved by more: callers that cache them reread rarely."""
SEEN_S = 60.0
"""Histograms are not heard while first bytes are seen, of any endpoint. Theirs are everybody's
prefills: of several routers, one that mixed both sources lost 5 to 17 % of latency (simulated)."""
COUNT_MAX = 8.0
"""No observation stands for more prefills: a median wants several."""
TOKENS_MAX = 1_000_000_000
SECONDS_MAX = 1e6
"""Bounds of what is believed of one event, so that sums and products stay finite."""
QUANTUM_LOG = 0.1
"""Endpoints are sorted into classes of speed, 10 % apart, the pool's in the middle, and those of
one class have equal rates. Two endpoints of the same kind never look exactly alike; without classes
the one that looks a hair faster would cost every request of an idle pool."""
CLASS_HOLD = 0.7
"""An endpoint changes its class when it is further than this from the class's middle, in classes:
beyond half of one, so that it does not waver at a border."""
RATE_FACTOR_MAX = 1000.0
"""Published rates stay within this factor of the prior."""
ERROR_WEIGHT = 0.1
"""Part of each new value in the mean error."""
ERROR_MAX = 10.0
"""No observation counts as further off in the mean error: one stall must not hide the rest."""


class Rates(Frozen, frozen=True):
    """Seconds per unit of work of one endpoint.

    The defaults are Qwen3-32B on two H100 with tensor parallelism: llm-d's published 15 928 prompt
    tokens a second (vLLM 0.19, chunks of 8192); the other values are estimates that agree with it.
    """

    token_s: float = 1 / 15928
    """Computing one prompt token (a)."""
    pair_s: float = 2.2e-10
    """One prompt token attending to one token before it (b)."""
    step_s: float = 0.012
    """One decode step with next to nothing in it (c0)."""
    step_request_s: float = 6e-5
    """More per request in the step (c1)."""
    step_token_s: float = 5.6e-8
    """More per token of context in the step (c2)."""

    def work_s(self, uncached_tokens: float, matched_tokens: float) -> float:
        """Seconds of prefill of a prompt, alone on the endpoint and without steps."""
        pairs = uncached_tokens * (matched_tokens + uncached_tokens / 2)
        return self.token_s * uncached_tokens + self.pair_s * pairs

    def decode_step_s(self, inflight_requests: float, inflight_tokens: float) -> float:
        """Seconds of one decode step; tokens are those in the KV cache of the requests."""
        return (
            self.step_s
            + self.step_request_s * inflight_requests
            + self.step_token_s * inflight_tokens
        )


Class = tuple[int, int]
"""How far an endpoint is from the pool, in `QUANTUM_LOG`: prefill, decode; positive is slower."""
AS_THE_POOL: Class = (0, 0)


class RateState(Frozen, frozen=True, kw_only=True):
    """What is known of one endpoint's speed, for people."""

    rates: Rates
    prefills: int
    """Prefills learned from, first bytes and histograms, since it joined."""
    answers: int
    """Answers whose decode was learned from."""
    speed_ratio: float
    """Prefill speed / the pool's; 2 = twice as fast."""
    error_ratio: float | None
    """Mean of |observed - predicted| / predicted over its newest groups of first bytes (about ten);
    `None` before the first."""
    learned_s: float | None
    """Monotonic time of the newest evidence; `None` = these are the pool's rates."""


class _Slot:
    """What is going on at one endpoint."""

    __slots__ = (
        "answers", "error_ratio", "first_bytes", "histograms", "learned_s", "prefill_time",
        "prefills", "told",
    )  # fmt: skip

    def __init__(self) -> None:
        self.first_bytes = FirstBytes()
        self.histograms = Histograms()
        self.prefill_time = PrefillTime()
        self.prefills = self.answers = 0
        self.error_ratio: float | None = None
        self.learned_s: float | None = None
        self.told = False
        """Its newest prefills are known from its histograms only."""


@mypyc_attr(allow_interpreted_subclasses=True)  # a simulation knows its engines' rates
class RateLearner:
    """See the module. Endpoints are known by slot; every slot may be used without `joined`."""

    def __init__(
        self,
        prior: Rates = Rates(),  # noqa: B008 (frozen)
        *,
        work_bias_ratio: float = 1.05,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        """
        Args:
            prior: where to start; may be ten times too fast or too slow.
            work_bias_ratio: learned prefill work is multiplied by this; >= 1.
            chunk_tokens: prompt tokens the engines compute per step.
        """
        self.version = 0
        """Grows whenever what `rates` answers changed for some slot."""
        self._prior = prior
        self._bias_ratio = work_bias_ratio
        self._chunk_tokens = chunk_tokens
        self._prefill = PoolFit()
        self._decode = PoolFit()
        self._slots: dict[int, _Slot] = {}
        self._pool_rates = prior
        self._pool_logs = (0.0, 0.0)
        """Levels of the pool, prefill and decode, that `_pool_rates` were made from."""
        self._classes: dict[int, Class] = {}
        """Of each endpoint of which something is known."""
        self._fastest: Class = AS_THE_POOL
        self._by_class: dict[Class, Rates] = {}
        self._assumed: dict[int, Rates] = {}
        self._first_byte_s = -math.inf
        """Time of the newest one of any endpoint."""

    def rates(self, slot: int) -> Rates:
        """The endpoint's rates. Endpoints of one speed have equal ones, see `QUANTUM_LOG`; one of
        which nothing is known is taken to be as fast as any, or it would never be tried."""
        if slot in self._assumed:
            return self._assumed[slot]
        place = self._classes.get(slot, self._fastest)
        if place == AS_THE_POOL:
            return self._pool_rates
        rates = self._by_class.get(place)
        if rates is None:
            prefill_log, decode_log = self._pool_logs
            rates = self._by_class[place] = self._rates_of(
                prefill_log + place[0] * QUANTUM_LOG, decode_log + place[1] * QUANTUM_LOG
            )
        return rates

    def measured(self, slot: int) -> Rates:
        """The endpoint's own rates as far as they are known, before it is sorted into a class."""
        prefill_log = self._prefill.pool_log()
        own_log = self._prefill.level_log(slot, prefill_log)
        return self._rates_of(own_log, self._decode_log(slot, own_log - prefill_log, prefill_log))

    def _decode_log(self, slot: int, slower_log: float, prefill_log: float) -> float:
        """Level of its decode steps. What is known of its prefills, how much slower than the pool's
        they are, goes for its decode steps until they have been seen."""
        return self._decode.level_log(slot, self._decode.pool_log(prefill_log) + slower_log)

    def assume(self, slot: int, rates: Rates) -> None:
        """Take these for the endpoint's rates until something is learned of it: they come from a
        saved state."""
        self._assumed[slot] = rates
        self.version += 1

    def joined(self, slot: int) -> None:
        """A new endpoint: it starts at the pool's rates."""
        self.forget(slot)

    def forget(self, slot: int) -> None:
        """The endpoint left."""
        self._slots.pop(slot, None)
        self._prefill.forget(slot)
        self._decode.forget(slot)
        known = self._assumed.pop(slot, None) is not None
        if self._classes.pop(slot, None) is not None or known:
            self._note_fastest()

    def restarted(self, slot: int) -> None:
        """Its process started again: what it was doing is gone, what it can do likely not."""
        if slot in self._slots:
            old, new = self._slots[slot], _Slot()
            new.prefills, new.answers, new.learned_s = old.prefills, old.answers, old.learned_s
            self._slots[slot] = new
            self._prefill.doubt(slot, RESTART_COUNT)
            self._decode.doubt(slot, RESTART_COUNT)
            self._publish(slot)

    def first_byte(
        self,
        slot: int,
        *,
        uncached_tokens: int,
        matched_tokens: int,
        service_s: float,
        decoding: int,
        decode_tokens: int,
        now_s: float,
    ) -> None:
        """A first byte of an answer came.

        Args:
            uncached_tokens: prompt tokens it had to compute, as far as we know.
            matched_tokens: prompt tokens it found cached, as far as we know.
            service_s: seconds since its dispatch, or since the endpoint's first byte before if that
                came later.
            decoding: requests that decoded meanwhile.
            decode_tokens: tokens of context of those.
            now_s: when it came.
        """
        state = self._slot(slot)
        rates = self.rates(slot)
        service_s = min(max(0.0, service_s), SECONDS_MAX)
        same_step = state.first_bytes.same_step(service_s, now_s, rates.step_s)
        uncached, matched = max(1, _believed(uncached_tokens)), _believed(matched_tokens)
        steps = 0.0 if same_step else self._steps(uncached)
        step_s = self._prior.decode_step_s(_believed(decoding), _believed(decode_tokens))
        parts = (*self._work_parts(uncached, matched), steps * step_s)
        newest_s = state.first_bytes.last_s
        self._first_byte_s = max(self._first_byte_s, now_s)
        group = state.first_bytes.add(parts, service_s, now_s, same_step=same_step)
        state.prefill_time.add(rates.work_s(uncached, matched), now_s)
        if group is not None:
            state.told = False
            state.learned_s = newest_s
            self._note_error(slot, state, group)
            self._learn_prefills(slot, state, group)

    def decoded(
        self,
        slot: int,
        *,
        step_s: float,
        inflight: int,
        inflight_tokens: int,
        now_s: float,
        decode_s: float | None = None,
    ) -> None:
        """An answer ended.

        Args:
            step_s: its mean seconds per output token.
            inflight: requests on the endpoint while it ran, on average.
            inflight_tokens: tokens of context of those.
            now_s: when its last token came.
            decode_s: seconds from its first token to its last; `None`: not known, prefills are then
                taken to have been as frequent as lately.
        """
        if step_s <= 0.0:
            return
        state = self._slot(slot)
        prior = self._prior
        parts = (
            prior.step_s,
            prior.step_request_s * _believed(inflight),
            prior.step_token_s * _believed(inflight_tokens),
        )
        share = state.prefill_time.share(now_s, decode_s)
        state.answers += 1
        state.learned_s = now_s
        # The less of the time was decode, the less is known of it.
        other = self._decode.learn(slot, parts, step_s * (1 - share), count=1.0, worth=1 - share)
        self._publish(slot, other)

    def histograms(
        self, slot: int, *, prefill_s: float, computed_tokens: float, prefills: int, now_s: float
    ) -> None:
        """Growth of an engine's own histograms between two scrapes.

        Args:
            prefill_s: sum of `request_prefill_time_seconds` (admission to first token).
            computed_tokens: sum of `request_prefill_kv_computed_tokens`.
            prefills: count of either.
            now_s: time of the second scrape.
        """
        state = self._slot(slot)
        learned = state.histograms.add(
            prefill_s=min(prefill_s, SECONDS_MAX),
            computed_tokens=min(computed_tokens, TOKENS_MAX),
            prefills=prefills,
            now_s=now_s,
        )
        if learned is None or now_s - self._first_byte_s < SEEN_S:
            return
        state.told = True
        state.learned_s = now_s
        count = min(learned.prefills, TOKENS_MAX)
        # The sum of squares is not told: as if all prompts were alike, and nothing was matched.
        tokens = max(1.0, learned.tokens / count)
        token, pair = self._work_parts(tokens, 0.0)
        step = self._steps(tokens) * self._prior.step_s
        parts = (count * token, count * pair, count * step)
        # Nor is told what was matched, so the sums say how fast it is and not why.
        self._learn_prefills(slot, state, Group(parts, learned.observed_s, count), shapes=False)

    def state(self, slot: int) -> RateState:
        """For the debug page."""
        state = self._slots.get(slot) or _Slot()
        pool_log = self._prefill.pool_log()
        return RateState(
            rates=self.rates(slot),
            prefills=state.prefills,
            answers=state.answers,
            speed_ratio=math.exp(pool_log - self._prefill.level_log(slot, pool_log)),
            error_ratio=state.error_ratio,
            learned_s=state.learned_s,
        )

    def _slot(self, slot: int) -> _Slot:
        state = self._slots.get(slot)
        if state is None:
            state = self._slots[slot] = _Slot()
        return state

    def _work_parts(self, uncached_tokens: float, matched_tokens: float) -> tuple[float, float]:
        """Prefill seconds by the prior, linear and quadratic."""
        pairs = uncached_tokens * (matched_tokens + uncached_tokens / 2)
        return self._prior.token_s * uncached_tokens, self._prior.pair_s * pairs

    def _steps(self, tokens: float) -> float:
        """Engine steps of a prompt; a part of one, where prompts share the last, counts so."""
        return max(1.0, tokens / self._chunk_tokens)

    def _note_error(self, slot: int, state: _Slot, group: Group) -> None:
        """How far off the group would have been predicted."""
        level = math.exp(self._prefill.level_log(slot, self._prefill.pool_log()))
        predicted_s = level * predict_s(group.parts, self._prefill.shape.weights)
        error = min(ERROR_MAX, abs(group.observed_s / predicted_s - 1))
        mean = state.error_ratio
        state.error_ratio = error if mean is None else mean + ERROR_WEIGHT * (error - mean)

    def _learn_prefills(
        self, slot: int, state: _Slot, group: Group, *, shapes: bool = True
    ) -> None:
        parts, observed_s, prefills = group
        state.prefills += prefills
        # Steps are the least certain part: what consists of them says little about the work.
        count = min(COUNT_MAX, float(prefills))
        worth = count * (parts[0] + parts[1]) / (parts[0] + parts[1] + parts[2])
        other = self._prefill.learn(
            slot, parts, observed_s, count=count, worth=worth, shapes=shapes
        )
        self._publish(slot, other)

    def _publish(self, *slots: int | None) -> None:
        """Put learned rates where `rates` finds them, where they changed enough to matter."""
        # Drawn to the prior twice over, so less: a pool of one endpoint has little evidence.
        prefill_log = self._prefill.pool_log(self._prefill.pool_log())
        decode_log = self._decode.pool_log(self._decode.pool_log(prefill_log))
        rates = self._rates_of(prefill_log, decode_log)
        if _changed(self._pool_rates, rates):
            self._pool_rates, self._pool_logs = rates, (prefill_log, decode_log)
            self._by_class.clear()
            self.version += 1
        for slot in slots:
            if slot is None:
                continue
            prefill_apart = self._prefill.apart_log(slot)
            decode_apart = self._decode.apart_log(slot)
            if prefill_apart is None:
                prefill_apart = decode_apart or 0.0
            if decode_apart is None:
                # What is known of its prefills goes for its decode steps, until they were seen.
                decode_apart = prefill_apart
            old = self._classes.get(slot)
            was = old or AS_THE_POOL
            new = (_class(prefill_apart, was[0]), _class(decode_apart, was[1]))
            if slot in self._slots and self._slots[slot].told:
                # What histograms tell is rough, and where nothing else is known a herd goes
                # unseen: nobody is taken to be faster than the pool on their word.
                new = (max(0, new[0]), max(0, new[1]))
            if self._assumed.pop(slot, None) is not None or new != old:
                self._classes[slot] = new
                self._note_fastest()

    def _note_fastest(self) -> None:
        """Some class changed."""
        self.version += 1
        places = self._classes.values()
        prefill = min((place[0] for place in places), default=0)
        self._fastest = (prefill, min((place[1] for place in places), default=0))

    def _rates_of(self, prefill_log: float, decode_log: float) -> Rates:
        prior = self._prior
        token, pair, _ = self._prefill.shape.weights
        step, request, context = self._decode.shape.weights
        work, decode = math.exp(prefill_log) * self._bias_ratio, math.exp(decode_log)
        return Rates(
            token_s=prior.token_s * _bounded(work * token),
            pair_s=prior.pair_s * _bounded(work * pair),
            step_s=prior.step_s * _bounded(decode * step),
            step_request_s=prior.step_request_s * _bounded(decode * request),
            step_token_s=prior.step_token_s * _bounded(decode * context),
        )


def _class(log: float, old: int) -> int:
    """Of an endpoint that is so much slower than the pool and was in class `old`."""
    place = log / QUANTUM_LOG
    return old if abs(place - old) <= CLASS_HOLD else round(place)


def _believed(count: int) -> int:
    return min(max(count, 0), TOKENS_MAX)


def _bounded(factor: float) -> float:
    return min(max(factor, 1 / RATE_FACTOR_MAX), RATE_FACTOR_MAX)


def _changed(old: Rates, new: Rates) -> bool:
    """Some rate moved by more than `CHANGE_RATIO`."""
    return (
        abs(new.token_s - old.token_s) > CHANGE_RATIO * old.token_s
        or abs(new.pair_s - old.pair_s) > CHANGE_RATIO * old.pair_s
        or abs(new.step_s - old.step_s) > CHANGE_RATIO * old.step_s
        or abs(new.step_request_s - old.step_request_s) > CHANGE_RATIO * old.step_request_s
        or abs(new.step_token_s - old.step_token_s) > CHANGE_RATIO * old.step_token_s
    )
