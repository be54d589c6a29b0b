"""A router of the simulation: a policy, what it is shown, and the requests it keeps."""

from __future__ import annotations

from collections.abc import Sequence

from bench.sim.agenda import Agenda
from bench.sim.conditions import HoldingPolicy, PolicyError
from bench.sim.endpoints import Endpoint
from bench.sim.model import Outcome, Policy, Scrape, SimRequest
from bench.sim.oracle import Oracle, TrueState
from bench.sim.prefix import Prefixes
from bench.sim.regret import Judgement, Rethinking


class FleetView:
    """What one router's policy may look at; implements View and TrueView. One per router, because
    approximate prefix information is the router's own."""

    def __init__(
        self, all_endpoints: Sequence[Endpoint], prefixes: Prefixes, oracle: Oracle, agenda: Agenda
    ) -> None:
        self.endpoints: Sequence[int] = ()
        """See View; set whenever one comes or goes."""
        self._all = all_endpoints
        self._prefixes = prefixes
        self._oracle = oracle
        self._agenda = agenda

    def matched_tokens(self, request: SimRequest, endpoint: int) -> int:
        """See View. Always below `request.prompt_tokens`: no engine finds the last token."""
        size = self._all[endpoint].limits.block_tokens
        blocks_max = (request.prompt_tokens - 1) // size
        return self._prefixes.matched_blocks(request, endpoint, blocks_max) * size

    def scrape(self, endpoint: int) -> Scrape | None:
        """See View."""
        there, now_s = self._all[endpoint], self._agenda.now_s
        if now_s >= there.scrapes.next_s:
            there.scrapes.look(there.engine, now_s)
        return there.scrapes.newest

    def kv_tokens(self, endpoint: int) -> int:
        """See View."""
        return self._all[endpoint].limits.kv_tokens

    def expected_ttft_s(self, request: SimRequest, endpoint: int, now_s: float) -> float:
        """See TrueView."""
        return self._oracle.expected_ttft_s(request, endpoint, now_s)

    def true_state(self, request: SimRequest, endpoint: int, now_s: float) -> TrueState:
        """See TrueView."""
        return self._oracle.true_state(request, endpoint, now_s)


class Router:
    """See the module."""

    def __init__(
        self, number: int, policy: Policy, view: FleetView, prefixes: Prefixes, *, seen: bool
    ) -> None:
        """`seen`: the router is told of first bytes."""
        self.number = number
        self.policy = policy
        self.view = view
        self.held: dict[int, Outcome] = {}
        """By number of the request, in order of arrival."""
        self.stirred = False
        """Something happened that may let held requests go."""
        self.rechecks = False
        """A recheck is planned."""
        self._prefixes = prefixes
        self._seen = seen
        self._rethinks = policy if isinstance(policy, Rethinking) else None

    def rethink(self, request: SimRequest, now_s: float) -> Sequence[Judgement]:
        """What the policy would decide if it knew better; to be asked before `choose`."""
        if self._rethinks is None:
            return ()
        return self._rethinks.rethink(request, self.view, now_s)

    def choose(self, outcome: Outcome, now_s: float) -> int | None:
        """Ask the policy; a request it keeps is held from here on. Raises: PolicyError."""
        endpoint = self.policy.choose(outcome.request, self.view, now_s)
        self.stirred = True
        if endpoint is None:
            if not isinstance(self.policy, HoldingPolicy):
                raise PolicyError(f"request {outcome.request.number} was kept without pass_held")
            self.held[outcome.request.number] = outcome
        else:
            self._check(outcome.request, endpoint)
        return endpoint

    def pass_held(self, now_s: float) -> list[tuple[Outcome, int]]:
        """The held requests that the policy lets go. Raises: PolicyError."""
        self.stirred = False
        if not self.held or not self.view.endpoints:
            return []
        assert isinstance(self.policy, HoldingPolicy), "only such a policy has requests held"
        passed = []
        for request, endpoint in self.policy.pass_held(self.view, now_s):
            self._check(request, endpoint)
            outcome = self.held.pop(request.number, None)
            if outcome is None:
                raise PolicyError(f"request {request.number} was passed but is not held")
            passed.append((outcome, endpoint))
        return passed

    def sent(self, request: SimRequest, endpoint: int) -> None:
        """A request of this router goes there."""
        self._prefixes.sent(request, endpoint)

    def first_byte(self, request: SimRequest, now_s: float) -> None:
        """An answer begins."""
        if self._seen:
            self.policy.first_byte(request, now_s)
            self.stirred = True

    def ended(self, request: SimRequest, now_s: float, *, ok: bool) -> None:
        """An answer ends, or the request failed."""
        self.policy.ended(request, now_s, ok=ok)
        self.stirred = True

    def left(self, endpoint: int) -> None:
        """An endpoint lost all it held, or is gone."""
        self._prefixes.forget(endpoint)
        self.policy.left(endpoint)

    def set_endpoints(self, alive: Sequence[int]) -> None:
        """Endpoints came or went."""
        self.view.endpoints = alive
        self.stirred = True

    def _check(self, request: SimRequest, endpoint: int) -> None:
        if endpoint not in self.view.endpoints:
            raise PolicyError(
                f"request {request.number} was sent to endpoint {endpoint}, which is not alive"
            )
