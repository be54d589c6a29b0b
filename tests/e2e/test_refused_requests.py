"""Requests that get no endpoint, and bodies that only look as if they should not."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import brotli
import pytest
import zstandard

from bench.stack import Epp
from epp.core.headers import DROP_REASON
from tests.e2e import http2
from tests.e2e.conftest import BODY_BYTES_MAX, EPP_FLAGS, config
from tests.e2e.http1 import JSON_TYPE, Answer, Connection
from tests.e2e.http2 import Http2
from tests.e2e.site import Site, completion, metric, picked, until
from tests.e2e.upstreams import TEST_ID, Upstreams, new_id

MALFORMED = {
    "truncated": b'{"model":"sim","prompt":"se',
    "no text": b"\xff\xfe\xfd",
    "a list": b"[]",
    "a string": b'"text"',
    "null": b"null",
    "deep": b'{"model":"sim","prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "no model": b'{"prompt":"x"}',
    "a number as model": b'{"model":7,"prompt":"x"}',
}
GOOD = completion(300, salt="refused")
CODINGS = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.compress,
    "made-up": bytes.swapcase,
}


def assert_refused(answer: Answer | http2.Answer, status: int, reason: str) -> str:
    """Checks the shape of a refusal; returns its message."""
    assert answer.status == status, answer
    assert answer.header("content-type") == "application/json"
    assert answer.header(DROP_REASON) == reason
    error = answer.json()["error"]
    assert error["code"] == status
    assert len(answer.body) < 2_000
    return error["message"]


@pytest.mark.parametrize("name", MALFORMED)
async def test_B01_a_malformed_body_is_refused_and_the_connection_goes_on(
    site: Site, name: str
) -> None:
    test_id = new_id()
    headers = [JSON_TYPE, (TEST_ID, test_id), site.selection(None)]
    async with await Http2.open(site.port) as connection:
        for body in (MALFORMED[name], MALFORMED[name], GOOD):
            answer = await connection.post("/v1/completions", body, headers)
            if body is not GOOD:
                assert_refused(answer, 400, "rejected-bad-request")
    assert answer.status == 200
    assert site.upstreams.one(test_id).body == GOOD
    await site.idle()


async def test_A06_a_post_of_nothing_is_routed(site: Site) -> None:
    """Over HTTP/1.1 Envoy says so with the headers: no body is waited for."""
    answer, test_id = await site.send("POST", "/v1/completions", [JSON_TYPE], b"")
    assert answer.status == 200
    assert site.upstreams.one(test_id).body == b""


async def test_over_http1_a_refusal_says_that_the_connection_closes(site: Site) -> None:
    """Envoy 1.40 closes it after every answer of ours that is not the upstream's."""
    headers = [JSON_TYPE, site.selection(None)]
    async with await Connection.open(site.port) as connection:
        await connection.send("POST", "/v1/completions", headers, b"[]")
        answer = await connection.answer()
        assert_refused(answer, 400, "rejected-bad-request")
        if answer.header("connection") != "close":
            await connection.send("POST", "/v1/completions", headers, GOOD)
            assert (await connection.answer()).status == 200


async def test_B15_a_body_over_the_limit_is_refused(site: Site) -> None:
    for chunked in (False, True):
        answer, test_id = await site.send(
            "POST",
            "/v1/completions",
            [JSON_TYPE],
            completion(BODY_BYTES_MAX + 1, salt="large"),
            chunked=chunked,
        )
        message = assert_refused(answer, 413, "rejected-body-too-large")
        assert str(BODY_BYTES_MAX) in message
        assert site.upstreams.received(test_id) == []
    answer, test_id = await site.send(
        "POST", "/v1/completions", [JSON_TYPE], completion(BODY_BYTES_MAX, salt="just fits")
    )
    assert answer.status == 200
    assert len(site.upstreams.one(test_id).body) == BODY_BYTES_MAX


@pytest.mark.parametrize("coding", CODINGS)
async def test_B14_a_compressed_body_is_forwarded_as_it_is(site: Site, coding: str) -> None:
    body = CODINGS[coding](completion(20_000, salt=coding))
    answer, test_id = await site.send(
        "POST", "/v1/completions", [JSON_TYPE, ("content-encoding", coding)], body
    )
    assert answer.status == 200, answer
    received = site.upstreams.one(test_id)
    assert received.body == body
    assert received.values("content-encoding") == [coding]


async def test_B14_a_decompression_bomb_is_forwarded_unread(site: Site) -> None:
    """300 KB that would become 300 MB; other requests do not wait for it."""
    body = gzip.compress(b" " * (300 << 20), compresslevel=1)
    headers = [JSON_TYPE, ("content-encoding", "gzip")]
    bomb = asyncio.create_task(site.send("POST", "/v1/completions", headers, body))
    async with asyncio.timeout(5.0):
        for _ in range(20):
            answer, _ = await site.send("POST", "/v1/completions", [JSON_TYPE], GOOD)
            assert answer.status == 200
        answer, test_id = await bomb
    assert answer.status == 200
    assert site.upstreams.one(test_id).body == body


async def test_B18_multipart_is_forwarded_unread(site: Site) -> None:
    body = b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\n' + bytes(range(256)) * 300
    body += b"\r\n--b--\r\n"
    kind = ("content-type", "multipart/form-data; boundary=b")
    for path in ("/v1/audio/transcriptions", "/v1/completions"):
        answer, test_id = await site.send("POST", path, [kind], body)
        assert answer.status == 200, answer
        received = site.upstreams.one(test_id)
        assert received.body == body
        assert received.values("content-type") == [kind[1]]
        assert picked(received) == [received.upstream]


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_B09_unknown_paths_and_methods_are_routed_by_load(site: Site, method: str) -> None:
    body = b"not json at all \x00\xff"
    answer, test_id = await site.send(method, "/some/where?else=1", [JSON_TYPE], body)
    assert answer.status == 200, answer
    received = site.upstreams.one(test_id)
    assert (received.method, received.target) == (method, "/some/where?else=1")
    assert received.body == body
    assert picked(received) == [received.upstream]


async def test_B02_a_lone_surrogate_passes_unchanged(site: Site) -> None:
    body = b'{"model":"sim","messages":[{"role":"user","content":"\\ud83d"}]}'
    answer, test_id = await site.send("POST", "/v1/chat/completions", [JSON_TYPE], body)
    assert answer.status == 200
    assert site.upstreams.one(test_id).body == body


async def test_N09_an_error_of_the_engine_passes_unchanged(site: Site) -> None:
    test_id = new_id()
    page = b"<html>upstream broke</html>"
    site.upstreams.plan(test_id, status=500, headers=[("content-type", "text/html")], body=page)
    answer, _ = await site.send("POST", "/v1/completions", [JSON_TYPE], GOOD, test_id=test_id)
    assert (answer.status, answer.body) == (500, page)
    assert answer.header("content-type") == "text/html"
    # One good answer, so that no endpoint stays suspected of failing.
    for number in range(3):
        await site.send("POST", "/v1/completions", [JSON_TYPE], GOOD, to=number)


async def test_J13_a_client_cannot_forge_the_drop_reason(site: Site) -> None:
    answer, test_id = await site.send("GET", "/v1/models", [(DROP_REASON, "rejected-saturated")])
    assert answer.status == 200
    assert not site.upstreams.one(test_id).values(DROP_REASON)
    assert answer.header(DROP_REASON) is None


async def test_refusals_are_counted_by_reason(site: Site) -> None:
    def dropped() -> float:
        lines = site.epp.metrics().splitlines()
        found = [line for line in lines if line.startswith("epp_drops_total{") and "bad" in line]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    before = dropped()
    for _ in range(3):
        await site.send("POST", "/v1/chat/completions", [JSON_TYPE], json.dumps([1]).encode())
    assert dropped() - before == 3


async def test_one_request_too_many_is_a_readable_429_and_counted(
    folder: Path, upstreams: Upstreams, start_envoy: Callable[..., Site]
) -> None:
    flags = [*EPP_FLAGS, config() + "  streamsMax: 1\n"]
    epp = Epp(folder, [*flags, f"--endpoints={','.join(upstreams.addresses)}"], name="epp-full")
    epp.start()
    full = start_envoy(epp=epp)
    test_id = new_id()
    upstreams.plan(test_id, silent=True)
    try:
        async with await full.open((), completion(300, salt="held"), test_id=test_id):
            await until(lambda: upstreams.received(test_id), what="the first request upstream")
            answer, _ = await full.send("POST", "/v1/completions", [JSON_TYPE], GOOD)
        assert answer.status == 429
        assert answer.header(DROP_REASON) == "rejected-saturated"
        assert json.loads(answer.body)["error"]["code"] == 429
        assert metric(epp.metrics(), "epp_drops_total", 'reason="rejected-saturated"') == 1
        await full.idle()
        answer, _ = await full.send("POST", "/v1/completions", [JSON_TYPE], GOOD)
        assert answer.status == 200
    finally:
        full.envoy.stop()
        epp.stop()
