"""Requests to the API server: what is sent, what an answer means, and what no answer means."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from epp.edge.kubernetes.access import Access
from epp.edge.kubernetes.client import LINE_BYTES_MAX, ApiClient, ApiError, LineSplitter
from epp.edge.kubernetes.objects import (
    INFERENCE_OBJECTIVES,
    INFERENCE_POOLS,
    LEASES,
    PODS,
)
from epp.edge.kubernetes.tokens import FileToken, FixedToken
from epp.edge.tls import self_signed, ssl_context
from tests.integration.kubernetes_script import (
    ScriptedApi,
    Step,
    event,
    mute,
    reply,
    served,
    status,
    streamed,
    until,
)

PATH = "/api/v1/x"
Call = Callable[[ApiClient], Awaitable[object]]


async def get(client: ApiClient) -> bytes:
    return await client.get(PATH)


async def failure(step: Step, call: Call = get, timeout_s: float = 30.0) -> ApiError:
    async with served(ScriptedApi(others=[step], watches=[step])) as api:
        access = Access(server=api.url, namespace="ns")
        async with ApiClient(access, user_agent="t", timeout_s=timeout_s) as client:
            with pytest.raises(ApiError) as raised:
                await call(client)
    return raised.value


async def lines(client: ApiClient, idle_s: float = 60.0) -> list[list[bytes]]:
    async with client.watch(PATH, {"watch": "true"}, total_s=60.0, idle_s=idle_s) as batches:
        return [batch async for batch in batches]


# -- requests ------------------------------------------------------------------------------


def test_paths_of_built_in_and_other_kinds() -> None:
    assert PODS.path("ns") == "/api/v1/namespaces/ns/pods"
    assert LEASES.path("ns", "a/b") == ("/apis/coordination.k8s.io/v1/namespaces/ns/leases/a%2Fb")
    assert INFERENCE_POOLS.path("n s", "p").endswith("/v1/namespaces/n%20s/inferencepools/p")
    groups = [each.group for each in (INFERENCE_OBJECTIVES, *INFERENCE_OBJECTIVES.older)]
    assert groups == ["llm-d.ai", "inference.networking.x-k8s.io"]


async def test_what_is_sent() -> None:
    async with served(ScriptedApi(others=[reply({"made": 1})])) as api:
        access = Access(server=f"{api.url}/k8s/c1", namespace="ns", token=FixedToken("abc"))
        async with ApiClient(access, user_agent="epp/1") as client:
            assert await client.get(PATH, {"a": "b=c,d in (e)"}) == b'{"made": 1}'
            await client.create(PATH, b"{}")
            await client.replace(f"{PATH}/name", b'{"a": 1}')
    first, second, third = api.seen
    assert (first.method, first.path) == ("GET", f"/k8s/c1{PATH}")
    assert first.query == {"a": "b=c,d in (e)"}
    assert first.headers["authorization"] == "Bearer abc"
    assert first.headers["user-agent"] == "epp/1"
    assert first.headers["accept-encoding"] == "identity"
    assert (second.method, second.body) == ("POST", b"{}")
    assert second.headers["content-type"] == "application/json"
    assert (third.method, third.path, third.body) == ("PUT", f"/k8s/c1{PATH}/name", b'{"a": 1}')


async def test_the_kernel_is_told_to_look_for_a_peer_that_is_gone() -> None:
    async with (
        served(ScriptedApi()) as api,
        ApiClient(Access(server=api.url, namespace="ns"), user_agent="t") as client,
        client.watch(PATH, {"watch": "true"}, total_s=60.0, idle_s=60.0),
    ):
        port = int(api.url.rpartition(":")[2])
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ours = [row for row in rows if row[2].endswith(f":{port:04X}") and row[3] == "01"]
        timers = [row[5][:2] for row in ours]
        assert timers == ["02"], "of what is established, as tcp(7) has it: 2 is keepalive"


# -- tokens --------------------------------------------------------------------------------


async def test_a_refused_token_is_read_again_and_the_request_made_once_more(
    tmp_path: Path,
) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    refused, fine = reply(status(401, "Unauthorized"), 401), reply({})
    async with served(ScriptedApi(others=[refused, fine])) as api:
        access = Access(server=api.url, namespace="ns", token=FileToken(file))
        file.write_text("new")
        async with ApiClient(access, user_agent="t") as client:
            assert await client.get(PATH) == b"{}"
    assert [r.headers["authorization"] for r in api.seen] == ["Bearer old", "Bearer new"]


@pytest.mark.parametrize("rotates", [True, False])
async def test_a_token_that_stays_refused_is_an_error(tmp_path: Path, rotates: bool) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    async with served(ScriptedApi(others=[reply(status(401), 401)])) as api:
        access = Access(server=api.url, namespace="ns", token=FileToken(file))
        file.write_text("new" if rotates else "old")
        async with ApiClient(access, user_agent="t") as client:
            with pytest.raises(ApiError) as raised:
                await client.get(PATH)
    assert raised.value.status == 401
    assert len(api.seen) == 1 + rotates


async def test_a_redirect_is_an_error_and_the_token_goes_nowhere_else() -> None:
    async with served(ScriptedApi(others=[reply({})])) as other:
        error = await failure(reply(b"", 302, Location=other.url + PATH))
    assert error.status == 302
    assert other.seen == []


# -- answers that are errors ---------------------------------------------------------------


async def test_a_status_says_what_is_wrong() -> None:
    said = status(409, "Conflict", details={"retryAfterSeconds": 3, "causes": [{"reason": "Old"}]})
    error = await failure(reply(said, 409))
    assert (error.status, error.reason, error.retry_after_s) == (409, "Conflict", 3.0)
    assert error.causes == ("Old",)
    assert str(error) == "409 Conflict: says 409"


@pytest.mark.parametrize(
    ("header", "wait_s"),
    [("7", 7.0), ("99999", 120.0), ("-1", None), ("soon", None), ("1e9", None), ("", None)],
)
async def test_the_wait_that_is_asked_for_is_bounded(header: str, wait_s: float | None) -> None:
    error = await failure(reply(status(429), 429, Retry_After=header))
    assert error.retry_after_s == wait_s


@pytest.mark.parametrize("body", [b"<html>bad gateway</html>", b"", b'{"kind": 7}', b"\xff" * 99])
async def test_a_proxys_page_is_an_error_too(body: bytes) -> None:
    error = await failure(reply(body, 502))
    assert (error.status, error.reason) == (502, "Reason")
    assert len(str(error)) < 400


async def test_an_endless_error_page_is_not_read_to_its_end() -> None:
    error = await failure(reply(b"x" * 10_000_000, 500))
    assert error.status == 500


# -- no answer -----------------------------------------------------------------------------


async def test_where_nobody_listens_there_is_no_answer() -> None:
    async with served(ScriptedApi()) as api:
        url = api.url
    async with ApiClient(Access(server=url, namespace="ns"), user_agent="t") as client:
        with pytest.raises(ApiError) as raised:
            await client.get(PATH)
    assert (raised.value.status, raised.value.reason) == (0, "Connection")


async def test_an_api_server_that_says_nothing_is_given_up() -> None:
    error = await failure(mute, timeout_s=0.05)
    assert (error.status, error.reason) == (0, "Timeout")


async def test_half_an_answer_is_none() -> None:
    async def half(writer: asyncio.StreamWriter, _: object) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        raise ConnectionResetError

    assert (await failure(half)).reason == "Connection"


@pytest.mark.parametrize("answer", [b"nonsense\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"\x16\x03\x01"])
async def test_what_is_not_http_is_no_answer(answer: bytes) -> None:
    async def nonsense(writer: asyncio.StreamWriter, _: object) -> None:
        writer.write(answer)
        await writer.drain()
        raise ConnectionResetError

    error = await failure(nonsense)
    assert (error.status, error.reason) == (0, "Connection")


async def test_a_certificate_nobody_vouches_for_is_no_answer() -> None:
    server_tls = ssl_context(self_signed(["127.0.0.1"]))
    server = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", 0, ssl=server_tls)
    port = server.sockets[0].getsockname()[1]
    access = Access(
        server=f"https://127.0.0.1:{port}", namespace="ns", tls=ssl.create_default_context()
    )
    async with ApiClient(access, user_agent="t") as client:
        with pytest.raises(ApiError) as raised:
            await client.get(PATH)
    server.close()
    assert raised.value.reason == "Tls"


# -- watches -------------------------------------------------------------------------------


async def batches_of(*pieces: bytes, end: str = "close") -> list[list[bytes]]:
    async with (
        served(ScriptedApi(watches=[streamed(*pieces, end=end)])) as api,
        ApiClient(Access(server=api.url, namespace="ns"), user_agent="t") as client,
    ):
        return await lines(client)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_may_be_cut_anywhere(size: int) -> None:
    first, second = event("ADDED", {"name": "pöd"}), event("BOOKMARK", {})
    text = first + b"\n \n" + second + b'{"cut off'
    splitter = LineSplitter()
    lines = [
        line for at in range(0, len(text), size) for line in splitter.split(text[at : at + size])
    ]
    assert lines == [first.strip(), second.strip()]


async def test_the_end_of_a_watch_is_not_taken_for_the_end_of_a_line() -> None:
    line = event("ADDED", {})
    assert await batches_of(line[:5], line[5:] + b'{"cut off') == [[line[:-1]]]


async def test_what_can_be_read_at_once_comes_at_once() -> None:
    batches = await batches_of(event("ADDED", {}) * 100)
    assert [len(batch) for batch in batches] == [100]


async def test_a_line_without_end_is_given_up() -> None:
    piece = b"x" * 2**20
    count = LINE_BYTES_MAX // len(piece) + 1
    error = await failure(streamed(*[piece] * count), lines)
    assert (error.status, error.reason) == (0, "TooLarge")


async def test_a_large_line_is_read() -> None:
    line = event("ADDED", {"name": "x" * 1_500_000})
    (batch,) = await batches_of(line)
    assert batch == [line[:-1]]


async def test_silence_ends_a_watch() -> None:
    error = await failure(streamed(event("ADDED", {})), lambda client: lines(client, idle_s=0.05))
    assert (error.status, error.reason) == (0, "Silent")


async def test_a_reset_ends_a_watch() -> None:
    error = await failure(streamed(event("ADDED", {}), end="reset"), lines)
    assert (error.status, error.reason) == (0, "Connection")


async def test_a_watch_that_is_not_ended_in_time_is_given_up() -> None:
    async def patient(client: ApiClient) -> None:
        async with client.watch(PATH, {"watch": "true"}, total_s=0.1, idle_s=60.0) as batches:
            async for _ in batches:
                pass

    assert (await failure(streamed(), patient)).reason == "Timeout"


async def test_many_watches_leave_room_for_requests() -> None:
    """A lease is renewed however many watches there are."""
    async with (
        served(ScriptedApi(others=[reply({})])) as api,
        ApiClient(Access(server=api.url, namespace="ns"), user_agent="t") as client,
    ):
        watching = [asyncio.create_task(lines(client)) for _ in range(120)]
        await until(lambda: len(api.asked("watch")) == len(watching))
        assert await client.get(PATH) == b"{}"
        for task in watching:
            task.cancel()
        await asyncio.wait(watching)
