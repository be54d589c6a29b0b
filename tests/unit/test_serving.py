"""Which pool a request is for."""

import pytest

from epp.core.errors import RequestDropped
from epp.core.headers import POOL
from epp.core.serving import Pools, Serving
from epp.core.streams import Called
from tests.unit.exchanges import World

NO_HEADERS: dict[str, str] = {}


def two_pools() -> tuple[Pools, Serving, Serving]:
    """Pools `ns/a` with 10.0.0.1 and 10.0.0.2, and `ns/b` with 10.0.0.1 to .3."""
    pools = Pools(several=True)
    first, second = (Serving(f"ns/{n}", World(e).decider) for n, e in (("a", 2), ("b", 3)))
    first.services, second.services = frozenset({"a-epp"}), frozenset({"b-epp"})
    pools.put(first)
    pools.put(second)
    return pools, first, second


def test_the_only_pool_gets_every_request_whatever_the_gateway_says() -> None:
    only = Serving("ns/a", World(1).decider)
    pools = Pools(only)
    assert pools.of({POOL: "other"}, named="third", called=Called("x", "y"), subset=()) is only


@pytest.mark.parametrize("name", ["b", "ns/b"])
def test_a_pool_is_named_by_metadata_or_a_header(name: str) -> None:
    pools, _, second = two_pools()
    assert pools.of(NO_HEADERS, named=name) is second
    assert pools.of(NO_HEADERS, called=Called(pool=name)) is second
    assert pools.of({POOL: name}) is second


def test_what_the_gateway_says_wins_over_the_request_s_own_header() -> None:
    pools, first, second = two_pools()
    assert pools.of({POOL: "b"}, named="a", called=Called(pool="b")) is first
    assert pools.of({POOL: "a"}, called=Called(pool="b")) is second
    assert pools.of({POOL: "a"}, called=Called("b-epp.ns.svc:9002")) is second
    assert pools.of({POOL: "a"}, called=Called("epp")) is first


@pytest.mark.parametrize(
    ("authority", "which"),
    [
        ("b-epp", "b"),
        ("b-epp:9002", "b"),
        ("b-epp.ns", "b"),
        ("b-epp.ns.svc.cluster.local:9002", "b"),
        ("a-epp.ns.svc", "a"),
        ("outbound|9002||b-epp.ns.svc.cluster.local", "b"),
        ("b-epp.elsewhere.svc", None),
        ("c-epp.ns.svc", None),
        ("", None),
        ("[::1]:9002", None),
    ],
)
def test_the_service_by_which_a_gateway_calls_names_the_pool(authority: str, which) -> None:
    pools, *_ = two_pools()
    if which is None:
        with pytest.raises(RequestDropped, match="does not say which"):
            pools.of(NO_HEADERS, called=Called(authority))
    else:
        assert pools.of(NO_HEADERS, called=Called(authority)).name == f"ns/{which}"


def test_a_service_of_two_pools_names_neither() -> None:
    pools, first, second = two_pools()
    first.services = second.services = frozenset({"epp"})
    with pytest.raises(RequestDropped, match="does not say which"):
        pools.of(NO_HEADERS, called=Called("epp.ns.svc"))


def test_a_subset_of_exactly_one_pool_names_it() -> None:
    pools, _, second = two_pools()
    assert pools.of(NO_HEADERS, subset=("10.0.0.3:8000",)) is second
    for subset in (("10.0.0.1:8000",), ("10.9.9.9:8000",), ()):
        with pytest.raises(RequestDropped, match="does not say which"):
            pools.of(NO_HEADERS, subset=subset)


def test_N10_a_pool_that_is_not_served_is_refused_and_not_replaced_by_a_guess() -> None:
    pools, *_ = two_pools()
    for said in ({"named": "c"}, {"called": Called(pool="other/a")}):
        with pytest.raises(RequestDropped, match="is served here") as dropped:
            pools.of(NO_HEADERS, **said)
        assert dropped.value.http_status == 503


def test_a_name_in_two_namespaces_needs_its_namespace() -> None:
    pools, first, _ = two_pools()
    pools.put(Serving("other/a", World(1).decider))
    with pytest.raises(RequestDropped):
        pools.of(NO_HEADERS, named="a")
    assert pools.of(NO_HEADERS, named="ns/a") is first


def test_E11_a_pool_that_is_gone_is_refused_until_it_is_back() -> None:
    for several in (False, True):
        pools = Pools(several=several)
        for _ in range(2):
            with pytest.raises(RequestDropped, match="no InferencePool") as dropped:
                pools.of(NO_HEADERS, named="a")
            assert dropped.value.http_status == 503
            back = Serving("ns/a", World(1).decider)
            pools.put(back)
            assert pools.of(NO_HEADERS, named="a") is back
            pools.drop("ns/a")


def test_a_service_whose_pool_is_gone_is_refused_whatever_the_client_says() -> None:
    pools, first, _ = two_pools()
    pools.drop("ns/b")
    for host in ("b-epp.ns.svc:9002", "outbound|9002||b-epp.ns.svc", "outbound_.9002_._.B-EPP.ns"):
        with pytest.raises(RequestDropped, match="is gone"):
            pools.of({POOL: "a"}, called=Called(host))
    assert pools.of({POOL: "a"}, called=Called("b-epp.elsewhere.svc")) is first


def test_the_last_pool_left_of_several_is_no_answer_to_a_gateway_that_says_nothing() -> None:
    pools, *_ = two_pools()
    pools.drop("ns/b")
    with pytest.raises(RequestDropped, match="does not say which"):
        pools.of(NO_HEADERS)
