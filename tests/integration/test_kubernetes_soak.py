"""Thousands of random changes under random faults: in the end the endpoints are the API server's.

Changes and faults are drawn from a seed, and a failure names it; how they interleave with the
follower is up to the machine. Every few hundred changes the faults stop, and what the listener was
told must become what the stored objects mean, worked out the slow way.

`EPP_SOAK=1 pytest tests/integration/test_kubernetes_soak.py` runs the full size, 20 seeds of 10 000
changes, in some minutes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from epp.edge.kubernetes.choice import (
    PodsBySelector,
    PoolChoice,
    pods_by_selector,
    pools_by_name,
)
from epp.edge.kubernetes.reflector import Pace
from tests.integration.following import following
from tests.integration.pool_oracle import (
    Json,
    Listener,
    endpoints_of,
    expected,
    expected_priorities,
    expected_rules,
)
from tests.kubernetes.fake_api import FakeApi
from tests.kubernetes.faults import (
    Answer,
    Cut,
    Delay,
    Inject,
    Rule,
    Silence,
    Slow,
    error_event,
    event,
    garbage,
)
from tests.kubernetes.objects import objective, pod, pool, rewrite, rule
from tests.kubernetes.resources import NEW_GROUP, OLD_GROUP

FULL = os.environ.get("EPP_SOAK") == "1"
SEEDS, CHANGES = (20, 10_000) if FULL else (8, 2_000)
CHECK_EVERY = 400
PACE = Pace(
    page_objects=20,
    watch_s=(5.0, 10.0),
    idle_s=1.0,
    short_s=0.0,
    backoff_s=(0.005, 0.05),
    absent_s=0.05,
    gone_s=0.0,
)
NS = "default"
BORN = ("2026-01-01T00:00:00Z", "2026-01-01T00:00:01Z", "2026-01-02T00:00:00Z")
IPS = [*(f"10.0.0.{i}" for i in range(12)), "fd00::1", "FD00:0::1", "fd00::2", None]
PLURALS = ("pods", "inferencepools", "inferenceobjectives", "inferencemodelrewrites")
BY_SELECTOR = pods_by_selector(
    "app=a,tier notin (y)", "8000,8001", namespace=NS, pod_name="epp-abc-def"
)
CHOICES: tuple[PoolChoice, ...] = (
    pools_by_name("*", namespace=NS),
    pools_by_name("pool-0", namespace=NS),
    pools_by_name("pool-0,pool-2", namespace=NS),
    BY_SELECTOR,
)


class Chaos:
    """Changes objects, and makes the API server misbehave."""

    def __init__(self, api: FakeApi, rng: Random) -> None:
        self.api, self.rng = api, rng
        self.store = api.store
        self.outage: Rule | None = None
        """While it lasts, connections break off before any answer."""
        self.uids = 0

    async def step(self) -> None:
        rng = self.rng
        change = rng.choices(
            (self.pod, self.pool, self.objective, self.rewrite, self.malformed),
            weights=(75, 8, 8, 6, 3),
        )[0]
        change()
        if rng.random() < 0.06:
            self.fault()
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        if rng.random() < 0.02:
            await asyncio.sleep(rng.random() * 0.02)

    def calm(self) -> None:
        """The API server is well again."""
        self.api.faults.clear()
        self.outage = None
        if not self.serves_objectives():
            self.store.install(NEW_GROUP, "inferenceobjectives")

    # -- changes ---------------------------------------------------------------------------

    def pod(self) -> None:
        rng, name = self.rng, f"p-{self.rng.randrange(25)}"
        known = self.store.get("pods", NS, name)
        draw = rng.random()
        if known is not None and draw < 0.15:
            self.store.delete("pods", NS, name, graceful=draw < 0.05)
            return
        labels = {"app": rng.choice("aab"), "tier": rng.choice("xyz")}
        notes = rng.choice(
            [
                *({}, {}, {"llm-d.ai/active-ports": "8000,zzz"}, {"llm-d.ai/active-ports": ""}),
                {"inference.networking.k8s.io/active-ports": "8001"},
            ]
        )
        status = rng.choices(("True", "False", "Unknown"), (8, 1, 1))[0]
        new = pod(name, rng.choice(IPS), labels, annotations=notes, readiness=status)
        if known is None or draw < 0.3:
            self.uids += 1
            new["metadata"] |= {"uid": f"uid-{self.uids}", "creationTimestamp": rng.choice(BORN)}
        self.store.put(new)

    def pool(self) -> None:
        rng, name = self.rng, f"pool-{self.rng.randrange(3)}"
        if self.store.get("inferencepools", NS, name) is not None and rng.random() < 0.15:
            self.store.delete("inferencepools", NS, name, graceful=rng.random() < 0.3)
            return
        selector = {"app": rng.choice("ab")} | rng.choice([{}, {"tier": rng.choice("xyz")}])
        ports = rng.sample((8000, 8001, 8002), rng.randrange(1, 4))
        self.store.put(
            pool(name, selector, ports, app_protocol=rng.choice(["http", "kubernetes.io/h2c"]))
        )

    def objective(self) -> None:
        if not self.serves_objectives():
            return
        rng, name = self.rng, f"o-{self.rng.randrange(5)}"
        if self.store.get("inferenceobjectives", NS, name) is not None and rng.random() < 0.3:
            self.store.delete("inferenceobjectives", NS, name)
            return
        group = rng.choice([None, None, OLD_GROUP])
        priority = rng.choice([None, -1, 0, 5])
        self.store.put(objective(name, f"pool-{rng.randrange(4)}", priority, pool_group=group))

    def rewrite(self) -> None:
        rng, name = self.rng, f"r-{self.rng.randrange(4)}"
        if self.store.get("inferencemodelrewrites", NS, name) is not None and rng.random() < 0.3:
            self.store.delete("inferencemodelrewrites", NS, name)
            return
        rules = [rule(rng.choice([[], ["m"]]), {"n": None})] * rng.randrange(1, 4)
        self.store.put(rewrite(name, f"pool-{rng.randrange(4)}", rules, created=rng.choice(BORN)))

    def malformed(self) -> None:
        """What no API server should let in."""
        rng = self.rng
        new = pod(f"bad-{rng.randrange(2)}", "10.0.0.1", {"app": "a", "tier": "x"})
        new["status"] = rng.choice([{"podIP": 1}, {"conditions": "Ready"}, 3])
        self.store.put(new, checked=False)

    def serves_objectives(self) -> bool:
        served = self.store.kinds.served
        return (NEW_GROUP, "v1alpha2", "inferenceobjectives") in served

    # -- faults ----------------------------------------------------------------------------

    def fault(self) -> None:
        rng, api = self.rng, self.api
        if self.outage is not None:
            api.faults.remove(self.outage)
            self.outage = None
            return
        plural = rng.choice([*PLURALS, "pods", None])
        kind = rng.randrange(12)
        if kind < 4:
            api.faults.strike(self.of_a_stream(), plural)
        elif kind < 7:
            verb, fault = self.of_a_request()
            api.faults.add(fault, verb=verb, plural=plural, count=rng.randrange(1, 4))
        elif kind == 7:
            api.cut_connections(reset=rng.random() < 0.5)
        elif kind == 8:
            self.store.compact()
            api.gone_as_status = rng.random() < 0.5
            self.store.end_watches()
        elif kind == 9:
            # With a revision that was raised, as it has to be after a restore.
            self.store.reset_versions(first=self.store.version + 100_000)
        elif kind == 10:
            self.outage = api.faults.add(Cut())
            api.cut_connections()
        elif self.serves_objectives():
            self.store.uninstall(NEW_GROUP, "inferenceobjectives")
        else:
            self.store.install(NEW_GROUP, "inferenceobjectives")

    def of_a_stream(self) -> Cut | Slow | Silence | Inject:
        rng = self.rng
        later = rng.randrange(3)
        return rng.choice(
            [
                Cut(rng.randrange(3000), reset=rng.random() < 0.5),
                Slow(rng.randrange(7, 200)),
                Silence(later),
                Inject(error_event(rng.choice([410, 429, 500, 504])), later, end=True),
                Inject(garbage(), later),
                Inject(event("STRANGE", {"metadata": {"name": "x"}}), later),
            ]
        )

    def of_a_request(self) -> tuple[str, Answer | Cut | Delay | Slow]:
        rng = self.rng
        verb = rng.choice(["list", "watch"])
        code = rng.choice([401, 403, 429, 500, 503])
        return verb, rng.choice(
            [
                Answer(code),
                Answer(410, "Expired"),
                Answer(502, body=b"<html>", content_type="text/html"),
                Answer(200, body=b"<html>", content_type="text/html"),
                Cut(rng.randrange(3000)),
                Delay(0.03),
                Delay(0.03, after=True),
                Slow(rng.randrange(50, 500)),
            ]
        )


def wanted(api: FakeApi, choice: PoolChoice) -> tuple[Mapping[str, Any], ...]:
    """Endpoints, priorities and rules by pool, from what is stored."""
    pods = [each for each in api.store.list("pods", NS) if not _is_malformed(each)]
    if isinstance(choice, PodsBySelector):
        labels = {"matchLabels": {"app": "a"}}
        ports = [{"number": 8000}, {"number": 8001}]
        whole = {"metadata": {"name": "epp"}, "spec": {"selector": labels, "targetPorts": ports}}
        fitting = [each for each in pods if each["metadata"]["labels"]["tier"] != "y"]
        return {"epp": endpoints_of(whole, fitting)}, {}, {}
    pools = [
        each
        for each in api.store.list("inferencepools", NS)
        if choice.names is None or each["metadata"]["name"] in choice.names
    ]
    return (
        expected(pools, pods),
        expected_priorities(pools, api.store.list("inferenceobjectives", NS)),
        expected_rules(pools, api.store.list("inferencemodelrewrites", NS)),
    )


def _is_malformed(each: Json) -> bool:
    status = each["status"]
    return each["metadata"]["name"].startswith("bad") and (
        not isinstance(status, dict) or len(status) == 1
    )


def told(listener: Listener) -> tuple[Mapping[str, Any], ...]:
    return listener.seen(), listener.seen_priorities(), listener.seen_rules()


async def settle(api: FakeApi, listener: Listener, choice: PoolChoice, context: str) -> None:
    want = wanted(api, choice)
    try:
        await api.until(lambda: told(listener) == want, within_s=30.0)
    except TimeoutError as late:
        pytest.fail(f"{context}: told {told(listener)}, wanted {want}; {late}", pytrace=False)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_after_any_changes_and_faults_the_endpoints_are_the_api_servers(seed: int) -> None:
    rng, listener = Random(seed), Listener()
    choice = CHOICES[seed % len(CHOICES)]
    async with FakeApi(absent=(OLD_GROUP,), bookmark_s=0.2) as api:
        chaos = Chaos(api, rng)
        async with following(api, listener, choice, pace=PACE, seed=seed):
            for change in range(1, CHANGES + 1):
                await chaos.step()
                if change % CHECK_EVERY == 0:
                    chaos.calm()
                    await settle(api, listener, choice, f"seed {seed} after {change} changes")
            api.store.put(pod("bad-0", "10.9.9.9", {"app": "a", "tier": "x"}))
            await settle(api, listener, choice, f"seed {seed} with a healed pod")
    assert listener.syncs == 1
    assert listener.calls
