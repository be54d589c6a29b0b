"""The fake API server breaks as told, and only where and as often as told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.kubernetes.fake_api import FakeApi
from tests.kubernetes.faults import (
    Answer,
    Cut,
    Delay,
    Inject,
    Silence,
    Slow,
    error_event,
    event,
    garbage,
)
from tests.kubernetes.objects import lease, pod, pool
from tests.kubernetes.plain import Plain
from tests.kubernetes.resources import LEASE, OBJECTIVE, OLD_GROUP, OLD_OBJECTIVE, POD, POOL

PODS = POD.path("default")


@pytest.fixture(params=[False, True], ids=["plaintext", "tls"])
async def api(request: pytest.FixtureRequest) -> AsyncIterator[FakeApi]:
    async with FakeApi(tls=request.param) as api:
        yield api


@pytest.fixture
async def plain(api: FakeApi) -> AsyncIterator[Plain]:
    async with Plain(api.url, tls=api.client_tls()) as plain:
        yield plain


async def test_a_rule_bends_what_it_names_as_often_as_it_says(api: FakeApi, plain: Plain) -> None:
    rule = api.faults.add(Answer(503, retry_after_s=7), verb="list", plural="pods", count=2)
    api.faults.add(Answer(500), verb="list", plural="pods", count=1)
    assert (await plain.get(POOL.path())).code == 200
    assert (await plain.get(POD.path("default", "a"))).code == 404
    codes = [await plain.get(PODS) for _ in range(4)]
    assert [each.code for each in codes] == [503, 503, 500, 200]
    assert codes[0].headers["Retry-After"] == "7"
    assert codes[0].body["kind"] == "Status"
    assert "Retry-After" not in codes[2].headers
    assert rule.hits == 2


async def test_a_rule_may_name_one_object_or_everything(api: FakeApi, plain: Plain) -> None:
    api.store.put(lease("a"))
    api.store.put(lease("b"))
    one = api.faults.add(Answer(429), name="a")
    assert (await plain.get(LEASE.path("default", "a"))).code == 429
    assert (await plain.get(LEASE.path("default", "b"))).code == 200
    api.faults.remove(one)
    assert (await plain.get(LEASE.path("default", "a"))).code == 200
    api.faults.add(Answer(403), plural="inferenceobjectives", group=OLD_GROUP)
    assert (await plain.get(OBJECTIVE.path())).code == 200
    assert (await plain.get(OLD_OBJECTIVE.path())).code == 403
    api.faults.add(Answer(403, "Forbidden"))
    assert (await plain.get("/version")).reason == "Forbidden"
    api.faults.clear()
    assert (await plain.get("/version")).code == 200


async def test_a_proxy_may_answer_instead(api: FakeApi, plain: Plain) -> None:
    page = b"<html>bad gateway</html>"
    api.faults.add(Answer(502, body=page, content_type="text/html"), count=1)
    answer = await plain.get(PODS)
    assert (answer.code, answer.body) == (502, page.decode())
    api.faults.add(Answer(200, body=b"{}", content_type="application/json"), verb="watch", count=1)
    assert (await plain.get(PODS, watch="1")).body == {}


async def test_a_refusal_changes_nothing_but_a_late_answer_may_have(
    api: FakeApi, plain: Plain
) -> None:
    path = LEASE.path("default")
    api.faults.add(Answer(500), verb="create", count=1)
    assert (await plain.call("POST", path, lease("l"))).code == 500
    assert api.store.get("leases", "default", "l") is None
    rule = api.faults.add(Delay(after=True), verb="create", count=1)
    task = asyncio.create_task(plain.call("POST", path, lease("l")))
    await api.until(lambda: api.store.get("leases", "default", "l"))
    assert not task.done()
    api.faults.remove(rule)
    assert (await task).code == 201
    rule = api.faults.add(Delay(), verb="create", count=1)
    task = asyncio.create_task(plain.call("POST", path, lease("m")))
    await api.until(lambda: rule.hits)
    assert api.store.get("leases", "default", "m") is None
    api.faults.clear()
    assert (await task).code == 201


async def test_a_delay_has_an_end(api: FakeApi, plain: Plain) -> None:
    api.faults.add(Delay(0.05), count=1)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    assert (await plain.get(PODS)).code == 200
    assert loop.time() - began_s >= 0.05


async def test_a_client_that_gives_up_ends_its_hanging_request(api: FakeApi, plain: Plain) -> None:
    rule = api.faults.add(Delay(), verb="list")
    task = asyncio.create_task(plain.get(PODS))
    await api.until(lambda: rule.hits)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await plain.get("/version")).code == 200


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("after_bytes", [0, 1, 200])
async def test_an_answer_is_cut_in_the_middle(
    api: FakeApi, plain: Plain, reset: bool, after_bytes: int
) -> None:
    for i in range(20):
        api.store.put(pod(f"p{i}"))
    api.faults.add(Cut(after_bytes, reset=reset), verb="list")
    with pytest.raises(aiohttp.ClientError):
        await plain.get(PODS)
    api.faults.clear()
    assert len((await plain.get(PODS)).names) == 20


@pytest.mark.parametrize("reset", [True, False])
async def test_an_open_watch_is_cut_within_a_line(api: FakeApi, plain: Plain, reset: bool) -> None:
    async with plain.watch(PODS) as lines:
        await api.until(lambda: api.open_watches)
        api.store.put(pod("a"))
        assert await lines.brief() == ("ADDED", "a")
        api.faults.strike(Cut(after_bytes=25, reset=reset), "pods")
        api.store.put(pod("b"))
        with pytest.raises(aiohttp.ClientError):
            await lines.raw()
    await api.until(lambda: not api.open_watches)


async def test_a_watch_is_cut_at_once(api: FakeApi, plain: Plain) -> None:
    async with plain.watch(PODS) as pods, plain.watch(POOL.path()) as pools:
        await api.until(lambda: api.open_watches == 2)
        api.faults.strike(Cut(), "pods")
        with pytest.raises(aiohttp.ClientError):
            await pods.raw()
        api.store.put(pool("p"))
        assert await pools.brief() == ("ADDED", "p")


async def test_a_silent_watch_stays_open_and_says_nothing(api: FakeApi, plain: Plain) -> None:
    api.faults.add(Silence(after_events=1), verb="watch", count=1)
    async with plain.watch(PODS, timeoutSeconds=1, resourceVersion=api.store.version) as lines:
        await api.until(lambda: api.open_watches)
        for name in "abc":
            api.store.put(pod(name))
        assert await lines.brief() == ("ADDED", "a")
        silence = asyncio.create_task(lines.raw())
        await asyncio.wait([silence], timeout=1.2)
        api.store.put(pod("d"))
        done, _ = await asyncio.wait([silence], timeout=0.2)
        assert not done  # not even the end that its timeoutSeconds asks for
        assert api.open_watches == 1
        silence.cancel()
    await api.until(lambda: not api.open_watches)


async def test_slow_chunks_end_anywhere(api: FakeApi, plain: Plain) -> None:
    note = "ä€𝄞" * 20
    version = api.store.put(pod("a", annotations={"note": note}))["metadata"]["resourceVersion"]
    api.faults.add(Slow(chunk_bytes=3))
    body = (await plain.get(PODS)).body
    assert body["items"][0]["metadata"]["annotations"]["note"] == note
    async with plain.watch(PODS, resourceVersion=version) as lines:
        await api.until(lambda: api.open_watches)
        api.store.put(pod("a", annotations={"note": note + "!"}))
        _, obj = await lines.event()
        assert obj["metadata"]["annotations"]["note"] == note + "!"
        assert len(lines.chunks) > 3


@pytest.mark.parametrize("code", [410, 429, 500])
async def test_an_error_comes_in_a_stream(api: FakeApi, plain: Plain, code: int) -> None:
    api.faults.add(Inject(error_event(code), after_events=1, end=True), verb="watch", count=1)
    async with plain.watch(PODS, resourceVersion=api.store.version) as lines:
        await api.until(lambda: api.open_watches)
        for name in "ab":
            api.store.put(pod(name))
        assert await lines.brief() == ("ADDED", "a")
        type_, obj = await lines.event()
        assert (type_, obj["code"]) == ("ERROR", code)
        assert await lines.raw() is None


async def test_odd_lines_come_in_a_stream_that_goes_on(api: FakeApi, plain: Plain) -> None:
    async with plain.watch(PODS) as lines:
        await api.until(lambda: api.open_watches)
        api.faults.strike(Inject(garbage()))
        line = await lines.raw()
        with pytest.raises(UnicodeDecodeError):
            json.loads(line or b"")
        api.faults.strike(Inject(event("NEWS", {"kind": "Pod"})))
        assert (await lines.event())[0] == "NEWS"
        api.store.put(pod("a"))
        assert await lines.brief() == ("ADDED", "a")


async def test_a_large_object_is_one_line(api: FakeApi, plain: Plain) -> None:
    blob = "x" * 1_500_000
    async with plain.watch(PODS) as lines:
        await api.until(lambda: api.open_watches)
        api.store.put(pod("a", annotations={"blob": blob}))
        _, obj = await lines.event()
        assert obj["metadata"]["annotations"]["blob"] == blob


async def test_faults_of_different_kinds_act_together(api: FakeApi, plain: Plain) -> None:
    api.store.put(pod("a"))
    api.faults.add(Slow(10), verb="list")
    api.faults.add(Cut(30), verb="list")
    api.faults.add(Delay(0.01), verb="list")
    with pytest.raises(aiohttp.ClientError):
        await plain.get(PODS)


async def test_a_server_can_be_down_and_come_back_on_its_port(api: FakeApi, plain: Plain) -> None:
    api.store.put(pod("a"))
    url = api.url
    async with plain.watch(PODS, resourceVersion=api.store.version) as lines:
        await api.until(lambda: api.open_watches)
        await api.outage()
        with pytest.raises(aiohttp.ClientError):
            await lines.raw()
    with pytest.raises(aiohttp.ClientConnectionError):
        await plain.get(PODS)
    await api.recover()
    assert api.url == url
    assert (await plain.get(PODS)).names == ["a"]


async def test_idle_connections_can_be_cut(api: FakeApi, plain: Plain) -> None:
    assert (await plain.get(PODS)).code == 200
    api.cut_connections()
    assert (await plain.get(PODS)).code == 200  # aiohttp connects again


async def test_a_wait_for_what_never_comes_names_the_last_requests(
    api: FakeApi, plain: Plain
) -> None:
    await plain.get(PODS)
    with pytest.raises(TimeoutError, match="list /api/v1/namespaces/default/pods"):
        await api.until(lambda: False, within_s=0.05)
