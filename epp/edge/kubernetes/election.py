"""Which of several EPPs leads: the one whose name stands in a Lease.

Every `retry_s` a candidate reads the Lease and, when `election_record` says so, writes it. Failures
of any kind are logged and tried again; nothing but `stop` or a cancel ends it. Leadership ends by
the clock: `is_leader` compares with it each time it is read, so neither a call that hangs nor a
blocked event loop can prolong it, and a timer tells `on_change` even while a call hangs. A write
whose outcome is unknown does not count; the next look shows what became of it.

When the API server cannot be reached for `renew_s`, nobody leads until it is back. After a leader
vanished, another leads within about a lease's duration and one retry; after a release, within one
retry.

Cost: two requests per `retry_s` for who leads, one for who waits; 0.3 ms of CPU each.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from random import Random
from typing import Protocol
from uuid import uuid4

from epp.core.errors import EppError
from epp.core.model import Clock
from epp.edge.kubernetes.client import ApiError
from epp.edge.kubernetes.election_record import (
    Candidate,
    Claim,
    Lease,
    RecordError,
    Step,
    Timing,
    read_lease,
)
from epp.edge.kubernetes.objects import LEASES

LOG_PERIOD_S = 60.0
"""Failures are logged once in this time, not each."""
JITTER = 0.2
LOOK_S = 0.2
"""How often one who has stopped looks whether another leads."""
TIMER_S_MIN = 0.001

_log = logging.getLogger(__name__)


class LeaseApi(Protocol):
    """What an elector needs of `ApiClient`."""

    async def get(self, path: str) -> bytes:
        """The object at a path."""

    async def create(self, path: str, body: bytes) -> bytes:
        """Post a new object."""

    async def replace(self, path: str, body: bytes) -> bytes:
        """Put an object in the place of one."""


def lease_name(namespace: str, pool: str) -> str:
    """The name the reference EPP uses, so that both take part in one election."""
    return f"epp-{namespace}-{pool}.llm-d.ai"


def new_identity(pod_name: str) -> str:
    """Unlike every other, also that of the same pod's former process."""
    return f"{pod_name}_{uuid4()}"


def _utc_now() -> datetime:
    return datetime.now(UTC)


class LeaderElector:
    """Takes part in the election for one Lease.

    Args:
        namespace, name: of the Lease.
        identity: see `new_identity`.
        on_change: told `True` and `False` in turn, synchronously on the event loop; `False` before
            anything else is done about it.
        clock: must not be the event loop's, which may stand still while the loop is busy.
        wall_clock: for the times in the record, which nothing depends on.
    """

    def __init__(
        self,
        client: LeaseApi,
        *,
        namespace: str,
        name: str,
        identity: str,
        on_change: Callable[[bool], None],
        rng: Random,
        timing: Timing | None = None,
        clock: Clock = time.monotonic,
        wall_clock: Callable[[], datetime] = _utc_now,
    ) -> None:
        self._client = client
        self._folder = LEASES.path(namespace)
        self._path = LEASES.path(namespace, name)
        self._timing = timing or Timing()
        self._call_s = self._timing.renew_s / 2
        self._candidate = Candidate(identity, self._timing)
        self._claim = Claim(
            name=name, namespace=namespace, identity=identity, lease_s=self._timing.lease_s
        )
        self._on_change = on_change
        self._rng = rng
        self._clock = clock
        self._wall_clock = wall_clock
        self._told = False
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._stopped = False
        self._seen_holder = ""
        self._failure = ""
        """Of the last attempt; empty: it succeeded."""
        self._logged_s = float("-inf")

    @property
    def is_leader(self) -> bool:
        return self._candidate.leads(self._clock())

    @property
    def identity(self) -> str:
        return self._candidate.identity

    @property
    def holder(self) -> str | None:
        """Who leads as last seen; empty: nobody. `None`: no Lease was seen."""
        return self._candidate.holder

    # -- running ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Take part until `stop`, or until cancelled: then leadership ends first, and the Lease is
        released if the API server answers within half of `renew_s`. In a task of its own."""
        if self._stopped:
            return
        self._task = asyncio.current_task()
        try:
            while not self._stopped:
                succeeded = await self._attempt()
                await asyncio.sleep(self._pause_s(succeeded))
        finally:
            self._lose()
            await self._release()

    async def stop(self) -> None:
        """Lead no more, from the first moment on; returns when `run` has ended. It does not start
        again."""
        self._stopped = True
        self._lose()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def succeeded(self, within_s: float) -> bool:
        """After `stop`: wait until another one leads, at most so long; whether one does."""
        try:
            async with asyncio.timeout(within_s):
                while True:
                    with contextlib.suppress(EppError, TimeoutError):  # of one look
                        lease = await self._read()
                        if lease is not None and lease.holder not in ("", self.identity):
                            return True
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            return False

    def _pause_s(self, succeeded: bool) -> float:
        retry_s = self._timing.retry_s * self._rng.uniform(1 - JITTER, 1 + JITTER)
        if self.is_leader:
            return retry_s if succeeded else retry_s / 4
        free_s = self._candidate.free_at_s - self._clock()
        # Who waits for the end of a lease comes just after it, and not all at the same moment.
        soon_s = free_s + self._timing.retry_s * JITTER * self._rng.random()
        return min(retry_s, soon_s) if free_s > 0 else retry_s

    async def _attempt(self) -> bool:
        """One look and what follows from it; `False` when it failed."""
        now_s = self._clock()
        left_s = self._candidate.lead_until_s - now_s
        try:
            async with asyncio.timeout(left_s if left_s > 0 else self._timing.renew_s):
                await self._renew()
        except TimeoutError:
            self._failed("the API server does not answer in time")
        except RecordError as error:
            self._failed(str(error))
        except ApiError as error:
            if error.status != 409:  # another was faster: the next look shows who
                self._failed(_explained(error))
        else:
            self._failure = ""
            return True
        finally:
            self._settle()
        return False

    async def _renew(self) -> None:
        lease = await self._read()
        step = self._candidate.look(lease, self._clock())
        self._say_who_leads()
        self._settle()
        if step is Step.WAIT:
            return
        sent_s = self._clock()
        async with asyncio.timeout(self._call_s):
            now = self._wall_clock()
            if lease is None:
                answer = await self._client.create(self._folder, self._claim.new(now))
            else:
                answer = await self._client.replace(self._path, self._claim.of(lease, now))
        self._settle()
        if not self._stopped:
            self._candidate.win(read_lease(answer), sent_s, self._clock())

    async def _read(self) -> Lease | None:
        try:
            async with asyncio.timeout(self._call_s):
                return read_lease(await self._client.get(self._path))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def _release(self) -> None:
        """Make the Lease nobody's if it is ours, also by a write whose outcome we never learned."""
        try:
            async with asyncio.timeout(self._call_s):
                lease = await self._read()
                if lease is not None and lease.holder == self.identity:
                    body = self._claim.released(lease, self._wall_clock())
                    await self._client.replace(self._path, body)
                    _log.info("released the lease %s", self._claim.name)
        except (EppError, TimeoutError) as error:
            _log.warning(
                "the lease %s is not released (%s); it runs out after %d s",
                self._claim.name,
                str(error) or "no answer in time",
                self._timing.lease_s,
            )

    # -- telling ---------------------------------------------------------------------------

    def _lose(self) -> None:
        self._candidate.lose()
        self._settle(ending=True)

    def _settle(self, *, ending: bool = False) -> None:
        """Tell of a change, and come back when leadership runs out by itself."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        left_s = self._candidate.lead_until_s - self._clock()
        leads = left_s > 0
        if leads:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(left_s, TIMER_S_MIN), self._settle)
        if leads == self._told:
            return
        self._told = leads
        if leads:
            _log.info("leading: the lease %s is ours (%s)", self._claim.name, self.identity)
        elif ending:
            _log.info("leading no more, since we end: the lease %s", self._claim.name)
        else:
            _log.warning("leading no more: the lease %s (%s)", self._claim.name, self._why())
        self._on_change(leads)

    def _why(self) -> str:
        if self.holder not in (None, "", self.identity):
            return f"it is held by {self.holder!r}"
        return self._failure or "it was not renewed in time"

    def _say_who_leads(self) -> None:
        """One line when another one leads, and when yet another one does."""
        holder = self.holder or ""
        if holder != self._seen_holder:
            self._seen_holder = holder
            if holder and holder != self.identity:
                _log.info("standing by: the lease %s is held by %s", self._claim.name, holder)

    def _failed(self, failure: str) -> None:
        self._failure = failure
        now_s = self._clock()
        if now_s - self._logged_s >= LOG_PERIOD_S:
            self._logged_s = now_s
            _log.warning("the lease %s cannot be renewed or taken: %s", self._claim.name, failure)


def _explained(error: ApiError) -> str:
    if error.status == 403:
        return f"{error}; a Role must allow get, create and update of leases.{LEASES.group}"
    return str(error)
