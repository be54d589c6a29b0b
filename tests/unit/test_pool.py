import pytest

from epp.core.model import UNKNOWN, Endpoint, EndpointSpec, Load
from epp.core.pool import Answered, Members, Pool, Scraped, ScrapeFailed


class Told:
    """A listener that writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int]] = []

    def _note(self, what: str, endpoint: Endpoint) -> None:
        self.calls.append((what, endpoint.address, endpoint.slot))

    def joined(self, endpoint: Endpoint) -> None:
        self._note("joined", endpoint)

    def left(self, endpoint: Endpoint) -> None:
        self._note("left", endpoint)

    def restarted(self, endpoint: Endpoint) -> None:
        self._note("restarted", endpoint)

    def scraped(self, endpoint: Endpoint) -> None:
        self._note("scraped", endpoint)

    def ejected(self, endpoint: Endpoint, for_s: float) -> None:
        self._note("ejected", endpoint)

    def recovered(self, endpoint: Endpoint) -> None:
        self._note("recovered", endpoint)


def spec(n: int, uid: str = "", **labels: str) -> EndpointSpec:
    return EndpointSpec(host=f"10.0.0.{n}", port=8000, uid=uid, labels=labels)


def pool_of(*numbers: int, stale_after_s: float = 5.0) -> Pool:
    pool = Pool(stale_after_s=stale_after_s)
    pool.apply(Members(tuple(spec(n) for n in numbers)), 0.0)
    return pool


def addresses(pool: Pool, now_s: float) -> list[str]:
    return [e.address for e in pool.snapshot(now_s).endpoints]


def test_members_replace_the_whole_set() -> None:
    pool = pool_of(1, 2)
    change = pool.apply(Members((spec(2), spec(3))), 1.0)
    assert [e.address for e in change.joined] == ["10.0.0.3:8000"]
    assert [e.address for e in change.left] == ["10.0.0.1:8000"]
    assert addresses(pool, 1.0) == ["10.0.0.2:8000", "10.0.0.3:8000"]


def test_an_empty_pool_is_synced_only_after_discovery_has_said_so() -> None:
    pool = Pool(stale_after_s=5.0)
    assert not pool.synced
    pool.apply(Members(()), 0.0)
    assert pool.synced
    assert pool.snapshot(0.0).endpoints == ()


def test_an_unchanged_set_changes_nothing() -> None:
    pool = pool_of(1, 2)
    version = pool.snapshot(0.0).version
    pool.apply(Members((spec(2), spec(1))), 1.0)
    assert pool.snapshot(1.0).version == version


def test_G03_a_replaced_endpoint_at_the_same_address_is_a_new_one() -> None:
    pool = Pool(stale_after_s=5.0)
    told = Told()
    pool.listen(told)
    pool.apply(Members((spec(1, uid="a"),)), 0.0)
    (old,) = pool.endpoints
    pool.apply(Members((spec(1, uid="b"),)), 1.0)
    (new,) = pool.endpoints
    assert new is not old
    assert [c[0] for c in told.calls] == ["joined", "left", "joined"]


def test_E18_changed_labels_reach_the_endpoint_without_losing_it() -> None:
    pool = pool_of(1)
    (before,) = pool.endpoints
    version = pool.snapshot(0.0).version
    pool.apply(Members((spec(1, role="decode"),)), 1.0)
    (after,) = pool.endpoints
    assert after is before
    assert after.labels == {"role": "decode"}
    assert pool.snapshot(1.0).version != version


def test_a_slot_is_free_for_the_next_only_after_its_listeners_forgot_it() -> None:
    pool = pool_of(1, 2, 3)
    told = Told()
    pool.listen(told)
    told.calls.clear()
    gone = pool.by_address["10.0.0.2:8000"]
    pool.apply(Members((spec(1), spec(3), spec(4))), 1.0)
    assert told.calls == [("left", "10.0.0.2:8000", gone.slot), ("joined", "10.0.0.4:8000", 1)]
    assert sorted(e.slot for e in pool.endpoints) == [0, 1, 2]


def test_F07_a_silent_endpoint_is_not_taken_for_an_idle_one() -> None:
    pool = pool_of(1, stale_after_s=5.0)
    (endpoint,) = pool.endpoints
    assert endpoint.load is UNKNOWN
    pool.apply(Scraped(endpoint, Load(at_s=10.0, waiting=0, running=0)), 10.0)
    pool.snapshot(14.9)
    assert endpoint.load.waiting == 0
    pool.snapshot(15.0)
    assert endpoint.load is UNKNOWN
    assert endpoint.last_load.waiting == 0


def test_a_scrape_that_says_the_same_keeps_the_snapshot() -> None:
    pool = pool_of(1)
    (endpoint,) = pool.endpoints
    pool.apply(Scraped(endpoint, Load(at_s=1.0, waiting=3)), 1.0)
    version = pool.snapshot(1.0).version
    pool.apply(Scraped(endpoint, Load(at_s=2.0, waiting=3)), 2.0)
    assert pool.snapshot(2.0).version == version
    assert pool.snapshot(6.5).version >= version
    assert endpoint.load.waiting == 3, "the younger scrape still holds"
    pool.apply(Scraped(endpoint, Load(at_s=7.0, waiting=4)), 6.6)
    assert pool.snapshot(6.6).version != version


def test_K09_three_failures_in_a_row_eject_and_time_brings_back() -> None:
    pool = pool_of(1, 2)
    bad = pool.by_address["10.0.0.1:8000"]
    for _ in range(2):
        pool.apply(Answered(bad, ok=False), 10.0)
    assert addresses(pool, 10.0) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    pool.apply(Answered(bad, ok=False), 10.0)
    assert addresses(pool, 10.0) == ["10.0.0.2:8000"]
    assert addresses(pool, 10.9) == ["10.0.0.2:8000"]
    assert addresses(pool, 11.0) == ["10.0.0.1:8000", "10.0.0.2:8000"]


def test_K09_on_probation_an_endpoint_gets_one_request_at_a_time() -> None:
    pool = pool_of(1, 2)
    bad = pool.by_address["10.0.0.1:8000"]
    for _ in range(3):
        pool.apply(Answered(bad, ok=False), 10.0)
    bad.inflight_requests = 1
    assert addresses(pool, 12.0) == ["10.0.0.2:8000"]
    bad.inflight_requests = 0
    assert len(addresses(pool, 12.0)) == 2
    pool.apply(Answered(bad, ok=True), 12.0)
    bad.inflight_requests = 5
    assert len(addresses(pool, 12.0)) == 2, "one success ends the probation"


def test_K09_failing_again_on_probation_ejects_for_longer() -> None:
    pool = pool_of(1, 2)
    bad = pool.by_address["10.0.0.1:8000"]
    for _ in range(3):
        pool.apply(Answered(bad, ok=False), 10.0)
    pool.apply(Answered(bad, ok=False), 11.0)
    assert addresses(pool, 12.9) == ["10.0.0.2:8000"]
    assert len(addresses(pool, 13.0)) == 2


def test_failures_that_are_not_in_a_row_do_not_eject() -> None:
    pool = pool_of(1, 2)
    bad = pool.by_address["10.0.0.1:8000"]
    for ok in (False, False, True, False, False):
        pool.apply(Answered(bad, ok=ok), 10.0)
    assert len(addresses(pool, 10.0)) == 2


def test_probation_without_requests_ends_by_itself() -> None:
    pool = pool_of(1, 2)
    bad = pool.by_address["10.0.0.1:8000"]
    for _ in range(3):
        pool.apply(Answered(bad, ok=False), 10.0)
    pool.snapshot(80.0)
    assert not bad.on_probation
    version = pool.snapshot(80.0).version
    assert pool.snapshot(81.0).version == version, "and snapshots are cached again"


def test_K10_when_all_are_ejected_all_are_tried() -> None:
    pool = pool_of(1, 2)
    for endpoint in pool.endpoints:
        for _ in range(3):
            pool.apply(Answered(endpoint, ok=False), 10.0)
    assert len(addresses(pool, 10.0)) == 2


def test_an_endpoint_that_cannot_be_reached_is_ejected_by_its_scrapes() -> None:
    pool = pool_of(1, 2)
    dead = pool.by_address["10.0.0.1:8000"]
    pool.apply(ScrapeFailed(dead, "connect", unreachable=True), 10.0)
    assert len(addresses(pool, 10.0)) == 2
    pool.apply(ScrapeFailed(dead, "connect", unreachable=True), 11.0)
    assert addresses(pool, 11.0) == ["10.0.0.2:8000"]


def test_an_endpoint_that_answers_is_not_ejected_for_a_closed_metrics_port() -> None:
    pool = pool_of(1, 2)
    endpoint = pool.by_address["10.0.0.1:8000"]
    pool.apply(Answered(endpoint, ok=True), 9.0)
    for at_s in (10.0, 11.0, 12.0):
        pool.apply(ScrapeFailed(endpoint, "connect", unreachable=True), at_s)
    assert len(addresses(pool, 12.0)) == 2


def test_a_slow_metrics_page_does_not_eject() -> None:
    pool = pool_of(1, 2)
    endpoint = pool.by_address["10.0.0.1:8000"]
    for at_s in (10.0, 11.0, 12.0, 13.0):
        pool.apply(ScrapeFailed(endpoint, "timeout"), at_s)
    assert len(addresses(pool, 13.0)) == 2


def test_a_scrape_after_being_unreachable_is_a_restart_and_brings_back_at_once() -> None:
    pool = pool_of(1, 2)
    told = Told()
    pool.listen(told)
    dead = pool.by_address["10.0.0.1:8000"]
    for at_s in (10.0, 11.0, 13.0, 17.0):
        pool.apply(ScrapeFailed(dead, "connect", unreachable=True), at_s)
    assert addresses(pool, 18.0) == ["10.0.0.2:8000"]
    told.calls.clear()
    pool.apply(Scraped(dead, Load(at_s=18.0, waiting=0)), 18.0)
    assert len(addresses(pool, 18.0)) == 2
    assert [c[0] for c in told.calls] == ["restarted", "scraped"]


@pytest.mark.parametrize(
    "event",
    [
        lambda e: Scraped(e, Load(at_s=1.0, waiting=7)),
        lambda e: ScrapeFailed(e, "connect", unreachable=True),
        lambda e: Answered(e, ok=False),
    ],
)
def test_news_of_an_endpoint_that_has_left_changes_nothing(event) -> None:
    pool = pool_of(1, 2)
    gone = pool.by_address["10.0.0.1:8000"]
    pool.apply(Members((spec(1, uid="new"), spec(2))), 1.0)
    for _ in range(5):
        pool.apply(event(gone), 2.0)
    assert len(addresses(pool, 2.0)) == 2
    assert all(e.load is UNKNOWN for e in pool.endpoints)


def test_E19_an_ipv6_endpoint_has_brackets() -> None:
    pool = Pool(stale_after_s=5.0)
    pool.apply(Members((EndpointSpec(host="fd00::10", port=8000),)), 0.0)
    assert addresses(pool, 0.0) == ["[fd00::10]:8000"]


def test_K09_requests_that_fail_together_eject_once_and_not_for_each_of_them() -> None:
    pool = pool_of(1, 2)
    bad = pool.by_address["10.0.0.1:8000"]
    for n in range(50):
        pool.apply(Answered(bad, ok=False), 10.0 + n / 1000)
    assert addresses(pool, 10.99) == ["10.0.0.2:8000"]
    assert len(addresses(pool, 11.1)) == 2, "50 that were in flight are no 48 attempts to return"
    pool.apply(Answered(bad, ok=False), 11.1)
    assert addresses(pool, 13.0) == ["10.0.0.2:8000"]


def test_E18_a_new_name_reaches_the_endpoint_without_losing_it() -> None:
    pool = pool_of(1)
    (endpoint,) = pool.endpoints
    named = EndpointSpec(host="10.0.0.1", port=8000, name="vllm-0", namespace="llm")
    pool.apply(Members((named,)), 1.0)
    assert pool.endpoints == (endpoint,)
    assert (endpoint.name, endpoint.namespace) == ("vllm-0", "llm")


def test_an_ejection_and_its_end_are_told_once() -> None:
    pool = pool_of(1, 2)
    told = Told()
    pool.listen(told)
    told.calls.clear()
    bad = pool.by_address["10.0.0.1:8000"]
    for at_s in (10.0, 10.0, 10.0, 10.1, 11.5, 15.0):
        pool.apply(Answered(bad, ok=False), at_s)
    assert [c[0] for c in told.calls] == ["ejected"]
    pool.apply(Answered(bad, ok=True), 30.0)
    pool.apply(Answered(bad, ok=True), 31.0)
    assert [c[0] for c in told.calls] == ["ejected", "recovered"]
