"""Every body mode, routing and transport of `epp envoy-config`: the pick is honoured, bytes pass
unchanged, events are not held back."""

from __future__ import annotations

import asyncio
import hashlib
from random import Random

import pytest

from epp.core.headers import DESTINATION, SERVED_VERIFIER
from epp.envoy.options import BodyProcessing, Routing
from tests.e2e.http1 import JSON_TYPE, Connection
from tests.e2e.site import Site, completion, picked
from tests.e2e.upstreams import new_id

SIZES = (0, 1, 1 << 10, 48 << 10, 200 << 10, 5 << 20)
EVENT_S_MAX = 5.0


def body_of(size: int) -> tuple[str, bytes]:
    """Target and body: JSON for a path whose bodies are read, where it fits."""
    if size >= 1 << 10:
        return "/v1/completions", completion(size, salt=new_id())
    return "/upload", Random(size).randbytes(size)


def digest(data: bytes) -> str:
    return f"{len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}"


async def test_the_picked_endpoint_serves(variant: Site) -> None:
    """Picks that no rotation of Envoy's own would give: each endpoint several times in a row."""
    for number in (0, 0, 0, 2, 2, 2, 1, 1, 1):
        answer, test_id = await variant.send(
            "POST", "/v1/completions", [JSON_TYPE], completion(300, salt="pick"), to=number
        )
        assert answer.status == 200, answer
        received = variant.upstreams.one(test_id)
        address = variant.upstreams.addresses[number]
        assert (picked(received), received.upstream) == ([address], address)
        if variant.options.routing is Routing.OVERRIDE_HOST:
            assert answer.header(SERVED_VERIFIER) == address


async def test_A05_the_pick_is_honoured_without_a_body(variant: Site) -> None:
    for number in (2, 2, 0, 0):
        answer, test_id = await variant.send("GET", "/v1/models?x=1", to=number)
        assert answer.status == 200, answer
        received = variant.upstreams.one(test_id)
        assert received.upstream == variant.upstreams.addresses[number] == picked(received)[0]
        assert (received.method, received.target) == ("GET", "/v1/models?x=1")


@pytest.mark.parametrize("framing", ["content-length", "chunked"])
async def test_A02_request_bodies_arrive_exact(variant: Site, framing: str) -> None:
    for size in SIZES:
        target, body = body_of(size)
        answer, test_id = await variant.send(
            "POST", target, [JSON_TYPE], body, chunked=framing == "chunked"
        )
        assert answer.status == 200, (size, answer)
        assert digest(variant.upstreams.one(test_id).body) == digest(body)


async def test_a_body_in_many_small_writes_arrives_exact(variant: Site) -> None:
    for size, piece_bytes in ((1_500, 1), (48 << 10, 100), (200 << 10, 3_001)):
        target, body = body_of(size)
        for chunked in (False, True):
            _, test_id = await variant.send(
                "POST", target, [JSON_TYPE], body, chunked=chunked, piece_bytes=piece_bytes
            )
            assert digest(variant.upstreams.one(test_id).body) == digest(body)


@pytest.mark.parametrize("framing", ["content-length", "chunked"])
async def test_response_bytes_arrive_exact(variant: Site, framing: str) -> None:
    for size in SIZES:
        body = Random(size).randbytes(size)
        test_id = new_id()
        variant.upstreams.plan(test_id, echo=True, chunked=framing == "chunked")
        answer, _ = await variant.send("POST", "/upload", (), body, test_id=test_id)
        assert answer.status == 200, (size, answer)
        assert digest(answer.body) == digest(body)


async def test_events_arrive_one_by_one(variant: Site) -> None:
    """The next event exists only when the client has the one before."""
    test_id, events = new_id(), [b'data: {"n":%d}\n\n' % n for n in range(5)]
    variant.upstreams.plan(test_id, headers=[("content-type", "text/event-stream")], fed=True)
    connection = await variant.open((), completion(400, salt=test_id), test_id=test_id)
    async with connection:
        if variant.options.response_body is BodyProcessing.BUFFERED:
            await assert_held_back(variant, connection, test_id, events)
            return
        async with asyncio.timeout(EVENT_S_MAX):
            variant.upstreams.feed(test_id, events[0])
            head = await connection.head()
            pieces = connection.pieces(head)
            assert await anext(pieces) == events[0]
            for event in events[1:]:
                variant.upstreams.feed(test_id, event)
                assert await anext(pieces) == event
            variant.upstreams.end_feed(test_id)
            assert [piece async for piece in pieces] == []
    await variant.idle()


async def assert_held_back(
    site: Site, connection: Connection, test_id: str, events: list[bytes]
) -> None:
    """With buffered responses nothing comes before the end; then all of it."""
    for event in events:
        site.upstreams.feed(test_id, event)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await connection.head()
    site.upstreams.end_feed(test_id)
    answer = await connection.answer()
    assert answer.body == b"".join(events)
    await site.idle()


async def test_D01_headers_a_client_may_not_send_neither_steer_nor_pass(variant: Site) -> None:
    addresses = variant.upstreams.addresses
    for number in (0, 1, 2, 0, 1, 2):
        wrong = addresses[(number + 1) % 3]
        forged = [
            (DESTINATION, wrong),
            ("X-Gateway-Destination-Endpoint-Subset", wrong),
            ("x-gateway-destination-endpoint-served", wrong),
            ("x-prefiller-host-port", wrong),
        ]
        answer, test_id = await variant.send(
            "POST", "/v1/completions", [JSON_TYPE, *forged], completion(300, salt="d"), to=number
        )
        assert answer.status == 200, answer
        received = variant.upstreams.one(test_id)
        assert received.upstream == addresses[number]
        assert received.values(DESTINATION) == [addresses[number]]
        gone = {name.lower() for name, _ in forged[1:]}
        assert not gone & {name for name, _ in received.headers}


async def test_C10_two_requests_with_one_id_are_two_requests(variant: Site) -> None:
    """Streams are told apart by themselves, not by x-request-id."""
    bodies = {new_id(): completion(2_000 + n, salt=f"same-{n}") for n in range(4)}
    same = ("x-request-id", "one-id-for-all")
    answers = await asyncio.gather(
        *(
            variant.send(
                "POST", "/v1/completions", [JSON_TYPE, same], body, test_id=test_id, to=n % 3
            )
            for n, (test_id, body) in enumerate(bodies.items())
        )
    )
    for n, (answer, test_id) in enumerate(answers):
        received = variant.upstreams.one(test_id)
        assert answer.status == 200
        assert received.body == bodies[test_id]
        assert received.upstream == variant.upstreams.addresses[n % 3]
    await variant.idle()
