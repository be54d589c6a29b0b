"""Clients that go away, and many that stay: what was charged is given back, and nothing is logged
as an error."""

from __future__ import annotations

import asyncio

from epp.envoy.options import BodyProcessing
from tests.e2e.http1 import JSON_TYPE, Connection
from tests.e2e.site import Site, completion, problems, until
from tests.e2e.upstreams import TEST_ID, new_id

STREAMS = 200
SSE = [("content-type", "text/event-stream")]
EVENT = b'data: {"choices":[{"index":0,"text":"w"}]}\n\n'


def inflight(site: Site) -> int:
    return int(site.epp.state()["inflight_requests"])


def sees_no_response_body(site: Site) -> bool:
    return site.options.response_body is BodyProcessing.NONE


async def streams(site: Site, count: int) -> None:
    """Wait until so many streams of Envoy to the EPP are open."""
    await until(
        lambda: site.envoy.stat("cluster.epp.upstream_rq_active") == count, what=f"{count} streams"
    )


async def test_C09_a_client_gone_before_the_pick_leaves_nothing(variant: Site) -> None:
    test_id = new_id()
    body = completion(2_000, salt="gone")
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: llm.example.com\r\n"
        f"content-type: application/json\r\n{TEST_ID}: {test_id}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    await streams(variant, 0)
    async with await Connection.open(variant.port) as connection:
        await connection.write(head.encode() + body[:1_000])
        await streams(variant, 1)
    await streams(variant, 0)
    await variant.idle()
    assert variant.upstreams.received(test_id) == []
    assert problems(variant.epp) == []


async def test_C09_a_client_gone_before_the_answer_leaves_nothing(variant: Site) -> None:
    """And the upstream learns of it, so that an engine can stop computing."""
    test_id = new_id()
    variant.upstreams.plan(test_id, silent=True)
    async with await variant.open((), completion(300, salt="gone"), test_id=test_id):
        await until(lambda: variant.upstreams.received(test_id), what="the request upstream")
        assert inflight(variant) == 1
    await until(lambda: variant.upstreams.broken(test_id), what="the upstream's end")
    await variant.idle()
    assert problems(variant.epp) == []


async def test_A24_a_client_gone_amid_events_leaves_nothing(variant: Site) -> None:
    test_id = new_id()
    variant.upstreams.plan(test_id, headers=SSE, fed=True)
    async with await variant.open((), completion(300, salt="gone"), test_id=test_id) as connection:
        variant.upstreams.feed(test_id, EVENT)
        if variant.options.response_body is BodyProcessing.BUFFERED:
            await until(lambda: variant.upstreams.received(test_id), what="the request upstream")
        else:
            async with asyncio.timeout(10.0):
                head = await connection.head()
                assert await anext(connection.pieces(head)) == EVENT
        # Envoy may end a stream that has nothing more to ask for.
        assert inflight(variant) == 1 or sees_no_response_body(variant)
    await until(lambda: variant.upstreams.broken(test_id), what="the upstream's end")
    await variant.idle()
    assert problems(variant.epp) == []


async def test_an_upstream_gone_amid_events_leaves_nothing(site: Site) -> None:
    test_id = new_id()
    site.upstreams.plan(test_id, headers=SSE, fed=True)
    async with await site.open((), completion(300, salt="gone"), test_id=test_id) as connection:
        site.upstreams.feed(test_id, EVENT)
        await until(lambda: site.upstreams.received(test_id), what="the request upstream")
        site.upstreams.drop(test_id)
        async with asyncio.timeout(10.0):
            await assert_not_taken_for_whole(connection)
    await site.idle()
    assert problems(site.epp) == []


async def assert_not_taken_for_whole(connection: Connection) -> None:
    """The client can tell that the answer is not all: an error status, or no proper end."""
    try:
        head = await connection.head()
        async for _ in connection.pieces(head):
            pass
    except (asyncio.IncompleteReadError, ConnectionError):
        return
    assert head.status >= 500


async def test_A28_two_hundred_streams_are_open_at_once(site: Site) -> None:
    """Each gets its events while all are open; the load is spread evenly, and then all is over."""
    test_ids = [new_id() for _ in range(STREAMS)]
    for test_id in test_ids:
        site.upstreams.plan(test_id, headers=SSE, fed=True)

    async def begin(test_id: str) -> tuple[Connection, object]:
        connection = await site.open((), completion(300, salt=test_id), test_id=test_id)
        site.upstreams.feed(test_id, b"data: 1 %s\n\n" % test_id.encode())
        pieces = connection.pieces(await connection.head())
        assert await anext(pieces) == b"data: 1 %s\n\n" % test_id.encode()
        return connection, pieces

    async with asyncio.timeout(60.0):
        streams = await asyncio.gather(*map(begin, test_ids))
        state = site.epp.state()
        assert state["inflight_requests"] == STREAMS
        shares = sorted(e["inflight_requests"] for e in state["endpoints"])
        assert sum(shares) == STREAMS
        assert shares[0] >= STREAMS / 3 * 0.8, shares
        for test_id in test_ids:
            site.upstreams.feed(test_id, b"data: 2 %s\n\n" % test_id.encode())
            site.upstreams.end_feed(test_id)
        for test_id, (connection, pieces) in zip(test_ids, streams, strict=True):
            rest = [piece async for piece in pieces]
            assert b"".join(rest) == b"data: 2 %s\n\n" % test_id.encode()
            connection.abort()
    await site.idle()
    assert problems(site.epp) == []


async def test_a_burst_from_one_connection_pool_loses_nothing(site: Site) -> None:
    """Keep-alive connections, many requests each, all different."""

    async def worker(number: int) -> int:
        done = 0
        async with await Connection.open(site.port) as connection:
            for n in range(20):
                test_id = new_id()
                headers = [JSON_TYPE, (TEST_ID, test_id), site.selection(None)]
                body = completion(300 + 97 * n, salt=f"{number}-{n}")
                await connection.send("POST", "/v1/completions", headers, body)
                assert (await connection.answer()).status == 200
                assert site.upstreams.one(test_id).body == body
                done += 1
        return done

    assert sum(await asyncio.gather(*map(worker, range(20)))) == 400
    await site.idle()
