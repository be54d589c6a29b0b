"""Request trailers, and retries along the list of endpoints the EPP names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.stack import Epp
from epp.core.headers import REQUEST_TRAILERS, SERVED_VERIFIER, TEST_SELECTION
from tests.e2e.conftest import EPP_FLAGS, config
from tests.e2e.http1 import JSON_TYPE, Connection
from tests.e2e.http2 import Http2
from tests.e2e.site import Site, completion, metric, picked, problems
from tests.e2e.upstreams import TEST_ID, Received, Upstreams, new_id

TRAILERS = [("x-test-trailer", "end")]


async def send_with_trailers(site: Site, body: bytes, *, to: int) -> str:
    test_id = new_id()
    headers = [JSON_TYPE, (TEST_ID, test_id), site.selection(to)]
    async with await Http2.open(site.port) as connection:
        answer = await connection.post("/v1/completions", body, headers, TRAILERS)
    assert answer.status == 200, answer
    assert answer.reset is None
    return test_id


@pytest.mark.parametrize("size", [1 << 10, 200 << 10])
async def test_A07_a_body_that_ends_in_trailers_arrives_once(variant: Site, size: int) -> None:
    """Envoy 1.40 sends it twice if the route has a retry policy; the bootstrap has one."""
    body = completion(size, salt="trailers")
    for number in (1, 2, 2):
        received = variant.upstreams.one(await send_with_trailers(variant, body, to=number))
        assert len(received.body) == size
        assert received.body == body
        assert received.upstream == variant.upstreams.addresses[number]
        assert not received.values(REQUEST_TRAILERS)
    await variant.idle()


# -- fallback lists ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_upstreams() -> Iterator[Upstreams]:
    with Upstreams(3) as running:
        yield running


@pytest.fixture(scope="module")
def fallback(
    folder: Path, own_upstreams: Upstreams, start_envoy: Callable[..., Site]
) -> Iterator[Site]:
    """The EPP names two endpoints and hardly ever scrapes: what it knows, answers tell it."""
    flags = [*EPP_FLAGS, config(endpoints=2), "--refresh-metrics-interval=10m"]
    epp = Epp(folder, [*flags, f"--endpoints={','.join(own_upstreams.addresses)}"], name="epp-two")
    epp.start()
    site = start_envoy(epp=epp, endpoints=tuple(own_upstreams.addresses))
    site.upstreams = own_upstreams
    yield site
    site.envoy.stop()
    epp.stop()
    # Endpoints that were made to fail are ejected, which is news.
    assert {p["message"] for p in problems(epp)} <= {"endpoint ejected: it failed repeatedly"}


async def test_A29_a_request_goes_on_to_the_second_endpoint_when_the_first_is_dead(
    fallback: Site,
) -> None:
    """The body goes along, the charge too, and three such failures eject the dead one."""
    upstreams = fallback.upstreams
    dead, alive = upstreams.addresses[:2]
    upstreams.kill(0)
    firsts = []
    try:
        while len(firsts) < 40 and firsts.count(dead) < 3:
            received = await ask_one_of_two(fallback, size=300_000)
            assert received.upstream == alive
            assert sorted(picked(received)) == sorted([dead, alive])
            firsts.append(picked(received)[0])
        assert firsts.count(dead) == 3, "a dead endpoint is tried until it is ejected"
        state = await fallback.idle()
        entry = entry_of(state, dead)
        assert entry["failures_in_a_row"] == 3
        assert entry["ejected_for_s"] > 0
        assert not entry["eligible"]
        assert metric(fallback.epp.metrics(), "epp_served_elsewhere_total") == 3
    finally:
        upstreams.start(0)
    for _ in range(2_000):
        if (await ask_one_of_two(fallback, size=300)).upstream == dead:
            break
    else:
        pytest.fail("traffic never returned to the endpoint that came back")
    entry = entry_of(await fallback.idle(), dead)
    assert (entry["failures_in_a_row"], entry["on_probation"]) == (0, False)


async def ask_one_of_two(site: Site, *, size: int) -> Received:
    """The EPP may choose among the first two. While the answer is under way, checks that it is
    charged to who serves, and that the gateway tells truly who that is."""
    test_id, body = new_id(), completion(size, salt=new_id())
    two = (TEST_SELECTION, ",".join(site.upstreams.addresses[:2]))
    site.upstreams.plan(test_id, fed=True)
    async with await Connection.open(site.port) as connection, asyncio.timeout(20.0):
        headers = [JSON_TYPE, two, (TEST_ID, test_id)]
        await connection.send("POST", "/v1/completions", headers, body)
        site.upstreams.feed(test_id, b"{")
        head = await connection.head()
        assert head.status == 200
        received = site.upstreams.one(test_id)
        assert received.body == body
        assert head.header(SERVED_VERIFIER) == received.upstream
        charged = [e["address"] for e in site.epp.state()["endpoints"] if e["inflight_requests"]]
        assert charged == [received.upstream]
        site.upstreams.feed(test_id, b"}")
        site.upstreams.end_feed(test_id)
        assert b"".join([piece async for piece in connection.pieces(head)]) == b"{}"
    await site.idle()
    return received


def entry_of(state: dict[str, Any], address: str) -> dict[str, Any]:
    return next(e for e in state["endpoints"] if e["address"] == address)


async def test_A15_both_names_of_a_list_are_in_header_and_metadata_alike(fallback: Site) -> None:
    """The header tells both; that Envoy follows the metadata is seen when the first is dead."""
    answer, test_id = await fallback.send(
        "POST", "/v1/completions", [JSON_TYPE], completion(300, salt="two")
    )
    assert answer.status == 200
    received = fallback.upstreams.one(test_id)
    named = picked(received)
    assert len(set(named)) == 2
    assert named[0] == received.upstream


async def test_without_retries_a_dead_endpoint_is_a_503_of_the_gateway(
    fallback: Site, start_envoy: Callable[..., Site]
) -> None:
    """And it counts as a failed answer of the endpoint, not as one of ours."""
    upstreams = fallback.upstreams
    strict = start_envoy(epp=fallback.epp, endpoints=tuple(upstreams.addresses), retries=0)
    strict.upstreams = upstreams
    upstreams.kill(2)
    try:
        answer, _ = await strict.send("GET", "/v1/models", to=2)
        assert answer.status == 503
        state = await strict.idle()
        entry = entry_of(state, upstreams.addresses[2])
        assert entry["failures_in_a_row"] == 1
    finally:
        upstreams.start(2)
        strict.envoy.stop()
    answer, _ = await fallback.send("GET", "/v1/models", to=2)
    assert answer.status == 200
    assert entry_of(await fallback.idle(), upstreams.addresses[2])["failures_in_a_row"] == 0
