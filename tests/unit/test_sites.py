"""Sites as a cluster's pools come and go."""

import time
from random import Random

from epp.config import load_config, resolve
from epp.core.cluster import PoolKey
from epp.core.endpoint import EndpointSpec
from epp.core.flow.hold import Outcome, Ticket
from epp.core.model import Request
from epp.core.rewrite import RewriteRule, RewriteTarget
from epp.core.serving import Pools
from epp.edge.telemetry import Telemetry
from epp.flags import parse_flags
from epp.scraping import read_scraping
from epp.sites import ClusterSites, Site

KEY, OTHER = PoolKey("ns", "a"), PoolKey("ns", "b")
SPECS = (EndpointSpec("10.0.0.1", 8000, name="p-rank-0", namespace="ns", uid="u"),)
HOLDING = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: expected-latency, parameters: {hold: true, maxNumSeqs: 1}}]
"""


class World:
    """A picker's pools, without tasks."""

    def __init__(self) -> None:
        plan = resolve(load_config(HOLDING))
        options = parse_flags({"pool-name": "*"})
        self.pools = Pools(several=True)
        self.telemetry = Telemetry(pools=self.pools, clock=time.monotonic, label_values_max=10)
        self.ended: list[Site] = []
        self.changes = 0
        scraping = read_scraping(options, plan)

        def make(name: str) -> Site:
            return Site(name, plan=plan, scraping=scraping, telemetry=self.telemetry, rng=Random(1))

        self.sites = ClusterSites(
            self.pools,
            make=make,
            started=lambda site: None,
            ended=self.ended.append,
            changed=self.changed,
        )

    def changed(self) -> None:
        self.changes += 1


def test_M09_a_cluster_is_ready_once_it_was_listed_and_has_a_pool_be_it_empty() -> None:
    world = World()
    assert not world.sites.ready
    world.sites.synced()
    assert not world.sites.ready, "there is no pool"
    world.sites.pool(KEY, (), "http", "a-epp")
    assert world.sites.ready
    world.sites.pool(KEY, None, "", "")
    assert not world.sites.ready
    assert world.changes == 3


def test_a_pool_has_what_its_objects_say_and_the_service_it_is_reached_by() -> None:
    world = World()
    rule = RewriteRule("r", frozenset(), (RewriteTarget("x", None),))
    world.sites.pool(KEY, SPECS, "http", "a-epp")
    world.sites.objectives(KEY, {"gold": 3})
    world.sites.rewrites(KEY, (rule,))
    world.sites.objectives(OTHER, {"gold": 4})  # of a pool that does not exist: no harm
    (serving,) = world.pools.all
    assert (serving.name, serving.objectives, serving.services) == ("ns/a", {"gold": 3}, {"a-epp"})
    assert serving.rewrites


def test_who_is_held_for_a_pool_that_is_deleted_is_refused_however_many_they_are() -> None:
    world = World()
    world.sites.pool(KEY, SPECS, "http", "")
    (serving,) = world.pools.all
    hold, outcomes = serving.hold, []
    assert hold is not None

    def deliver(outcome: Outcome, _now_s: float) -> None:
        outcomes.append(outcome)

    def offer(number: int) -> object:
        request = Request(id=str(number), prompt_tokens=10_000)
        return hold.offer(request, subset=None, now_s=time.monotonic(), deliver=deliver)

    tickets = [o for o in map(offer, range(300)) if isinstance(o, Ticket)]
    assert len(tickets) > 200
    world.sites.pool(KEY, None, "", "")
    assert hold.requests == 0
    assert len(outcomes) == len(tickets)
    assert all(outcome.decision is None for outcome in outcomes)
    assert len(world.ended) == 1


def test_a_pod_of_two_pools_is_counted_on_when_one_of_them_is_deleted() -> None:
    world = World()
    for key in (KEY, OTHER):
        world.sites.pool(key, SPECS, "http", "")

    def counted() -> str:
        return "".join(world.telemetry.metrics.text())

    for serving in world.pools.all:
        (endpoint,) = serving.decider.pool.endpoints
        world.telemetry._attempts_at(endpoint, "m").counter.inc()
    assert 'scheduler_attempts_total{status="success"' in counted()
    world.sites.pool(KEY, None, "", "")
    (left,) = world.pools.all
    world.telemetry._attempts_at(left.decider.pool.endpoints[0], "m").counter.inc()
    assert 'endpoint_name="p-rank-0",namespace="ns",port="8000"} 3.0' in counted()
    world.sites.pool(OTHER, None, "", "")
    assert "p-rank-0" not in counted()
