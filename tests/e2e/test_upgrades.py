"""Web sockets: picked at the headers, in flight until they end; their bytes pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from bench.stack import Envoy, Epp
from epp.envoy.command import render
from epp.envoy.options import BodyProcessing, EnvoyOptions
from tests.e2e.http1 import Answer, Connection, Headers
from tests.e2e.site import Site, picked, problems
from tests.e2e.upstreams import BYE, TEST_ID, Upstreams, new_id

WEBSOCKET = [
    ("connection", "Upgrade"),
    ("upgrade", "websocket"),
    ("sec-websocket-version", "13"),
    ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
]
HEAD_S_MAX = 10.0


async def ask(site: Site, connection: Connection, test_id: str, *, to: int) -> Answer:
    """Ask for a web socket, send nothing more, and wait for the answer."""
    headers: Headers = [*WEBSOCKET, (TEST_ID, test_id), site.selection(to)]
    await connection.send("GET", "/v1/realtime?model=sim", headers)
    async with asyncio.timeout(HEAD_S_MAX):
        return await connection.head()


async def inflight(site: Site) -> int:
    return int((await asyncio.to_thread(site.epp.state))["inflight_requests"])


async def test_A25_an_upgrade_is_answered_before_any_body_and_its_bytes_pass(variant: Site) -> None:
    """Also where bodies are buffered: there Envoy would wait for the end of one."""
    test_id = new_id()
    variant.upstreams.plan(test_id, upgraded=True)
    async with await Connection.open(variant.port) as connection:
        head = await ask(variant, connection, test_id, to=2)
        assert head.status == 101
        assert head.header("upgrade") == "websocket"
        received = variant.upstreams.one(test_id)
        assert received.upstream == variant.upstreams.addresses[2]
        assert picked(received) == [received.upstream]
        assert received.values("upgrade") == ["websocket"]
        for size in (1, 70_000, 2):  # the second is longer than any buffer between us
            sent = bytes(range(256)) * (size // 256 + 1)
            sending = asyncio.create_task(connection.write(sent))
            assert await connection.read(len(sent)) == sent
            await sending
        assert await inflight(variant) == 1
    await variant.idle()
    assert problems(variant.epp) == []


async def test_A25_a_session_that_the_engine_ends_is_over(variant: Site) -> None:
    test_id = new_id()
    variant.upstreams.plan(test_id, upgraded=True)
    async with await Connection.open(variant.port) as connection:
        assert (await ask(variant, connection, test_id, to=1)).status == 101
        assert await inflight(variant) == 1
        await connection.write(BYE)
        async with asyncio.timeout(HEAD_S_MAX):
            await connection.closed()
        await variant.idle()


async def test_A25_an_engine_that_does_not_upgrade_answers_as_usual(variant: Site) -> None:
    test_id = new_id()
    variant.upstreams.plan(test_id, status=426, body=b'{"error":"no web sockets here"}')
    async with await Connection.open(variant.port) as connection:
        headers = [*WEBSOCKET, (TEST_ID, test_id), variant.selection(0)]
        await connection.send("GET", "/v1/realtime", headers)
        answer = await connection.answer()
    assert (answer.status, answer.body) == (426, b'{"error":"no web sockets here"}')
    await variant.idle()


FULL, BUFFERED = BodyProcessing.FULL_DUPLEX, BodyProcessing.BUFFERED


@pytest.mark.parametrize(
    ("request_body", "response_body", "works"),
    [(FULL, FULL, True), (FULL, BUFFERED, False), (BUFFERED, FULL, False)],
)
async def test_A25_through_the_filters_of_other_requests_an_upgrade_hangs_if_bodies_are_buffered(
    folder: Path,
    upstreams: Upstreams,
    epps: Callable[[bool], Epp],
    request_body: BodyProcessing,
    response_body: BodyProcessing,
    works: bool,
) -> None:
    """Why the bootstrap gives upgrades filters of their own."""
    epp = epps(False)
    options = EnvoyOptions(
        listen="127.0.0.1:0",
        admin="127.0.0.1:0",
        epp=epp.address,
        epp_tls=False,
        endpoints=tuple(upstreams.addresses),
        request_body=request_body,
        response_body=response_body,
    )
    document = yaml.safe_load(render(options))
    listener = document["static_resources"]["listeners"][0]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    for upgrade in manager["upgrade_configs"]:
        del upgrade["filters"]
    envoy = Envoy(folder, options, name="envoy-hangs", bootstrap=yaml.safe_dump(document))
    envoy.start()
    test_id = new_id()
    upstreams.plan(test_id, upgraded=True)
    try:
        site = Site(envoy, epp, upstreams, options)
        async with await Connection.open(site.port) as connection:
            asked = asyncio.ensure_future(ask(site, connection, test_id, to=1))
            if works:
                assert (await asked).status == 101
                await connection.write(b"frame")
                assert await connection.read(5) == b"frame"
            else:
                await asyncio.wait({asked}, timeout=0.5)
                assert not asked.done()
                assert await inflight(site) == 1, "the EPP has answered"
                asked.cancel()
                await asyncio.wait({asked})
        await site.idle()
    finally:
        envoy.stop()
