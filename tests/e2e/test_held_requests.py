"""Requests held through a real Envoy: none reaches an engine that has no room, none is lost.

The recording upstreams answer when the test says so, so that it is known which request runs: one
that is held has not arrived anywhere, whatever the picker believes.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bench.stack import Epp, Stack, http_get
from epp.core.headers import DROP_REASON
from epp.envoy.options import BodyProcessing
from tests.e2e.http1 import JSON_TYPE, Answer, fetch, post
from tests.e2e.http2 import Http2
from tests.e2e.site import Site, completion, log_entries, metric, problems, until
from tests.e2e.upstreams import TEST_ID, Upstreams, new_id

SSE = [("content-type", "text/event-stream")]
CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
limits: {scrapeTimeout: 60s}
plugins:
  - type: expected-latency
    parameters: {hold: true, maxNumSeqs: 1}
"""
FROM_FILE = """\
  - type: file-discovery
    parameters: {path: %s, watchFile: true}
dataLayer:
  discovery: {pluginRef: file-discovery}
"""
MESSAGE_TIMEOUT_S = 0.3
EXIT_S_MAX = 6.0
"""Beyond the drain timeout, for a busy machine."""
ENGINE = ("--max-num-seqs", "1", "--default-output-tokens", "40", "--block-size", "16")
QUEUED_S = 0.3
"""Smallest bucket of the engines' queue times; an answer takes longer."""


@dataclass
class Client:
    """One request under way. Its upstream answers with events, and ends when told to."""

    site: Site
    test_id: str = field(default_factory=new_id)
    body: bytes = b""
    answer: asyncio.Task[Answer] | None = None

    def send(self, size: int = 300) -> Client:
        """Send it."""
        self.site.upstreams.plan(self.test_id, headers=SSE, fed=True)
        self.body = completion(size, salt="hold", stream=True)
        headers = [JSON_TYPE, (TEST_ID, self.test_id), ("x-request-id", self.test_id)]
        call = fetch(self.site.port, "POST", "/v1/completions", headers, self.body)
        self.answer = asyncio.create_task(call)
        return self

    @property
    def runs(self) -> bool:
        """Its request has reached an upstream."""
        return bool(self.site.upstreams.received(self.test_id))

    async def running(self) -> Client:
        """Wait until an upstream has it."""
        await until(lambda: self.runs, what=f"{self.test_id} upstream")
        return self

    async def end(self) -> Answer:
        """Have the upstream finish; returns the answer."""
        self.site.upstreams.feed(self.test_id, b"data: %s\n\n" % self.test_id.encode())
        self.site.upstreams.end_feed(self.test_id)
        return await self.whole()

    async def whole(self) -> Answer:
        assert self.answer is not None
        return await self.answer

    async def leave(self) -> None:
        """The client hangs up."""
        assert self.answer is not None
        self.answer.cancel()
        await asyncio.gather(self.answer, return_exceptions=True)


async def held(site: Site, count: int) -> dict[str, Any]:
    """Wait until so many requests are held; returns the state that says so."""

    def state() -> dict[str, Any] | None:
        found: dict[str, Any] = site.epp.state()
        return found if found["held_requests"] == count else None

    return await until(state, what=f"{count} held requests")


def outcomes(site: Site) -> dict[str, float]:
    page = site.epp.metrics()
    assert metric(page, "epp_held_requests") == 0
    assert metric(page, "epp_held_body_bytes") == 0
    name = "epp_hold_duration_seconds_count"
    words = ("dispatched", "withdrawn", "refused")
    return {word: metric(page, name, f'outcome="{word}"') for word in words}


async def grown(site: Site, before: dict[str, float], **by: int) -> None:
    """Wait until these outcomes, and no others, were counted since."""
    wanted = {word: count + by.get(word, 0) for word, count in before.items()}
    await until(lambda: outcomes(site) == wanted, what=f"outcomes {by}")


def ended(site: Site, test_id: str) -> dict[str, Any] | None:
    """The log line of a finished request."""
    lines = [e for e in log_entries(site.epp) if e["message"] == "request finished"]
    return next((e for e in lines if e.get("request_id") == test_id), None)


@pytest.fixture(scope="module")
def alone() -> Iterator[Upstreams]:
    """One upstream, which can run one request."""
    with Upstreams(1) as running:
        yield running


@pytest.fixture(scope="module")
def start(
    folder: Path, alone: Upstreams, start_envoy: Callable[..., Site]
) -> Iterator[Callable[..., Site]]:
    """Starts an EPP that holds, with some flags, and an Envoy in front of it."""
    started: list[Site] = []

    def start_one(*flags: str, text: str = "", told: bool = True, **envoy: Any) -> Site:
        number = len(list(folder.glob("epp-hold-*.log")))
        given = [f"--config-text={CONFIG}{text}", "--v=3", *flags]
        given += [f"--endpoints={alone.addresses[0]}"] if told else []
        epp = Epp(folder, given, name=f"epp-hold-{number}")
        epp.start()
        site = start_envoy(epp=epp, endpoints=tuple(alone.addresses), **envoy)
        site.upstreams = alone
        started.append(site)
        return site

    yield start_one
    for site in started:
        site.envoy.stop()
        site.epp.stop(grace_s=1.0)


@pytest.fixture(scope="module")
def shared(start: Callable[..., Site]) -> Site:
    """For tests that leave it as they found it."""
    return start("--drain-timeout=0s", message_timeout_s=MESSAGE_TIMEOUT_S)


@pytest.fixture
async def site(shared: Site) -> AsyncIterator[Site]:
    yield shared
    await held(shared, 0)
    await shared.idle()
    assert problems(shared.epp) == []


async def test_a_request_reaches_the_engine_only_after_the_one_before_it_has_ended(
    site: Site,
) -> None:
    before = outcomes(site)
    first = await Client(site).send().running()
    second = Client(site).send()
    state = await held(site, 1)
    (endpoint,) = state["endpoints"]
    assert (endpoint["inflight_requests"], endpoint["held_requests"]) == (1, 1)
    assert not second.runs
    assert metric(site.epp.metrics(), "epp_held_requests") == 1
    assert (await first.end()).status == 200
    await second.running()
    assert (await second.end()).status == 200
    assert site.upstreams.one(second.test_id).body == second.body
    await grown(site, before, dispatched=1)
    line = await until(lambda: ended(site, second.test_id), what="its log line")
    assert 0 < line["held_s"] < line["ttft_s"]
    first_line = await until(lambda: ended(site, first.test_id), what="the first's log line")
    assert "held_s" not in first_line


async def test_held_requests_of_one_size_go_in_the_order_they_came(site: Site) -> None:
    running = await Client(site).send().running()
    waiting = []
    for count in (1, 2, 3, 4):
        waiting.append(Client(site).send())
        await held(site, count)
    while waiting:
        following = waiting.pop(0)
        assert (await running.end()).status == 200
        running = await following.running()
        await held(site, len(waiting))
        assert not any(client.runs for client in waiting)
    assert (await running.end()).status == 200


async def test_C09_a_client_that_leaves_while_held_is_withdrawn(site: Site) -> None:
    before = outcomes(site)
    first = await Client(site).send().running()
    gone, stays = Client(site).send(), None
    await held(site, 1)
    stays = Client(site).send()
    await held(site, 2)
    await gone.leave()
    await held(site, 1)
    assert (await first.end()).status == 200
    await stays.running()
    assert (await stays.end()).status == 200
    assert not gone.runs
    await grown(site, before, withdrawn=1, dispatched=1)
    line = await until(lambda: ended(site, gone.test_id), what="its log line")
    assert line["cause"] == "client-disconnect"
    assert line["held_s"] > 0


async def test_the_gateways_message_timeout_does_not_end_a_hold(site: Site) -> None:
    """Envoy applies it to other modes; a hold may last longer."""
    first = await Client(site).send().running()
    second = Client(site).send()

    def long_held() -> bool:
        (endpoint,) = site.epp.state()["endpoints"]
        return (endpoint["longest_held_s"] or 0) > 3 * MESSAGE_TIMEOUT_S

    await until(long_held, what="a long hold")
    assert (await first.end()).status == 200
    await second.running()
    assert (await second.end()).status == 200


@pytest.mark.parametrize("size", [1 << 10, 200 << 10])
async def test_A07_a_request_with_trailers_arrives_whole_after_its_hold(
    site: Site, size: int
) -> None:
    first = await Client(site).send().running()
    second = Client(site)
    site.upstreams.plan(second.test_id)
    body = completion(size, salt="trailers", stream=True)

    async def with_trailers() -> int:
        async with await Http2.open(site.port) as connection:
            headers = [JSON_TYPE, (TEST_ID, second.test_id)]
            end = [("x-test-trailer", "end")]
            return (await connection.post("/v1/completions", body, headers, end)).status

    answer = asyncio.create_task(with_trailers())
    await held(site, 1)
    assert not second.runs
    assert (await first.end()).status == 200
    assert await answer == 200
    assert site.upstreams.one(second.test_id).body == body


@pytest.mark.parametrize("size", [300_000, 3 << 20])
async def test_a_large_body_is_kept_while_held_and_arrives_whole(site: Site, size: int) -> None:
    first = await Client(site).send().running()
    second = Client(site).send(size)
    await held(site, 1)
    assert metric(site.epp.metrics(), "epp_held_body_bytes") == size
    assert (await first.end()).status == 200
    await second.running()
    assert site.upstreams.one(second.test_id).body == second.body
    assert (await second.end()).status == 200


async def test_a_request_without_body_is_never_held(site: Site) -> None:
    first = await Client(site).send().running()
    answer, test_id = await site.send("GET", "/v1/models")
    assert answer.status == 200
    assert site.upstreams.received(test_id)
    assert (await first.end()).status == 200


async def test_an_upstream_that_dies_lets_the_next_one_go(site: Site) -> None:
    """The first request's answer is cut off; what it took is given back at once."""
    first = await Client(site).send().running()
    second = Client(site).send()
    await held(site, 1)
    site.upstreams.drop(first.test_id)
    await second.running()
    assert (await second.end()).status == 200
    await asyncio.gather(first.whole(), return_exceptions=True)


async def test_in_buffered_mode_nothing_is_held(start: Callable[..., Site]) -> None:
    site = start("--drain-timeout=0s", request_body=BodyProcessing.BUFFERED)
    first = await Client(site).send().running()
    second = await Client(site).send().running()
    state = site.epp.state()
    assert (state["inflight_requests"], state["held_requests"]) == (2, 0)
    for client in (second, first):
        assert (await client.end()).status == 200
    await site.idle()
    assert set(outcomes(site).values()) == {0}


@pytest.mark.parametrize("response", list(BodyProcessing), ids=lambda mode: mode.value)
async def test_whatever_is_seen_of_answers_the_next_request_goes(
    start: Callable[..., Site], response: BodyProcessing
) -> None:
    """Where Envoy shows nothing of an answer its end is guessed: the hold ends all the same."""
    site = start("--drain-timeout=0s", response_body=response)
    first = await Client(site).send().running()
    second = Client(site).send()
    await held(site, 1)
    assert (await first.end()).status == 200
    await second.running()
    assert (await second.end()).status == 200
    if response is not BodyProcessing.NONE:
        await site.idle()
    assert problems(site.epp) == []


# -- endpoints that come and go ------------------------------------------------------------


async def test_M09_when_the_endpoints_go_held_requests_are_refused_with_the_reason(
    folder: Path, alone: Upstreams, start: Callable[..., Site]
) -> None:
    file = folder / "hold-endpoints.json"

    def list_endpoints(*addresses: str) -> None:
        entries = []
        for name in addresses:
            host, _, port = name.rpartition(":")
            entries.append({"name": "engine", "address": host, "port": port})
        new = file.with_suffix(".new")
        new.write_text(json.dumps({"endpoints": entries}))
        new.rename(file)

    list_endpoints(*alone.addresses)
    site = start("--drain-timeout=0s", text=FROM_FILE % file, told=False)
    first = await Client(site).send().running()
    waiting = [Client(site).send() for _ in range(3)]
    await held(site, 3)
    list_endpoints()
    for client in waiting:
        answer = await client.whole()
        assert answer.status == 503
        assert answer.header(DROP_REASON) == "rejected-no-endpoints"
        assert answer.json()["error"]["type"] == "ServiceUnavailableError"
        assert not client.runs
    assert (await first.end()).status == 200, "what runs there goes on"
    await until(lambda: outcomes(site)["refused"] == 3, what="three refusals counted")
    line = await until(lambda: ended(site, waiting[0].test_id), what="its log line")
    assert (line["cause"], line["status"]) == ("dropped", 503)
    assert line["held_s"] > 0


# -- the end of the process ----------------------------------------------------------------


async def exit_status(epp: Epp, seconds: float) -> int:
    process = epp.process
    assert process is not None
    status: int = await asyncio.to_thread(process.wait, seconds)
    epp.process = None
    return status


async def draining(site: Site) -> None:
    site.epp.signal(signal.SIGTERM)
    await until(
        lambda: [e for e in log_entries(site.epp) if e["message"] == "draining"], what="the drain"
    )


async def test_M04_held_requests_are_let_go_in_turn_during_a_drain(
    start: Callable[..., Site],
) -> None:
    site = start("--drain-timeout=30s")
    running = await Client(site).send().running()
    waiting = [Client(site).send() for _ in range(2)]
    await held(site, 2)
    await draining(site)
    await held(site, 2)
    while waiting:
        assert (await running.end()).status == 200
        await until(lambda: any(client.runs for client in waiting), what="the next")
        running = next(client for client in waiting if client.runs)
        waiting.remove(running)
        assert not any(client.runs for client in waiting)
    assert (await running.end()).status == 200
    assert await exit_status(site.epp, EXIT_S_MAX) == 0
    assert problems(site.epp) == []


@pytest.mark.parametrize("seconds", [0, 3])
async def test_M05_at_the_end_of_a_drain_who_is_held_is_refused_with_the_reason(
    start: Callable[..., Site], seconds: int
) -> None:
    site = start(f"--drain-timeout={seconds}s")
    first = await Client(site).send().running()
    waiting = [Client(site).send() for _ in range(2)]
    await held(site, 2)
    site.epp.signal(signal.SIGTERM)
    await assert_refused(waiting)
    assert await exit_status(site.epp, seconds + EXIT_S_MAX) == 0
    await first.leave()
    assert problems(site.epp) == []


async def test_a_second_signal_refuses_who_is_held_at_once(start: Callable[..., Site]) -> None:
    site = start("--drain-timeout=60s")
    first = await Client(site).send().running()
    waiting = [Client(site).send() for _ in range(2)]
    await held(site, 2)
    await draining(site)
    site.epp.signal(signal.SIGTERM)
    await assert_refused(waiting)
    assert await exit_status(site.epp, EXIT_S_MAX) == 0
    await first.leave()
    assert problems(site.epp) == []


async def assert_refused(clients: list[Client]) -> None:
    for client in clients:
        answer = await client.whole()
        assert answer.status == 503, answer
        assert answer.header(DROP_REASON) == "rejected-shutting-down"
        assert answer.header("retry-after") == "1"
        assert not client.runs


# -- simulated engines ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[Stack]:
    place = folder / "hold"
    place.mkdir()
    flags = [f"--config-text={CONFIG}", "--drain-timeout=0s", "--v=3"]
    with Stack(engines=[ENGINE] * 2, epp_flags=flags, folder=place) as running:
        yield running


async def test_no_request_waits_in_an_engine_that_runs_one_at_a_time(stack: Stack) -> None:
    """A burst for two engines: whoever is not run is held, and nobody is lost."""
    bodies = [
        {"model": "sim", "prompt": f"{n} " * 50, "stream": n % 2 == 0, "max_tokens": 40}
        for n in range(8)
    ]
    answers = await asyncio.gather(
        *(post(stack.envoy.port, "/v1/completions", body) for body in bodies)
    )
    assert [answer.status for answer in answers] == [200] * len(bodies)
    page = "".join(
        http_get(f"http://{engine.address}/metrics").decode() for engine in stack.engines
    )
    name = "vllm:request_queue_time_seconds"
    assert metric(page, f"{name}_count") == len(bodies)
    assert metric(page, f"{name}_bucket", f'le="{QUEUED_S}"') == len(bodies)
    assert metric(page, "vllm:e2e_request_latency_seconds_bucket", f'le="{QUEUED_S}"') == 0
    finished = [engine.get("/sim/state")["counters"]["finished"] for engine in stack.engines]
    assert sum(finished) == len(bodies)
    assert min(finished) >= 1
    dispatched = metric(
        stack.epp.metrics(), "epp_hold_duration_seconds_count", 'outcome="dispatched"'
    )
    assert dispatched == len(bodies) - len(stack.engines)
