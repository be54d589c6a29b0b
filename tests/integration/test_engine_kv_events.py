"""The simulated engine's KV events over real sockets, followed from outside as a router does."""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from bench.engine.__main__ import main
from bench.engine.cost import CostModel
from bench.engine.kvevents import KvEventsConfig
from bench.engine.scheduler import EngineLimits
from bench.engine.server import Server, ServerConfig

REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 20.0
END = b"\xff" * 8
ON = KvEventsConfig(
    enable_kv_cache_events=True,
    endpoint="tcp://127.0.0.1:*",
    replay_endpoint="tcp://127.0.0.1:*",
    topic="kv@here",
)
Batch = tuple[int, list[Any]]
"""Sequence and events."""


class Followed:
    """One engine with events on, its clients and its followers."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, context: zmq.asyncio.Context
    ) -> None:
        self.url = url
        self.session = session
        self.context = context

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as answer:
            assert answer.status == 200
            return await answer.json()

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> None:
        async with self.session.post(self.url + path, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()

    async def complete(self, prompt: Any, max_tokens: int = 1, **body: Any) -> None:
        body = {"prompt": prompt, "max_tokens": max_tokens, **body}
        await self.post("/v1/completions", body)

    async def reset(self) -> None:
        await self.post("/reset_prefix_cache", None)

    async def fault(self, **faults: Any) -> None:
        await self.post("/sim/fault", faults)

    async def source(self) -> dict[str, Any]:
        return (await self.get("/kv_event_sources"))["0"]

    async def subscribe(self) -> zmq.asyncio.Socket:
        """A live follower that has seen the newest batch and so will see all that come."""
        live = self.context.socket(zmq.SUB)
        live.rcvhwm = 0
        live.connect((await self.source())["endpoint"])
        live.subscribe(b"kv@")
        for number in range(10_000):
            await self.complete([7_000_000 + number] * 32)
            if await live.poll(20):
                break
        last = (await self.settled())["next_sequence"] - 1
        while (await received(live))[0] < last:
            pass
        return live

    async def replay(self, first: int = 0, *, topic: bool = True) -> list[Batch]:
        """All that the engine still has from sequence `first` on."""
        with self.context.socket(zmq.DEALER) as asking:
            asking.linger = 0
            asking.rcvhwm = 0
            asking.connect((await self.source())["replay_endpoint"])
            await asking.send_multipart([b"", first.to_bytes(8, "big")])
            batches = []
            while True:
                frames = await asyncio.wait_for(asking.recv_multipart(), DEADLINE_S)
                assert len(frames) == (4 if topic else 3)
                assert frames[0] == b""
                if frames[-2] == END:
                    assert frames[-1] == b""
                    assert not topic or frames[1] == b""
                    return batches
                assert not topic or frames[1] == b"kv@here"
                batches.append(batch_of(*frames[-2:]))

    async def events(self) -> list[Any]:
        return [event for _, events in await self.replay() for event in events]

    async def settled(self) -> dict[str, Any]:
        """The cache when all that happened to it was told."""
        return await self.until("/sim/kv_blocks", lambda state: state["settled"])

    async def until(self, path: str, condition: Callable[[Any], bool]) -> Any:
        deadline_s = asyncio.get_running_loop().time() + DEADLINE_S
        while not condition(state := await self.get(path)):
            assert asyncio.get_running_loop().time() < deadline_s, state
        return state


def batch_of(sequence: bytes, payload: bytes) -> Batch:
    at_s, events, rank = msgspec.msgpack.decode(payload)
    assert at_s > 1.7e9
    assert rank == 0
    return int.from_bytes(sequence, "big"), events


async def received(live: zmq.asyncio.Socket) -> Batch:
    topic, sequence, payload = await asyncio.wait_for(live.recv_multipart(), DEADLINE_S)
    assert topic == b"kv@here"
    assert len(sequence) == 8
    return batch_of(sequence, payload)


@asynccontextmanager
async def engine(
    events: KvEventsConfig = ON, *, block_tokens: int = 32, kv_blocks: int = 1000, **config: Any
) -> AsyncIterator[Followed]:
    budget_tokens = config.pop("budget_tokens", 8192)
    limits = EngineLimits(
        block_tokens=block_tokens, kv_blocks=kv_blocks, max_num_batched_tokens=budget_tokens
    )
    server = Server(
        ServerConfig(
            limits=limits,
            max_model_len=limits.kv_tokens,
            cost=CostModel(speed=100.0),
            kv_events=events,
            **config,
        )
    )
    port = await server.start("127.0.0.1", 0)
    context = zmq.asyncio.Context()
    async with AsyncExitStack() as stack:
        stack.callback(context.destroy, linger=0)
        stack.push_async_callback(server.stop)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Followed(f"http://127.0.0.1:{port}", session, context)


class Holdings:
    """What somebody knows of a cache who saw these batches and nothing else."""

    def __init__(self) -> None:
        self.copies: Counter[int] = Counter()
        self.next_sequence = 0
        self.removals = 0

    def apply(self, batch: Batch) -> None:
        sequence, events = batch
        assert sequence == self.next_sequence, "a gap"
        self.next_sequence += 1
        for event in events:
            if event["type"] == "BlockStored":
                self.copies.update(event["block_hashes"])
            elif event["type"] == "BlockRemoved":
                (name,) = event["block_hashes"]
                self.copies[name] -= 1
                assert self.copies[name] >= 0
                self.removals += 1
            else:
                assert event == {"type": "AllBlocksCleared"}
                self.copies.clear()

    @property
    def blocks(self) -> set[int]:
        return set(+self.copies)


async def assert_told(followed: Followed, batches: list[Batch]) -> Holdings:
    """The batches add up to the cache."""
    state = await followed.settled()
    holdings = Holdings()
    for batch in batches:
        holdings.apply(batch)
    assert holdings.next_sequence == state["next_sequence"]
    assert holdings.blocks == set(state["blocks"])
    return holdings


async def disturb(followed: Followed, *, seed: int, requests: int) -> None:
    """Conversations, unrelated prompts, salts, adapters and resets, up to eight at once."""
    rng = Random(seed)
    gate = asyncio.Semaphore(8)

    async def ask() -> None:
        async with gate:
            shared, own = rng.randrange(4), rng.randrange(6)
            prompt = [1000 + shared] * rng.randrange(100) + [own] * rng.randrange(1, 60)
            model = rng.choice(["sim", "sim", "adapter"])
            salt = rng.choice([None, None, "salt"])
            tokens = rng.randrange(1, 60)
            if rng.random() < 0.03:
                await followed.reset()
            await followed.complete(prompt, tokens, model=model, cache_salt=salt)

    await asyncio.gather(*(ask() for _ in range(requests)))


# --- what is told ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_all_that_was_published_adds_up_to_what_is_cached_under_eviction(seed) -> None:
    async with engine(block_tokens=8, kv_blocks=150, loras=("adapter",)) as followed:
        await disturb(followed, seed=seed, requests=110)
        holdings = await assert_told(followed, await followed.replay())
    assert holdings.removals > 100


async def test_a_block_is_told_as_a_real_engine_told_it() -> None:
    """Recorded from vLLM 0.32, its hashes included."""
    recorded = {
        "type": "BlockStored",
        "block_hashes": [702757842669265042, 12727516518541667169],
        "parent_block_hash": None,
        "token_ids": list(range(100, 164)),
        "block_size": 32,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    async with engine() as followed:
        await followed.complete(list(range(100, 164)))
        ((sequence, events),) = await followed.replay()
    assert sequence == 0
    assert events == [recorded]
    assert list(events[0]) == list(recorded)


async def test_adapter_and_salt_are_told_and_make_other_blocks() -> None:
    async with engine(loras=("first", "second")) as followed:
        for model in ("sim", "second"):
            for salt in ("", "pepper"):
                await followed.complete([5] * 64, model=model, cache_salt=salt)
        events = await followed.events()
    keys = [event["extra_keys"] for event in events]
    assert keys == [
        [None, None],
        [["pepper"], None],
        [["second"], ["second"]],
        [["second", "pepper"], ["second"]],
    ]
    loras = [(event["lora_id"], event["lora_name"]) for event in events]
    assert loras == [(None, None), (None, None), (2, "second"), (2, "second")]
    assert len({name for event in events for name in event["block_hashes"]}) == 8


async def test_hashes_can_be_verified_from_what_events_tell() -> None:
    """A slow verifier of vLLM's chain: sha256 over pickled (parent, tokens, extra keys)."""

    def hash_of(value: object) -> bytes:
        return sha256(pickle.dumps(value, 5)).digest()

    async with engine(block_tokens=16, loras=("adapter",)) as followed:
        await disturb(followed, seed=7, requests=40)
        events = await followed.events()
    digests: dict[int | None, bytes] = {None: hash_of("vllm-none-hash")}
    for event in events:
        if event["type"] != "BlockStored":
            continue
        lora, size = event["lora_name"], event["block_size"]
        parent = event["parent_block_hash"]
        assert len(event["token_ids"]) == size * len(event["block_hashes"])
        for index, (name, told) in enumerate(
            zip(event["block_hashes"], event["extra_keys"], strict=True)
        ):
            tokens = tuple(event["token_ids"][index * size : (index + 1) * size])
            keys: list[tuple[str, ...]] = []
            if lora:
                keys.append(("lora", lora.encode().decode(), lora.encode().decode()))
            if "salt" in (told or ()):
                keys.append(("cache_salt", "salt"))
            digest = hash_of((digests[parent], tokens, tuple(keys) or None))
            assert name == int.from_bytes(digest[-8:], "big")
            digests[name] = digest
            parent = name


async def test_each_step_tells_of_its_own_blocks_chunks_and_decodes_alike() -> None:
    async with engine(budget_tokens=64) as followed:
        # Chunks of 64, 64 and 32 tokens; of the 70 tokens of output the last is not computed.
        await followed.complete(list(range(160)), 70)
        batches = await followed.replay()
    stored = [event for _, events in batches for event in events]
    assert [len(event["block_hashes"]) for event in stored] == [2, 2, 1, 1, 1]
    assert [sequence for sequence, _ in batches] == list(range(5))
    parents = [event["parent_block_hash"] for event in stored]
    assert parents == [None, *(event["block_hashes"][-1] for event in stored[:-1])]
    tokens = [token for event in stored for token in event["token_ids"]]
    assert tokens[:160] == list(range(160))
    assert len(tokens) == 224


async def test_what_is_found_in_the_cache_is_not_told_again() -> None:
    async with engine() as followed:
        for _ in range(3):
            await followed.complete([9] * 100)
        assert len(await followed.replay()) == 1


async def test_a_reset_is_told_with_the_next_step_and_before_its_blocks() -> None:
    async with engine() as followed:
        await followed.complete([1] * 64)
        await followed.reset()
        state = await followed.get("/sim/kv_blocks")
        assert state == {"settled": False, "next_sequence": 1, "blocks": []}
        await followed.complete([2] * 32)
        batches = await followed.replay()
        await assert_told(followed, batches)
    kinds = [[event["type"] for event in events] for _, events in batches]
    assert kinds == [["BlockStored"], ["AllBlocksCleared", "BlockStored"]]


SESSIONS = [
    ({"session_id": "b"}, "h", "x", "b"),
    ({"session_id": ""}, "h", "x", "h"),
    ({}, "h", "x", "h"),
    ({}, None, "x", "x"),
    ({}, "", "x", "x"),
    ({}, 'a b;%20{"\u00e9', "x", 'a b;%20{"\u00c3\u00a9'),
    ({}, None, None, None),
]


@pytest.mark.parametrize(("in_body", "header", "xarg", "told"), SESSIONS)
async def test_the_session_is_that_of_body_then_header_then_extra_argument(
    in_body, header, xarg, told
) -> None:
    body: dict[str, Any] = {"prompt": [3] * 40, "max_tokens": 40, **in_body}
    if xarg is not None:
        body["vllm_xargs"] = {"session_id": xarg, "other": 1}
    headers = {} if header is None else {"X-Session-ID": header}
    async with engine() as followed:
        await followed.post("/v1/completions", body, headers)
        events = await followed.events()
    assert len(events) == 2
    assert [event.get("session_id") for event in events] == [told, told]
    assert all(("session_id" in event) == (told is not None) for event in events)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 200}]}),
        ("/v1/responses", {"input": "x" * 200}),
        ("/v1/messages", {"messages": [{"content": "x" * 200}], "max_tokens": 1}),
    ],
)
async def test_every_api_takes_the_session_header(path, body) -> None:
    async with engine() as followed:
        await followed.post(path, body, {"x-session-id": "s1"})
        events = await followed.events()
    assert {event["session_id"] for event in events} == {"s1"}


# --- how it gets there -------------------------------------------------------------------------


async def test_a_live_follower_sees_what_a_replay_has() -> None:
    async with engine(kv_blocks=100) as followed:
        live = await followed.subscribe()
        first = (await followed.settled())["next_sequence"]
        await disturb_plainly(followed, requests=30)
        last = (await followed.settled())["next_sequence"]
        seen = [await received(live) for _ in range(first, last)]
        assert seen == await followed.replay(first)


async def disturb_plainly(followed: Followed, *, requests: int) -> None:
    for number in range(requests):
        await followed.complete([number % 10] * 200 + [number] * 64)


async def test_dropped_batches_leave_gaps_that_a_replay_fills() -> None:
    async with engine() as followed:
        live = await followed.subscribe()
        first = (await followed.settled())["next_sequence"]
        await followed.fault(kv_events_drop_every=3)
        await disturb_plainly(followed, requests=12)
        last = (await followed.settled())["next_sequence"]
        kept = [sequence for sequence in range(first, last) if (sequence + 1) % 3]
        seen = [await received(live) for _ in kept]
        assert [sequence for sequence, _ in seen] == kept
        replayed = dict(await followed.replay(first))
        assert list(replayed) == list(range(first, last))
        assert all(replayed[sequence] == events for sequence, events in seen)
        counts = (await followed.get("/sim/state"))["kv_events"]
        assert counts["dropped"] == last - first - len(kept)
        await assert_told(followed, await followed.replay())


async def test_repeated_batches_come_twice_with_one_number() -> None:
    async with engine() as followed:
        live = await followed.subscribe()
        first = (await followed.settled())["next_sequence"]
        await followed.fault(kv_events_repeat_every=2)
        await disturb_plainly(followed, requests=4)
        last = (await followed.settled())["next_sequence"]
        expected = [n for n in range(first, last) for _ in range(1 + n % 2)]
        seen = [await received(live) for _ in expected]
        assert [sequence for sequence, _ in seen] == expected
        assert [n for n, _ in await followed.replay(first)] == list(range(first, last))


async def test_a_paused_publisher_keeps_still_and_then_catches_up() -> None:
    async with engine() as followed:
        live = await followed.subscribe()
        before = await followed.get("/sim/state")
        first = (await followed.settled())["next_sequence"]
        await followed.fault(kv_events_pause=True)
        replay = asyncio.create_task(followed.replay(first))
        await disturb_plainly(followed, requests=5)
        last = (await followed.settled())["next_sequence"]
        assert last > first
        after = await followed.get("/sim/state")
        assert after["kv_events"] == before["kv_events"]
        assert not replay.done()
        assert not await live.poll(0)
        await followed.fault()
        seen = [await received(live) for _ in range(first, last)]
        assert [sequence for sequence, _ in seen] == list(range(first, last))
        assert await replay == seen


async def test_too_many_batches_for_a_paused_publisher_are_lost_for_good_and_counted() -> None:
    events = msgspec.structs.replace(ON, max_queue_size=2)
    async with engine(events) as followed:
        await followed.fault(kv_events_pause=True)
        for number in range(5):
            await followed.complete([number] * 40)
        await followed.fault()
        await followed.complete([9] * 40)
        assert [sequence for sequence, _ in await followed.replay()] == [0, 1, 5]
        assert (await followed.get("/sim/state"))["kv_events"]["lost"] == 3


async def test_a_replay_is_bounded_and_starts_where_asked() -> None:
    events = msgspec.structs.replace(ON, buffer_steps=4)
    async with engine(events) as followed:
        for number in range(10):
            await followed.complete([number] * 40)
        assert [sequence for sequence, _ in await followed.replay()] == [6, 7, 8, 9]
        assert [sequence for sequence, _ in await followed.replay(8)] == [8, 9]
        assert await followed.replay(10) == []


async def test_nonsense_at_the_replay_socket_disturbs_nobody() -> None:
    async with engine() as followed:
        await followed.complete([1] * 40)
        odd = followed.context.socket(zmq.DEALER)
        odd.connect((await followed.source())["replay_endpoint"])
        for frames in ([b"x"], [b"", b"", b"", b""], [b"y", b"z"], [b"", b"z" * 100_000]):
            await odd.send_multipart(frames)
        assert len(await followed.replay()) == 1


async def test_a_restarted_engine_counts_from_zero_and_followers_come_back(tmp_path) -> None:
    events = msgspec.structs.replace(
        ON, endpoint=f"ipc://{tmp_path}/live", replay_endpoint=f"ipc://{tmp_path}/replay"
    )
    async with AsyncExitStack() as stack:
        context = zmq.asyncio.Context()
        stack.callback(context.destroy, linger=0)
        live = context.socket(zmq.SUB)
        live.connect(events.endpoint)
        live.subscribe(b"")
        for first_token in (100, 200):
            async with engine(events) as followed:
                assert await followed.replay() == []
                assert (await followed.get("/sim/kv_blocks"))["blocks"] == []
                for number in range(10_000):
                    await followed.complete([first_token] * 32 + [number] * 32)
                    if await live.poll(20):
                        break
                sequence, told = await received(live)
                replayed = await followed.replay()
                assert replayed[sequence] == (sequence, told)
                assert [number for number, _ in replayed] == list(range(len(replayed)))
                assert replayed[0][1][0]["token_ids"] == [first_token] * 32 + [0] * 32
                while sequence < replayed[-1][0]:
                    sequence, _ = await received(live)


async def test_an_address_without_a_wildcard_is_connected_to() -> None:
    async with AsyncExitStack() as stack:
        context = zmq.asyncio.Context()
        stack.callback(context.destroy, linger=0)
        collector = context.socket(zmq.SUB)
        port = collector.bind_to_random_port("tcp://127.0.0.1")
        collector.subscribe(b"")
        events = msgspec.structs.replace(ON, endpoint=f"tcp://127.0.0.1:{port}")
        followed = await stack.enter_async_context(engine(events))
        for number in range(10_000):
            await followed.complete([number] * 32)
            if await collector.poll(20):
                break
        _, events_seen = await received(collector)
        assert events_seen[0]["type"] == "BlockStored"


# --- other dialects ----------------------------------------------------------------------------


async def test_old_engines_tell_arrays_without_sessions_and_replay_without_topics() -> None:
    async with engine(block_tokens=8, kv_blocks=20, loras=("adapter",)) as followed:
        await followed.fault(kv_events_arrays=True)
        await followed.complete([1] * 16, session_id="s", cache_salt="salt", model="adapter")
        await followed.complete([2] * 152)
        batches = await followed.replay(topic=False)
        told: Holdings = Holdings()
        for sequence, events in batches:
            keys = {"BlockStored": "block_hashes", "BlockRemoved": "block_hashes"}
            told.apply((sequence, [{"type": e[0], keys[e[0]]: e[1]} for e in events]))
        assert told.blocks == set((await followed.settled())["blocks"])
    stored, removed = batches[0][1][0], batches[1][1][0]
    assert stored == [
        *("BlockStored", stored[1], None, [1] * 16, 8, 1, "GPU", "adapter"),
        *([["adapter", "salt"], ["adapter"]], 0, "full_attention"),
    ]
    assert removed == ["BlockRemoved", removed[1], "GPU", 0]
    assert removed[1] == stored[1][1:]


async def test_engines_of_the_middle_age_tell_maps_without_sessions() -> None:
    async with engine() as followed:
        await followed.fault(kv_events_no_session=True)
        await followed.complete([1] * 40, session_id="s")
        await followed.fault()
        await followed.complete([2] * 40, session_id="s")
        events = await followed.events()
    assert [event.get("session_id") for event in events] == [None, "s"]


async def test_copies_of_a_block_are_told_and_taken_back_while_it_stays() -> None:
    async with engine(block_tokens=8, kv_blocks=60) as followed:
        await followed.fault(kv_events_copies=True)
        await disturb_plainly(followed, requests=3)
        batches = await followed.replay()
        await followed.fault()
        await followed.complete([999] * 40)
        holdings = await assert_told(followed, await followed.replay())
    stored = [event for event in batches[0][1] if event["type"] == "BlockStored"]
    assert stored[0] == stored[1]
    assert max(holdings.copies.values()) == 1


# --- on and off --------------------------------------------------------------------------------


async def test_without_events_there_are_no_sources_and_blocks_can_be_seen_all_the_same() -> None:
    for events in (KvEventsConfig(), msgspec.structs.replace(ON, publisher="null")):
        async with engine(events) as followed:
            await followed.complete([1] * 64)
            assert await followed.get("/kv_event_sources") == {}
            assert (await followed.get("/sim/state"))["kv_events"] is None
            assert len((await followed.settled())["blocks"]) == 2


async def test_the_source_has_the_keys_of_a_real_one() -> None:
    async with engine() as followed:
        source = await followed.source()
    assert source.keys() == {
        *("enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", "buffer_steps"),
        *("hwm", "max_queue_size", "topic"),
    }
    assert source["publisher"] == "zmq"
    for key in ("endpoint", "replay_endpoint"):
        assert int(source[key].removeprefix("tcp://127.0.0.1:")) > 0


async def test_the_short_flag_publishes_on_free_ports() -> None:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.engine", "--port", "0", "--kv-events"),
        stdout=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
    )
    context = zmq.asyncio.Context()
    try:
        assert child.stdout is not None
        word, url = (await asyncio.wait_for(child.stdout.readline(), DEADLINE_S)).decode().split()
        assert word == "ready"
        async with aiohttp.ClientSession() as session:
            followed = Followed(url, session, context)
            await followed.complete([1] * 32)
            asking = context.socket(zmq.REQ)
            asking.connect((await followed.source())["replay_endpoint"])
            await asking.send(bytes(8))
            frames = await asyncio.wait_for(asking.recv_multipart(), DEADLINE_S)
            assert frames[0] == b""
            assert batch_of(*frames[1:])[0] == 0
        child.terminate()
        assert await asyncio.wait_for(child.wait(), DEADLINE_S) == 0
    finally:
        context.destroy(linger=0)
        if child.returncode is None:
            child.kill()
            await child.wait()


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )


def test_the_package_for_events_is_loaded_only_for_them_and_missed_by_name() -> None:
    start = "import sys, bench.engine.__main__ as m, bench.engine.server; "
    assert run(start + "assert 'zmq' not in sys.modules").returncode == 0
    without = "import sys; sys.modules['zmq'] = None; import bench.engine.__main__ as m; "
    ended = run(without + "m.main(['--port', '0', '--kv-events'])")
    assert ended.returncode == 2
    assert "pip install pyzmq" in ended.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kv-events-config", '{"endpiont": "x"}'), "endpiont"),
        (("--kv-events-config", '{"buffer_steps": 0}'), "buffer_steps"),
        (("--kv-events-config", "no"), "the keys are"),
        (("--kv-events", "65535"), "65534"),
        (
            ("--kv-events-config", json.dumps({**msgspec.to_builtins(ON), "endpoint": "x://*"})),
            "x://",
        ),
    ],
)
def test_a_wrong_flag_stops_the_start_and_says_which(flags, words, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--port", "0", *flags])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_an_address_in_use_is_named(capsys) -> None:
    context = zmq.Context()
    taken = context.socket(zmq.PUB)
    try:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(SystemExit):
            main(["--port", "0", "--kv-events", str(port)])
        assert f"127.0.0.1:{port}" in capsys.readouterr().err
    finally:
        context.destroy(linger=0)
