"""Our hold, put around any policy: a request stays here until the endpoint it wants has room.

A request does not fall through to its second choice. At every event one pass over the held
requests asks the inner policy again where each wants to go, and lets go those whose gate is open:

    idle    nothing of ours in flight there: always open
    prefill B <= H        H = max_num_batched_tokens * a: one full engine chunk, in seconds
    KV      distinct prompt blocks in use + about one block per request for its output + what the
            request would add, not over the endpoint's blocks
    batch   requests in flight below max_num_seqs

    B = max(0, sum of w of requests without first byte - progress of the oldest of them)
    w = a*u + b*u*(m + u/2)     seconds to prefill u uncached tokens behind m cached ones
    progress = min(w of the oldest, now - the later of its dispatch and the last first byte there)

The order is the response ratio (wait + w + c)/(w + c), c = 0.5 s, highest first, but whoever has
waited 40 s comes first and closes its endpoint to the others until it is gone. Of a long queue
only the first 128 are asked. A full queue lets its oldest go at the next pass, gates or not. A pass
asks again only when something was charged or released or a gate opened since the last.

Where first bytes are hidden, a prefill counts as done when its predicted time is over.
`a` and `b` are the true constants of each endpoint's engine: the hold is not to lose by a wrong
rate. Source: our own policy, with the KV room from own counts.
"""

from __future__ import annotations

from math import ceil

import msgspec

from bench.sim.conditions import PolicyContext
from bench.sim.model import SimRequest, View
from bench.sim.policies.account import Account, EndpointLoad
from bench.sim.policies.peer import Wishing, uncached_tokens

FAIRNESS_S = 0.5
"""c of the response ratio: larger is kinder to large requests."""
GUARD_S = 40.0
PASS_REQUESTS_MAX = 128
QUEUE_REQUESTS_MAX = 2048
OUTPUT_TOKENS = 512
"""KV tokens expected for output and unfilled blocks, per request in flight."""
NEW_OUTPUT_TOKENS = 300
"""The same for the request that asks."""


class _Waiting(msgspec.Struct):
    """A request dispatched and not at its first byte."""

    dispatched_s: float
    work_s: float


class _Gate(msgspec.Struct):
    """What the hold knows of one endpoint beside the account."""

    waiting: dict[int, _Waiting] = msgspec.field(default_factory=dict)
    """By request number, in order of dispatch."""
    waiting_s: float = 0.0
    """Sum of their work."""
    first_byte_s: float = 0.0
    """When the last first byte came."""
    private_blocks: int = 0
    """Blocks of requests in flight that no other request can share."""


class _InFlight(msgspec.Struct):
    endpoint: int
    private_blocks: int


class _HeldRequest(msgspec.Struct):
    request: SimRequest
    work_s: float
    """Prefill where it last wanted to go."""


class Held:
    """See the module."""

    def __init__(self, inner: Wishing, context: PolicyContext) -> None:
        self._inner = inner
        self._context = context
        self._account = Account(pins=True)
        self._gates: dict[int, _Gate] = {}
        self._inflight: dict[int, _InFlight] = {}
        self._queue: dict[int, _HeldRequest] = {}
        # What spares asking in vain: most passes are made because time went by.
        self._new: list[int] = []
        """Numbers of requests held since the last pass."""
        self._changed = False
        """Something was charged or released since the last pass that asked everyone."""
        self._open: set[int] = set()
        """Endpoints with room for a request of one block, at the last pass."""
        self._closed: set[int] = set()
        """Endpoints kept for a request that waited too long."""

    @property
    def held(self) -> int:
        """Requests held now."""
        return len(self._queue)

    # -- the policy --------------------------------------------------------------------------

    def choose(self, request: SimRequest, view: View, now_s: float) -> int | None:
        """As in `Policy`; `None`: `pass_held` will return it. Nobody overtakes held requests:
        while there are any, a new one is held too, until the pass at the same event."""
        if view.endpoints and not self._queue:
            endpoint = self._inner.wish(request, view, now_s)
            if self._is_open(request, endpoint, view, now_s):
                self._dispatch(request, endpoint, view, now_s)
                return endpoint
        work_s = self._cheapest_work_s(request, view)
        self._queue[request.number] = _HeldRequest(request, work_s)
        self._new.append(request.number)
        return None

    def pass_held(self, view: View, now_s: float) -> list[tuple[SimRequest, int]]:
        """Let go what may go now: (request, endpoint), charged already. To be called after every
        arrival, first byte and end, and every few dozen milliseconds, as prefill ages."""
        if not self._queue or not view.endpoints:
            return []
        gone = self._overflow(view, now_s)
        for held in self._to_ask(view, now_s):
            if self._closed.issuperset(self._open):
                break
            endpoint = self._inner.wish(held.request, view, now_s)
            if endpoint in self._closed:
                continue
            if self._is_open(held.request, endpoint, view, now_s):
                gone.append(self._let_go(held.request, endpoint, view, now_s))
                if not self._has_room(endpoint, view, now_s):
                    self._open.discard(endpoint)
            else:
                held.work_s = self._work_s(held.request, view, endpoint)
                if now_s - held.request.arrival_s > GUARD_S:
                    self._closed.add(endpoint)
        return gone

    def first_byte(self, request: SimRequest, now_s: float) -> None:
        """As in `Policy`."""
        self._changed = True
        self._inner.first_byte(request, now_s)
        self._computed(request.number, now_s)

    def ended(self, request: SimRequest, now_s: float, *, ok: bool) -> None:
        """As in `Policy`; also of a request still held, which is then dropped."""
        self._changed = True
        self._inner.ended(request, now_s, ok=ok)
        self._queue.pop(request.number, None)
        self._forget(request, now_s)

    def left(self, endpoint: int) -> None:
        """As in `Policy`."""
        self._changed = True
        self._inner.left(endpoint)
        self._account.left(endpoint)
        self._gates.pop(endpoint, None)
        gone = [number for number, each in self._inflight.items() if each.endpoint == endpoint]
        for number in gone:
            del self._inflight[number]

    def backlog_s(self, endpoint: int, now_s: float) -> float:
        """B: seconds of prefill outstanding at an endpoint, >= 0."""
        gate = self._gate(endpoint)
        if not self._context.first_byte_seen:
            _compute_by_prediction(gate, now_s)
        if not gate.waiting:
            return 0.0
        oldest = next(iter(gate.waiting.values()))
        since_s = max(oldest.dispatched_s, gate.first_byte_s)
        return max(0.0, gate.waiting_s - min(oldest.work_s, now_s - since_s))

    # -- the queue ---------------------------------------------------------------------------

    def _to_ask(self, view: View, now_s: float) -> list[_HeldRequest]:
        """Whom this pass asks, in order: nobody while no endpoint has room, only those who came
        since the last pass while no gate opened and nothing was charged or released."""
        before = self._open
        self._open = {each for each in view.endpoints if self._has_room(each, view, now_s)}
        if not self._open:
            return []
        if self._changed or not self._open <= before:
            self._changed = False
            self._closed.clear()
            asked = list(self._queue.values())
        else:
            asked = [self._queue[number] for number in self._new if number in self._queue]
        self._new.clear()

        def order(held: _HeldRequest) -> tuple[bool, float]:
            wait_s = now_s - held.request.arrival_s
            base_s = held.work_s + FAIRNESS_S
            return wait_s <= GUARD_S, -(wait_s + base_s) / base_s

        return sorted(asked, key=order)[:PASS_REQUESTS_MAX]

    def _overflow(self, view: View, now_s: float) -> list[tuple[SimRequest, int]]:
        gone = []
        while len(self._queue) > QUEUE_REQUESTS_MAX:
            oldest = next(iter(self._queue.values())).request
            endpoint = self._inner.wish(oldest, view, now_s)
            gone.append(self._let_go(oldest, endpoint, view, now_s))
        return gone

    def _let_go(
        self, request: SimRequest, endpoint: int, view: View, now_s: float
    ) -> tuple[SimRequest, int]:
        del self._queue[request.number]
        self._dispatch(request, endpoint, view, now_s)
        return request, endpoint

    # -- the gate ----------------------------------------------------------------------------

    def _is_open(self, request: SimRequest, endpoint: int, view: View, now_s: float) -> bool:
        pins = self._account.load(endpoint).pins
        shared = sum(name in pins for name in request.blocks)
        need = ceil((request.prompt_tokens + NEW_OUTPUT_TOKENS) / self._context.block_tokens)
        return self._has_room(endpoint, view, now_s, new_blocks=need - shared)

    def _has_room(self, endpoint: int, view: View, now_s: float, *, new_blocks: int = 1) -> bool:
        """Whether the gate is open to a request that adds so many blocks."""
        load = self._account.load(endpoint)
        if not load.requests:
            return True
        if load.requests >= self._context.max_num_seqs:
            return False
        blocks = view.kv_tokens(endpoint) // self._context.block_tokens
        if self._pinned_blocks(endpoint, load) + new_blocks > blocks:
            return False
        chunk_s = self._context.max_num_batched_tokens * self._token_s(endpoint)
        return self.backlog_s(endpoint, now_s) <= chunk_s

    def _pinned_blocks(self, endpoint: int, load: EndpointLoad) -> int:
        return len(load.pins) + self._gate(endpoint).private_blocks

    # -- the account -------------------------------------------------------------------------

    def _gate(self, endpoint: int) -> _Gate:
        gate = self._gates.get(endpoint)
        if gate is None:
            gate = self._gates[endpoint] = _Gate()
        return gate

    def _dispatch(self, request: SimRequest, endpoint: int, view: View, now_s: float) -> None:
        self._changed = True
        self._forget(request, now_s)  # sent again after its endpoint failed
        work_s = self._work_s(request, view, endpoint)
        self._inner.charge(request, endpoint, view, now_s)
        self._account.charge(request, endpoint, prefill_tokens=0)
        size = self._context.block_tokens
        private_blocks = request.prompt_tokens // size - len(request.blocks)
        private_blocks += ceil(OUTPUT_TOKENS / size)
        gate = self._gate(endpoint)
        gate.private_blocks += private_blocks
        gate.waiting[request.number] = _Waiting(now_s, work_s)
        gate.waiting_s += work_s
        self._inflight[request.number] = _InFlight(endpoint, private_blocks)

    def _forget(self, request: SimRequest, now_s: float) -> None:
        """Take a request in flight off its endpoint."""
        self._computed(request.number, now_s)
        self._account.release(request)
        inflight = self._inflight.pop(request.number, None)
        if inflight is not None:
            self._gate(inflight.endpoint).private_blocks -= inflight.private_blocks

    def _computed(self, number: int, now_s: float) -> None:
        inflight = self._inflight.get(number)
        if inflight is not None:
            _compute(self._gate(inflight.endpoint), number, now_s)

    # -- the price ---------------------------------------------------------------------------

    def _cheapest_work_s(self, request: SimRequest, view: View) -> float:
        return min((self._work_s(request, view, each) for each in view.endpoints), default=0.0)

    def _work_s(self, request: SimRequest, view: View, endpoint: int) -> float:
        cost = self._context.costs[endpoint]
        uncached = uncached_tokens(request, view, endpoint)
        pairs = uncached * (request.prompt_tokens - uncached + uncached / 2)
        return (uncached * cost.prefill_token_s + pairs * cost.attention_pair_s) / cost.speed

    def _token_s(self, endpoint: int) -> float:
        cost = self._context.costs[endpoint]
        return cost.prefill_token_s / cost.speed


def _compute(gate: _Gate, number: int, now_s: float) -> None:
    """A prefill is done, if it was not yet."""
    done = gate.waiting.pop(number, None)
    if done is None:
        return
    # Sums of floats drift; an empty set has nothing to compute, exactly.
    gate.waiting_s = gate.waiting_s - done.work_s if gate.waiting else 0.0
    gate.first_byte_s = max(gate.first_byte_s, now_s)


def _compute_by_prediction(gate: _Gate, now_s: float) -> None:
    """Take the oldest prefills for done whose time is over, each when it should have ended."""
    while gate.waiting:
        number, oldest = next(iter(gate.waiting.items()))
        done_s = max(oldest.dispatched_s, gate.first_byte_s) + oldest.work_s
        if done_s > now_s:
            break
        _compute(gate, number, done_s)
