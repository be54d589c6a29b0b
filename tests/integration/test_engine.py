"""The simulated engine over real HTTP, compared with what a real vLLM 0.32 was seen to answer."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.engine.__main__ import main
from bench.engine.cost import CostModel
from bench.engine.faults import Faults
from bench.engine.scheduler import EngineLimits
from bench.engine.server import Server, ServerConfig

DATA = Path(__file__).parent / "data" / "engine"
REPOSITORY = Path(__file__).parents[2]
RECORDED = json.loads((DATA / "answers.json").read_text())
LIMITS = EngineLimits(block_tokens=32, kv_blocks=1000)
HELLO = [{"role": "user", "content": "Hello?"}]
POLLS_MAX = 2000
Sample = tuple[str, tuple[tuple[str, str], ...]]


class Client:
    """One engine and a connection pool to it."""

    def __init__(self, server: Server, url: str, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.url = url
        self.session = session

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status, and the body as JSON where it is JSON."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(self.url + path, json=body, headers=names) as answer:
            return answer.status, await body_of(answer)

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as answer:
            return answer.status, await body_of(answer)

    async def state(self, log: int = 0) -> dict[str, Any]:
        return (await self.get(f"/sim/state?log={log}"))[1]

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Ask for the state until it is as wanted."""
        for _ in range(POLLS_MAX):
            state = await self.state(log=10)
            if condition(state):
                return state
        raise AssertionError(f"still not so: {state}")


async def body_of(answer: aiohttp.ClientResponse) -> Any:
    return await (answer.json() if answer.content_type == "application/json" else answer.text())


@asynccontextmanager
async def serving(**config: Any) -> AsyncIterator[Client]:
    settings = {"limits": LIMITS, "max_model_len": 16_384, "cost": CostModel(speed=20.0)}
    server = Server(ServerConfig(**{**settings, **config}))
    port = await server.start("127.0.0.1", 0)
    async with aiohttp.ClientSession() as session:
        yield Client(server, f"http://127.0.0.1:{port}", session)
    await server.stop()


def events(stream: str) -> list[tuple[str, Any]]:
    """(event name, data) of a stream, in order; `[DONE]` is data of its own."""
    parsed = []
    for frame in stream.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in frame.splitlines())
        if lines:
            data = lines["data"]
            parsed.append((lines.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return parsed


def assert_same_shape(ours: Any, theirs: Any, path: str = "$") -> None:
    """Whatever we write, vLLM writes under the same key with the same JSON type."""
    if ours is None or theirs is None:
        return
    assert type(ours) is type(theirs) or {type(ours), type(theirs)} == {int, float}, path
    if isinstance(ours, dict):
        assert not ours.keys() - theirs.keys(), path
        for key, value in ours.items():
            assert_same_shape(value, theirs[key], f"{path}.{key}")
    elif isinstance(ours, list) and theirs:
        for value in ours:
            assert_same_shape(value, theirs[0], f"{path}[]")


ANSWERS = [
    ("completions", "/v1/completions", {"prompt": "a prompt", "max_tokens": 8}),
    ("chat", "/v1/chat/completions", {"messages": HELLO, "max_tokens": 8}),
    ("responses", "/v1/responses", {"input": "Hello?", "max_output_tokens": 8}),
    ("messages_anthropic", "/v1/messages", {"messages": HELLO, "max_tokens": 8}),
    ("embeddings", "/v1/embeddings", {"input": ["hello world", "bye"]}),
    ("messages_count", "/v1/messages/count_tokens", {"messages": HELLO}),
    ("tokenize_prompt", "/tokenize", {"prompt": "some words", "return_token_strs": True}),
    ("detokenize", "/detokenize", {"tokens": [100, 101]}),
    ("err_400_no_messages", "/v1/chat/completions", {}),
    ("err_400_too_long", "/v1/completions", {"prompt": [5] * 17_000}),
    ("err_400_maxtok", "/v1/completions", {"prompt": "a", "max_tokens": 100_000}),
    ("err_model_404", "/v1/completions", {"prompt": "a", "model": "nope"}),
]


@pytest.mark.parametrize(("name", "path", "body"), ANSWERS, ids=[name for name, _, _ in ANSWERS])
async def test_answers_have_the_shape_of_recorded_ones(name, path, body) -> None:
    recorded = RECORDED[name]
    async with serving() as client, client.session.post(client.url + path, json=body) as answer:
        assert answer.status == recorded["status"]
        assert answer.headers["content-type"] == recorded["content_type"]
        assert answer.headers["x-sim-engine"] == client.server.name
        ours = await answer.json()
        assert_same_shape(ours, recorded["body"])
        if "error" in ours:
            assert ours["error"]["type"] == recorded["body"]["error"]["type"]
            assert ours["error"]["param"] == recorded["body"]["error"]["param"]


STREAMS = [
    ("completions_stream", "/v1/completions", {"prompt": "a", "max_tokens": 8}),
    (
        "completions_stream_usage",
        "/v1/completions",
        {"prompt": "a", "max_tokens": 8, "stream_options": {"include_usage": True}},
    ),
    (
        "chat_stream",
        "/v1/chat/completions",
        {"messages": HELLO, "max_tokens": 8, "stream_options": {"include_usage": True}},
    ),
    ("responses_stream", "/v1/responses", {"input": "Hello?", "max_output_tokens": 2}),
    ("messages_anthropic_stream", "/v1/messages", {"messages": HELLO, "max_tokens": 3}),
]


@pytest.mark.parametrize(("name", "path", "body"), STREAMS, ids=[name for name, _, _ in STREAMS])
async def test_streams_have_the_events_of_recorded_ones(name, path, body) -> None:
    recorded = events(RECORDED[name]["body"])
    async with (
        serving() as client,
        client.session.post(client.url + path, json={**body, "stream": True}) as answer,
    ):
        assert answer.headers["content-type"] == RECORDED[name]["content_type"]
        ours = events(await answer.text())
    assert [kind for kind, _ in ours] == [kind for kind, _ in recorded]
    for (_, mine), (_, theirs) in zip(ours, recorded, strict=True):
        assert_same_shape(mine, theirs)
        if isinstance(mine, dict) and mine.get("choices"):
            reasons = [each["choices"][0]["finish_reason"] for each in (mine, theirs)]
            assert reasons[0] == reasons[1]


async def test_a_stream_gives_one_token_per_event_and_the_text_of_the_whole_answer() -> None:
    body = {"prompt": "tell me", "max_tokens": 40}
    async with serving() as client:
        _, whole = await client.post("/v1/completions", body)
        _, stream = await client.post("/v1/completions", {**body, "stream": True})
    texts = [data["choices"][0]["text"] for _, data in events(stream)[:-1]]
    assert len(texts) == 40
    assert "".join(texts) == whole["choices"][0]["text"]
    assert whole["usage"]["completion_tokens"] == 40


async def test_several_prompts_are_several_choices_and_count_together() -> None:
    prompts = [[[1, 2, 3], [4, 5]], ["abcd", "efgh"], [7, 8, 9]]
    async with serving() as client:
        for prompt, choices, tokens in zip(prompts, (2, 2, 1), (5, 2, 3), strict=True):
            body = {"prompt": prompt, "max_tokens": 3}
            status, whole = await client.post("/v1/completions", body)
            assert (status, len(whole["choices"])) == (200, choices)
            assert whole["usage"]["prompt_tokens"] == tokens
            _, stream = await client.post("/v1/completions", {**body, "stream": True})
            seen = [data["choices"][0]["index"] for _, data in events(stream)[:-1]]
            assert sorted(seen) == sorted(list(range(choices)) * 3)


async def test_bad_requests_get_clear_errors() -> None:
    headers = {"Content-Type": "application/json"}
    cases = [
        (b"{bad json", 400, "JSON"),
        (b'{"prompt": 3}', 400, "$.prompt"),
        (b'{"prompt": "a", "max_tokens": 0}', 400, "at least 1"),
        (b'{"prompt": "a", "temperature": -3}', 400, "non-negative"),
        (b'{"prompt": "a", "n": 2}', 400, "n=2"),
        (b'{"prompt": ""}', 400, "empty"),
        (b'{"prompt": []}', 400, "empty"),
        (b'{"prompt": [-1]}', 400, "token id"),
        (b'{"prompt": "\xff"}', 400, "JSON"),
    ]
    async with serving() as client:
        url = client.url + "/v1/completions"
        for body, status, words in cases:
            async with client.session.post(url, data=body, headers=headers) as answer:
                assert answer.status == status
                assert words in (await answer.json())["error"]["message"]
        async with client.session.post(url, data=b"x") as answer:
            assert answer.status == 400
            assert "Unsupported Media Type" in (await answer.json())["error"]["message"]
        assert await client.get("/nope") == (404, RECORDED["err_404_path"]["body"])
        assert await client.get("/v1/completions") == (405, RECORDED["err_405"]["body"])
        assert (await client.state())["counters"]["requests"] == 0


async def test_a_body_of_many_megabytes_is_read_and_refused_for_its_length_only() -> None:
    async with serving() as client:
        body = BytesIO(b'{"prompt": "' + b"word " * 4_000_000 + b'"}')
        headers = {"Content-Type": "application/json"}
        url = client.url + "/v1/completions"
        async with client.session.post(url, data=body, headers=headers) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["param"] == "input_tokens"


async def test_small_routes_answer_as_vllm_does() -> None:
    async with serving(models=("sim", "alias"), loras=("lora-a",)) as client:
        assert await client.get("/health") == (200, "")
        assert await client.get("/ping") == (200, "")
        assert await client.get("/version") == (200, RECORDED["version"]["body"])
        assert await client.get("/load") == (200, {"server_load": 0})
        _, models = await client.get("/v1/models")
        assert_same_shape(models, RECORDED["models"]["body"])
        assert [(card["id"], card["parent"]) for card in models["data"]] == [
            ("sim", None),
            ("alias", None),
            ("lora-a", "sim"),
        ]


async def test_the_request_id_becomes_the_answers_id() -> None:
    async with serving(request_id_headers=True) as client:
        headers = {"X-Request-Id": "mine"}
        for path, body, prefix in (
            ("/v1/completions", {"prompt": "a"}, "cmpl-"),
            ("/v1/chat/completions", {"messages": HELLO}, "chatcmpl-"),
        ):
            url = client.url + path
            async with client.session.post(url, json=body, headers=headers) as answer:
                assert (await answer.json())["id"] == f"{prefix}mine"
                assert answer.headers["x-request-id"] == "mine"


async def test_a_load_report_comes_in_a_header_when_asked_for() -> None:
    async with serving() as client:
        url, body = client.url + "/v1/completions", {"prompt": "a"}
        headers = {"endpoint-load-metrics-format": "JSON"}
        async with client.session.post(url, json=body, headers=headers) as answer:
            kind, _, report = answer.headers["endpoint-load-metrics"].partition(" ")
            assert kind == "JSON"
            assert json.loads(report)["named_metrics"].keys() == {
                "num_requests_waiting",
                "kv_cache_usage_perc",
            }


async def test_usage_tells_cached_tokens_unless_switched_off() -> None:
    body = {"prompt": "x" * 260, "max_tokens": 1}
    async with serving() as client:
        usages = [(await client.post("/v1/completions", body))[1]["usage"] for _ in range(2)]
        assert [usage["prompt_tokens"] for usage in usages] == [65, 65]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        assert cached == [0, 64]
        salted = {**body, "cache_salt": "s"}
        usage = (await client.post("/v1/completions", salted))[1]["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        await client.post("/reset_prefix_cache", {})
        usage = (await client.post("/v1/completions", body))[1]["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    async with serving(prompt_tokens_details=False) as client:
        usage = (await client.post("/v1/completions", body))[1]["usage"]
        assert usage["prompt_tokens_details"] is None


async def test_the_next_turn_of_a_conversation_finds_prompt_and_answer() -> None:
    messages = [{"role": "system", "content": "s" * 333}, {"role": "user", "content": "Why?"}]
    async with serving() as client:
        body = {"messages": messages, "max_tokens": 100}
        _, first = await client.post("/v1/chat/completions", body)
        content = first["choices"][0]["message"]["content"]
        more = [{"role": "assistant", "content": content}, {"role": "user", "content": "And?"}]
        _, second = await client.post("/v1/chat/completions", {"messages": messages + more})
        known = first["usage"]["total_tokens"] - 1
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == known // 32 * 32


async def test_tokenize_agrees_with_usage_and_with_token_id_prompts() -> None:
    async with serving() as client:
        for ask, path, body in (
            ({"prompt": "grüße!"}, "/v1/completions", {"prompt": "grüße!"}),
            ({"messages": HELLO}, "/v1/chat/completions", {"messages": HELLO}),
        ):
            _, tokens = await client.post("/tokenize", ask)
            _, text = await client.post(path, body)
            assert tokens["count"] == len(tokens["tokens"]) == text["usage"]["prompt_tokens"]
        _, tokens = await client.post("/tokenize", {"prompt": "y" * 400})
        await client.post("/v1/completions", {"prompt": "y" * 400})
        _, again = await client.post("/v1/completions", {"prompt": tokens["tokens"]})
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


async def test_the_same_seed_gives_the_same_answers() -> None:
    async def answers(seed: int) -> list[Any]:
        async with serving(seed=seed, name="engine") as client:
            got = []
            for path, body in (
                ("/v1/completions", {"prompt": "abc", "max_tokens": 30}),
                ("/v1/chat/completions", {"messages": HELLO}),
                ("/v1/embeddings", {"input": "abc"}),
            ):
                _, answer = await client.post(path, body)
                got.append({**answer, "created": 0})
            return got

    assert await answers(1) == await answers(1) != await answers(2)


async def test_a_cached_prompt_of_8k_tokens_answers_as_much_sooner_as_the_model_says() -> None:
    cost = CostModel(speed=2.0)
    async with serving(cost=cost) as client:
        body = {"prompt": "z" * 4 * 8192, "max_tokens": 1}
        for _ in range(2):
            await client.post("/v1/completions", body)
        cold, warm = (await client.state(log=2))["log"]
    assert (cold["cached_tokens"], warm["cached_tokens"]) == (0, 8160)
    cold_s = cost.step_s(prefill_tokens=8192, attention_pairs=8192 * 4096)
    assert cold["ttft_s"] == pytest.approx(cold_s, rel=0.001)
    warm_s = cost.step_s(prefill_tokens=32, attention_pairs=32 * 8176)
    assert warm["ttft_s"] == pytest.approx(warm_s, rel=0.001)


async def test_many_requests_at_once_all_get_their_tokens() -> None:
    async with serving(limits=EngineLimits(kv_blocks=1100, max_num_seqs=16)) as client:
        body = {"max_tokens": 20, "stream": True}
        asked = [{**body, "prompt": f"{number} " * 40} for number in range(60)]
        answers = await asyncio.gather(*(client.post("/v1/completions", each) for each in asked))
        assert all(stream.count("data: {") == 20 for _, stream in answers)
        state = await client.state()
    assert state["counters"]["finished"] == 60
    assert state["counters"]["generated_tokens"] == 1200
    assert state["in_flight"] == 0
    assert state["load"]["running"] == state["load"]["waiting"] == 0


async def test_a_full_queue_is_answered_503_and_counted() -> None:
    limits = EngineLimits(max_num_seqs=1, max_num_queued_reqs=2, kv_blocks=1100)
    async with serving(limits=limits) as client:
        body = {"prompt": "a", "max_tokens": 50}
        answers = await asyncio.gather(*(client.post("/v1/completions", body) for _ in range(12)))
        refused = [answer for status, answer in answers if status == 503]
        assert refused
        assert len(refused) + sum(status == 200 for status, _ in answers) == 12
        assert_same_shape(refused[0], RECORDED["err_503_queue_full"]["body"])
        assert refused[0]["error"]["type"] == "Service Unavailable"
        samples = read_page((await client.get("/metrics"))[1])[1]
        rejected = value_of(samples, "admission_rejections_total", reason="max_num_queued_reqs")
        assert rejected == len(refused)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_request_at_once(stream) -> None:
    async with serving(cost=CostModel(speed=1.0)) as client:
        body = {"prompt": "a" * 4000, "max_tokens": 5000, "stream": stream}
        async with open_request(client, body) as reader:
            await client.until(lambda state: state["load"]["running"] == 1)
            if stream:
                await reader.readuntil(b"data: {")
        state = await client.until(lambda state: state["load"]["running"] == 0)
        assert state["load"]["kv_usage_ratio"] == 0.0
        assert state["counters"]["aborted"] == 1
        assert state["log"][-1]["finish"] == "abort"
        assert state["log"][-1]["e2e_s"] < 0.5 + (state["log"][-1]["ttft_s"] or 0.0)
        for _ in range(POLLS_MAX):
            samples = read_page((await client.get("/metrics"))[1])[1]
            if value_of(samples, "num_requests_running") == 0:
                break
        assert value_of(samples, "num_requests_running") == 0


@asynccontextmanager
async def open_request(client: Client, body: Any) -> AsyncIterator[asyncio.StreamReader]:
    """A completion on a connection of its own, which is torn down at the end."""
    host, _, port = client.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    try:
        yield reader
    finally:
        writer.transport.abort()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def test_headers_of_a_stream_come_before_its_first_token() -> None:
    async with serving(faults=Faults(hang=True)) as client:
        body = {"prompt": "a", "stream": True, "max_tokens": 1}
        async with client.session.post(client.url + "/v1/completions", json=body) as answer:
            assert answer.status == 200
            assert (await client.state())["counters"]["generated_tokens"] == 0
            await client.post("/sim/fault", {})
            assert "[DONE]" in await answer.text()


# --- /metrics ---------------------------------------------------------------------------------


def read_page(page: str) -> tuple[dict[str, str], dict[Sample, float]]:
    """Types by family, values by name and labels (in the page's order)."""
    kinds: dict[str, str] = {}
    samples: dict[Sample, float] = {}
    for line in page.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split(" ")
            kinds[name] = kind
        elif not line.startswith("#"):
            name, labels, value = re.fullmatch(r"([\w:]+)\{(.*)\} (\S+)", line).groups()
            pairs = tuple(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels))
            samples[name, pairs] = float(value)
    return kinds, samples


def value_of(samples: dict[Sample, float], name: str, **labels: str) -> float:
    (value,) = (
        value
        for (family, pairs), value in samples.items()
        if family == f"vllm:{name}" and labels.items() <= dict(pairs).items()
    )
    return value


async def test_the_metrics_page_has_recorded_families_labels_and_buckets() -> None:
    recorded_kinds, recorded = read_page((DATA / "metrics_under_load.txt").read_text())
    limits = EngineLimits(block_tokens=32, kv_blocks=256, max_loras=1)
    config = {"limits": limits, "max_model_len": 4096, "loras": ("lora-a",), "models": ("tiny",)}
    async with serving(**config) as client:
        await client.post("/v1/completions", {"prompt": "a", "model": "lora-a"})
        async with client.session.get(client.url + "/metrics") as answer:
            assert answer.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"
            kinds, samples = read_page(await answer.text())
    assert len(kinds) > 40
    assert kinds.items() <= recorded_kinds.items()
    for name in {name for name, _ in samples}:
        ours, theirs = (
            {label_names(pairs) for family, pairs in page if family == name}
            for page in (samples, recorded)
        )
        assert ours == theirs, name
    for label in ("le", "reason", "source", "sleep_state", "finished_reason", "num_gpu_blocks"):
        ours, theirs = (
            {
                (name, value)
                for name, pairs in page
                for key, value in pairs
                if key == label and name in {name for name, _ in samples}
            }
            for page in (samples, recorded)
        )
        assert ours == theirs, label


def label_names(pairs: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    return tuple(name for name, _ in pairs)


async def test_metrics_tell_what_happened() -> None:
    async with serving() as client:
        body = {"prompt": "m" * 400, "max_tokens": 10}
        for _ in range(2):
            await client.post("/v1/completions", body)
        samples = read_page((await client.get("/metrics"))[1])[1]
    expected = {
        "prompt_tokens_total": 200,
        "generation_tokens_total": 20,
        "prefix_cache_queries_total": 200,
        "prefix_cache_hits_total": 96,
        "num_requests_running": 0,
        "kv_cache_usage_perc": 0,
        "time_to_first_token_seconds_count": 2,
        "inter_token_latency_seconds_count": 18,
        "request_prefill_kv_computed_tokens_sum": 104,
    }
    assert {name: value_of(samples, name) for name in expected} == expected
    assert value_of(samples, "request_success_total", finished_reason="length") == 2
    assert value_of(samples, "prompt_tokens_by_source_total", source="local_cache_hit") == 96
    ttft_s = value_of(samples, "time_to_first_token_seconds_sum")
    parts = ("request_queue_time_seconds_sum", "request_prefill_time_seconds_sum")
    assert ttft_s == pytest.approx(sum(value_of(samples, part) for part in parts))


async def test_gauges_show_running_waiting_and_the_adapters_in_use() -> None:
    limits = EngineLimits(max_num_seqs=2, kv_blocks=1100)
    config = {"limits": limits, "loras": ("lora-a", "lora-b"), "cost": CostModel(speed=5.0)}
    async with serving(**config) as client:
        body = {"prompt": "a" * 4000, "max_tokens": 4000, "stream": True}
        names = ("lora-a", "lora-b", "sim", "sim", "sim")
        async with AsyncExitStack() as stack:
            for name in names:
                await stack.enter_async_context(open_request(client, {**body, "model": name}))
            for _ in range(POLLS_MAX):
                samples = read_page((await client.get("/metrics"))[1])[1]
                seen = value_of(samples, "num_requests_waiting"), newest_adapters(samples)
                if seen == (3, "lora-a,lora-b"):
                    break
            assert seen == (3, "lora-a,lora-b")
            assert value_of(samples, "num_requests_running") == 2
            assert value_of(samples, "num_requests_waiting_by_reason", reason="capacity") == 3
            assert 0.1 < value_of(samples, "kv_cache_usage_perc") < 0.3
        await client.until(lambda state: state["in_flight"] == 0)


def newest_adapters(samples: dict[Sample, float]) -> str:
    series = {
        dict(pairs)["running_lora_adapters"]: value
        for (name, pairs), value in samples.items()
        if name == "vllm:lora_requests_info"
    }
    return max(series, key=series.__getitem__)


# --- faults -----------------------------------------------------------------------------------


async def test_every_request_is_answered_500_while_told_to_and_no_longer() -> None:
    async with serving() as client:
        assert (await client.post("/sim/fault", {"error_500": True}))[0] == 200
        status, answer = await client.post("/v1/completions", {"prompt": "a"})
        assert (status, answer["error"]["code"]) == (500, 500)
        assert (await client.get("/health"))[0] == 200
        await client.post("/sim/fault", {})
        assert (await client.post("/v1/completions", {"prompt": "a"}))[0] == 200


async def test_a_hanging_engine_takes_requests_keeps_its_gauges_and_goes_on_when_released() -> None:
    async with serving(faults=Faults(hang=True)) as client:
        asked = asyncio.create_task(client.post("/v1/completions", {"prompt": "a"}))
        await client.until(lambda state: state["in_flight"] == 1)
        samples = read_page((await client.get("/metrics"))[1])[1]
        assert value_of(samples, "num_requests_running") == 0
        assert (await client.get("/health"))[0] == 200
        assert not asked.done()
        await client.post("/sim/fault", {})
        assert (await asked)[0] == 200


async def test_connections_are_dropped_before_and_in_the_middle_of_an_answer() -> None:
    async with serving(faults=Faults(drop=True)) as client:
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.post("/v1/completions", {"prompt": "a"})
        await client.post("/sim/fault", {"drop_after_tokens": 5})
        body = {"prompt": "a", "max_tokens": 500, "stream": True}
        async with open_request(client, body) as reader:
            got = await reader.read()
        assert 5 <= got.count(b"data: {") < 50
        assert b"\r\n0\r\n\r\n" not in got
        state = await client.until(lambda state: state["in_flight"] == 0)
        assert state["counters"]["aborted"] == 1


async def test_metrics_can_be_wrong_slow_or_refused() -> None:
    async with serving(faults=Faults(metrics="html")) as client:
        status, page = await client.get("/metrics")
        assert (status, page[:9]) == (200, "<!doctype")
        await client.post("/sim/fault", {"metrics": "nan"})
        page = (await client.get("/metrics"))[1]
        values = [line.split()[-1] for line in page.splitlines()]
        assert len(values) > 100
        assert set(values) == {"NaN"}
        await client.post("/sim/fault", {"metrics": "error"})
        assert (await client.get("/metrics"))[0] == 500
        await client.post("/sim/fault", {"metrics": "refuse"})
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.get("/metrics")
        await client.post("/sim/fault", {"metrics_delay_s": 0.1})
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        assert (await client.get("/metrics"))[0] == 200
        assert loop.time() - began_s >= 0.1


async def test_health_can_fail_and_an_unknown_switch_is_refused_by_name() -> None:
    async with serving() as client:
        await client.post("/sim/fault", {"unhealthy": True})
        assert (await client.get("/health"))[0] == 503
        status, answer = await client.post("/sim/fault", {"hnag": True})
        assert status == 400
        assert "hnag" in answer["error"]["message"]
        assert "hang" in answer["error"]["message"]
        assert (await client.get("/health"))[0] == 503


# --- the process ------------------------------------------------------------------------------


@asynccontextmanager
async def process(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Client]]:
    """The engine as users start it."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.engine", "--port", "0", *flags),
        stdout=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
    )
    assert child.stdout is not None
    word, url = (await asyncio.wait_for(child.stdout.readline(), 20)).decode().split()
    assert word == "ready"
    try:
        async with aiohttp.ClientSession() as session:
            yield child, Client(None, url, session)
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def read_stream(reader: asyncio.StreamReader) -> str:
    """The rest of a chunked response."""
    got = b""
    while b"\r\n0\r\n\r\n" not in got:
        chunk = await reader.read(65536)
        assert chunk, "the connection was cut"
        got += chunk
    return got.decode()


async def within(seconds: float, what: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(what, seconds)


async def test_sigterm_ends_streams_at_once_in_the_normal_way_and_closes_the_port() -> None:
    async with process("--speed", "1", "--name", "me") as (child, client):
        body = {"prompt": "a", "max_tokens": 5000, "stream": True}
        async with open_request(client, body) as reader:
            await reader.readuntil(b"data: {")
            child.send_signal(signal.SIGTERM)
            rest = await within(2, read_stream(reader))
        assert rest.rstrip().removesuffix("0").rstrip().endswith("data: [DONE]")
        assert await within(2, child.wait()) == 0
        # Somebody else may have got the port by now.
        with suppress(aiohttp.ClientConnectionError):
            async with client.session.get(client.url + "/health") as answer:
                assert answer.headers.get("x-sim-engine") != "me"


async def test_sigterm_with_a_timeout_is_a_trap_healthy_but_500_for_new_requests() -> None:
    async with process("--shutdown-timeout", "10") as (child, client):
        body = {"prompt": "a", "max_tokens": 100, "stream": True}
        async with open_request(client, body) as reader:
            await reader.readuntil(b"data: {")
            child.send_signal(signal.SIGTERM)
            for _ in range(POLLS_MAX):
                status, answer = await client.post("/v1/completions", {**body, "max_tokens": 1})
                if status != 200:
                    break
            assert status == 500
            assert "after shutdown" in answer["error"]["message"]
            assert (await client.get("/health"))[0] == 200
            assert (await client.get("/v1/models"))[0] == 200
            rest = await within(10, read_stream(reader))
        assert rest.count("data: {") == 99
        assert await within(5, child.wait()) == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--max-model-len", "999999999"), "--num-gpu-blocks-override"),
        (("--speed", "0"), "above 0"),
        (("--fault", '{"metrics": "odd"}'), "metrics"),
    ],
)
def test_a_wrong_flag_stops_the_start_and_says_what_would_be_right(flags, words, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--port", "0", *flags])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err
