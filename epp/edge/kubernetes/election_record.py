"""What a Lease says, and what one candidate may conclude from it. No I/O, no clock of its own.

Safety is two inequalities. Who leads stops `renew_s` after it *sent* the last write that succeeded;
who waits takes over no earlier than the lease's duration after it *received* a record that it had
not seen before. Sending comes before, receiving after the moment the API server wrote, and
`renew_s` is shorter than the duration by enough for clocks that run apart by 5 %: so the one has
stopped before the other begins. Clocks are read on one machine only; the times in the record are
for people. The resource version makes every write fail when another came first.

An absent Lease says nothing about who led a moment ago. A candidate that ever saw one waits a whole
duration before it makes a new one, unless it leads itself. A candidate that never saw one makes it
at once: that is the first start of a pool, and nobody should wait for it. So a Lease that is
deleted by hand may give two leaders, for one renewal period, only to a candidate that starts in the
same seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any

import msgspec

from epp.core.errors import EppError
from epp.edge.kubernetes.objects import LEASES

CLOCKS_APART = 0.05
"""Two machines' seconds differ by less than this ratio, together with our own delays."""
INT32_MAX = 2**31 - 1


class RecordError(EppError):
    """What came is not a Lease, or not one that can be replaced safely."""


class Timing(msgspec.Struct, frozen=True):
    """How long things take; the defaults are those of Kubernetes' own components."""

    lease_s: int = 15
    """Others wait this long after a record last changed; whole seconds, since the record says it in
    such."""
    renew_s: float = 10.0
    """Leadership ends this long after the last successful renewal was sent."""
    retry_s: float = 2.0
    """Between two looks at the Lease, give or take a fifth."""

    def __post_init__(self) -> None:
        assert self.lease_s >= 1, "the API server refuses 0"
        assert 0 < self.retry_s * 1.2 < self.renew_s <= self.lease_s * (1 - 2 * CLOCKS_APART)


class Lease:
    """A Lease as it was read. Whatever else it holds is kept when it is written again.

    Fields that another program left out or filled with something unexpected read as unset.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        spec = document.get("spec")
        self.spec: Mapping[str, Any] = spec if isinstance(spec, dict) else {}

    @property
    def holder(self) -> str:
        """Empty: nobody."""
        holder = self.spec.get("holderIdentity")
        return "" if holder is None else str(holder)

    @property
    def duration_s(self) -> int | None:
        return _count(self.spec.get("leaseDurationSeconds"), least=1)

    @property
    def transitions(self) -> int:
        return _count(self.spec.get("leaseTransitions"), least=0) or 0

    def written(self, **changes: object) -> bytes:
        """It with changes to its spec, as a body; replaces only the version that was read."""
        return msgspec.json.encode({**self._document, "spec": {**self.spec, **changes}})


def _count(value: object, *, least: int) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return value if is_count and least <= value <= INT32_MAX else None  # type: ignore[operator,return-value]


def read_lease(body: bytes) -> Lease:
    """An answer of the API server as a Lease.

    Raises: RecordError when it is none, or has no resource version: a write without one would
        overwrite whatever came in between.
    """
    try:
        document = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise RecordError(f"the answer is not a Lease: {error}") from None
    kind, metadata = document.get("kind", LEASES.kind), document.get("metadata")
    version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
    if kind != LEASES.kind or not isinstance(version, str) or not version:
        raise RecordError(f"the answer is not a Lease: kind {kind!r}, resource version {version!r}")
    return Lease(document)


def micro_time(now: datetime) -> str:
    """A time as the API server takes it: RFC 3339 in UTC with exactly six digits of a second."""
    return now.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The bodies one candidate writes.

    Args:
        identity: unlike that of every other candidate, also of its own predecessor.
    """

    name: str
    namespace: str
    identity: str
    lease_s: int

    def new(self, now: datetime) -> bytes:
        """A Lease that is ours, where there is none."""
        lease = Lease(
            {
                "apiVersion": f"{LEASES.group}/{LEASES.version}",
                "kind": LEASES.kind,
                "metadata": {"name": self.name, "namespace": self.namespace},
            }
        )
        return self._ours(lease, now, leaseTransitions=0, acquireTime=micro_time(now))

    def of(self, lease: Lease, now: datetime) -> bytes:
        """The Lease renewed, or taken over: then it counts one more transition."""
        since = lease.spec.get("acquireTime")
        if lease.holder == self.identity and isinstance(since, str):
            return self._ours(lease, now, leaseTransitions=lease.transitions)
        transitions = min(lease.transitions + 1, INT32_MAX)
        return self._ours(lease, now, leaseTransitions=transitions, acquireTime=micro_time(now))

    def _ours(self, lease: Lease, now: datetime, **changes: object) -> bytes:
        return lease.written(
            holderIdentity=self.identity,
            leaseDurationSeconds=self.lease_s,
            renewTime=micro_time(now),
            **changes,
        )

    def released(self, lease: Lease, now: datetime) -> bytes:
        """The Lease as nobody's, free for whoever looks next."""
        return lease.written(
            holderIdentity="",
            leaseDurationSeconds=1,
            leaseTransitions=lease.transitions,
            acquireTime=micro_time(now),
            renewTime=micro_time(now),
        )


class Step(Enum):
    """What to do after a look at the Lease."""

    CREATE = "create"
    REPLACE = "replace"
    WAIT = "wait"


class Candidate:
    """What one candidate knows. All times are its own monotonic seconds."""

    def __init__(self, identity: str, timing: Timing) -> None:
        self.identity = identity
        self.timing = timing
        self.lead_until_s = float("-inf")
        """It leads before this moment, and not at it."""
        self.free_at_s = float("-inf")
        """When it may take what it last saw, by its own clock."""
        self._seen: Mapping[str, Any] | None = None
        self._absent = False
        self.holder: str | None = None
        """As last seen; empty: nobody. `None`: there is no Lease, or none was seen yet."""

    def leads(self, now_s: float) -> bool:
        """It may act as the leader at this moment."""
        return now_s < self.lead_until_s

    def look(self, lease: Lease | None, now_s: float) -> Step:
        """Judge what was read.

        Args:
            lease: `None`: there is none.
            now_s: read after the answer had come.
        """
        if lease is None:
            return self._look_at_nothing(now_s)
        if lease.spec != self._seen or self._absent:
            self._see(lease, now_s)
        if lease.holder != self.identity:
            self.lose()
        mine_or_free = lease.holder in ("", self.identity)
        return Step.REPLACE if mine_or_free or now_s >= self.free_at_s else Step.WAIT

    def _see(self, lease: Lease, now_s: float) -> None:
        self._seen, self._absent, self.holder = lease.spec, False, lease.holder
        self.free_at_s = now_s + (lease.duration_s or self.timing.lease_s)

    def _look_at_nothing(self, now_s: float) -> Step:
        if not self._absent:
            known_s = Lease({"spec": self._seen}).duration_s or 0
            self._absent, self.holder = True, None
            if self._seen is not None:
                self.free_at_s = now_s + max(known_s, self.timing.lease_s)
        return Step.CREATE if self.leads(now_s) or now_s >= self.free_at_s else Step.WAIT

    def win(self, lease: Lease, sent_s: float, now_s: float) -> None:
        """A write of ours succeeded.

        Args:
            lease: what the API server made of it.
            sent_s: read before the write was sent.
        Raises: RecordError when the answer is not ours after all.
        """
        if lease.holder != self.identity:
            raise RecordError(f"our write was answered with a Lease of {lease.holder!r}")
        self._see(lease, now_s)
        self.lead_until_s = sent_s + self.timing.renew_s

    def lose(self) -> None:
        """Not a leader from here on, until the next write that succeeds."""
        self.lead_until_s = float("-inf")
