"""`/debug/state` over HTTP: what the picker knows, with and without a million prefix blocks."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import aiohttp
import msgspec

from bench.loop_watch import watched_loop
from epp.core.decide import Decider, PrefixKeeper, PrefixParams
from epp.core.inflight import Inflight
from epp.core.model import EndpointSpec, Load
from epp.core.pool import Members, Scraped
from epp.core.prefix import names_of
from epp.core.state import State
from epp.edge.admin import BLOCKS_MAX, AdminServer, block_pieces, debug_state
from epp.edge.metrics import Metrics
from tests.unit.test_explain import COST, decider_of, prompt, send_to

READ = msgspec.json.Decoder(State).decode


@asynccontextmanager
async def serving(decider: Decider, now_s: float = 2.0) -> AsyncIterator[str]:
    server = AdminServer(
        host="127.0.0.1",
        port=0,
        metrics=Metrics(dict),
        state=lambda _pool: debug_state(decider, lambda: now_s),
    )
    port = await server.start()
    async with asyncio.timeout(30):
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await server.stop()


async def get(url: str) -> bytes:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 200
        assert response.content_type == "application/json"
        return await response.read()


def busy() -> Decider:
    """10.0.0.1 serves one request and computes another; 10.0.0.2 was scraped."""
    decider = decider_of(COST, 2)
    running = send_to(decider, 1, prompt(2000, "h", 2000))
    decider.first_byte(running, 0.5)
    send_to(decider, 1, prompt(4000, "i", 4000))
    other = decider.pool.endpoints[1]
    for at_s in (1.0, 1.875):
        load = Load(at_s=at_s, waiting=3, running=2, kv_usage_ratio=0.25, attributes={"a": 1.0})
        decider.pool.apply(Scraped(other, load), at_s)
    decider.forecast.learner.decoded(0, step_s=0.02, inflight=1, inflight_tokens=9, now_s=1.75)
    return decider


async def test_the_page_shows_all_the_policy_knows() -> None:
    decider = busy()
    async with serving(decider) as url:
        data = await get(f"{url}/debug/state")
    assert b'prefix_blocks": {' not in data
    state = READ(data)
    first, second = state.endpoints
    rates = decider.forecast.learner.rates(0)
    assert (first.inflight_requests, first.waiting_for_first_byte) == (2, 1)
    assert (first.context_tokens, first.inflight_tokens) == (6000, 4000)
    # It has been in service since the first byte before, for longer than it should take.
    assert first.backlog_s == first.own_backlog_s == 0.0
    assert first.proven
    assert (first.last_pick_number, first.prefix_blocks) == (2, 31 + 62)
    assert first.learned.token_s == rates.token_s
    assert first.learned.prefill_tokens_per_s == 1 / rates.token_s
    assert (first.learned.answers, first.learned.age_s) == (1, 0.25)
    assert (second.foreign_requests, second.foreign_waiting) == (5, 3)
    assert second.backlog_s > second.own_backlog_s == 0.0
    assert second.learned.age_s is None
    assert (second.load.age_s, second.load.stale, second.load.waiting) == (0.125, False, 3)
    assert second.load.attributes == {"a": 1.0}
    assert state.profile.cost is not None
    assert state.profile.cost.type == "expected-latency"
    assert state.profile.cost.parameters["ownWeight"] == 1.3
    assert state.profile.picker.type == "max-score-picker"
    assert state.forecast.work_s_mean == decider.forecast.work_s_mean


async def test_the_blocks_of_each_endpoint_are_named_when_asked_for() -> None:
    decider = busy()
    async with serving(decider) as url:
        state = READ(await get(f"{url}/debug/state?blocks=true"))
        async with aiohttp.ClientSession() as session:
            async with session.head(f"{url}/debug/state?blocks=true") as response:
                assert (response.status, await response.read()) == (200, b"")
            async with session.get(f"{url}/debug/state?blocks=all") as response:
                assert response.status == 400
                assert "/debug/state?blocks=true" in await response.text()
    blocks = state.prefix_blocks
    assert isinstance(blocks, dict)
    youngest, oldest = blocks["10.0.0.1:8000"].runs
    request = prompt(4000, "i", 4000)
    decider.prefix.match(request)
    assert names_of(youngest) == request.chains[0]
    assert len(names_of(oldest)) == 31
    assert blocks["10.0.0.1:8000"].left_out == 0
    assert blocks["10.0.0.2:8000"].runs == ()


async def test_a_running_picker_explains_a_request(tmp_path) -> None:
    body = '{"model": "m", "prompt": "' + "h" * 8192 + '"}'
    (tmp_path / "body.json").write_text(body)
    async with serving(busy()) as url:
        explaining = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "epp", "explain", "--live", url, "--path", "/v1/completions"),
            str(tmp_path / "body.json"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await explaining.communicate()
    assert (explaining.returncode, err) == (0, b"")
    assert out.startswith(b"10.0.0.1:8000: 1984 of 2048 tokens cached, nothing before it, costs ")
    assert b"; 10.0.0.2:8000 would cost " in out
    assert b" behind 3 prefills" in out


def with_blocks(blocks: int, endpoints: int, run: int) -> Decider:
    decider = Decider(
        pool=decider_of(COST, 0).pool,
        profile=COST,
        inflight=Inflight(),
        prefix=PrefixKeeper(PrefixParams(endpoint_blocks_max=blocks, blocks_max_total=blocks)),
        rng=Random(1),
    )
    specs = tuple(EndpointSpec(host=f"10.0.0.{n}", port=8000) for n in range(endpoints))
    decider.pool.apply(Members(specs), 0.0)
    rng = Random(2)
    for endpoint in decider.pool.endpoints:
        for _ in range(blocks // endpoints // run):
            chain = [rng.getrandbits(60) for _ in range(run)]
            decider.prefix.index.learn(endpoint.slot, (chain,))
    return decider


async def test_D11_requests_pass_while_a_million_blocks_are_written() -> None:
    decider = with_blocks(BLOCKS_MAX, 50, 20)
    async with serving(decider) as url, aiohttp.ClientSession() as session:
        size_bytes = 0
        async with (
            watched_loop() as watch,
            session.get(f"{url}/debug/state?blocks=true") as response,
        ):
            async for piece in response.content.iter_any():
                size_bytes += len(piece)
    assert size_bytes > BLOCKS_MAX * 17
    assert watch.longest_s < 0.03, "the whole page costs 0.1 s"


def test_D11_beyond_the_bound_the_oldest_blocks_are_left_out_and_counted() -> None:
    decider = with_blocks(4_000, 2, 10)
    first, second = decider.pool.endpoints
    decider.prefix.index.learn(first.slot, (range(10),))
    data = b"{" + b"".join(block_pieces(decider, 1_000)) + b"}"
    found = msgspec.json.decode(data)
    names = names_of(" ".join(found[first.address]["runs"]))
    assert names[:10] == list(range(10)), "the youngest come first"
    for endpoint in (first, second):
        of_one = found[endpoint.address]
        listed = len(names_of(" ".join(of_one["runs"])))
        assert listed + of_one["left_out"] == of_one["held"]
        assert 490 <= listed <= 500


def test_what_is_left_of_a_cut_list_holds_all_blocks_before_each() -> None:
    decider = decider_of(COST, 1)
    (endpoint,) = decider.pool.endpoints
    rng = Random(3)
    chains = [[rng.getrandbits(60) for _ in range(30)] for _ in range(3)]
    chains += [chains[0][:12] + [rng.getrandbits(60) for _ in range(9)]]
    for chain in rng.choices(chains, k=20):
        decider.prefix.index.learn(endpoint.slot, (chain[: rng.randint(5, 30)],))
    held = decider.prefix.held_by(endpoint)
    for blocks_max in range(held + 1):
        found = msgspec.json.decode(b"{" + b"".join(block_pieces(decider, blocks_max)) + b"}")
        names = set(names_of(" ".join(found[endpoint.address]["runs"])))
        assert len(names) == blocks_max
        for chain in chains:
            there = [name in names for name in chain]
            assert there == sorted(there, reverse=True)


def test_what_several_requests_in_flight_share_is_counted() -> None:
    decider = decider_of(COST, 1)
    (endpoint,) = decider.pool.endpoints
    for tail in range(3):
        send_to(decider, 1, prompt(1100 + tail, "h", 1100))
    send_to(decider, 1, prompt(600, "h", 600))
    shared = msgspec.json.decode(b"{" + b"".join(block_pieces(decider)) + b"}")[endpoint.address][
        "shared"
    ]
    request = prompt(1100, "h", 1100)
    decider.prefix.match(request)
    first, second = request.chains[0][7], request.chains[0][15]
    assert shared == {f"{first:016x}": 4, f"{second:016x}": 3}
    assert endpoint.kv.tokens == debug_state(decider, lambda: 0.0).state.endpoints[0].kv_tokens


def test_blocks_of_an_endpoint_that_leaves_meanwhile_are_not_another_s() -> None:
    decider = with_blocks(400, 2, 10)
    first, second = decider.pool.endpoints
    pieces = block_pieces(decider)
    data = [next(pieces)]
    decider.pool.apply(Members((first.spec, EndpointSpec(host="10.0.0.9", port=8000))), 0.0)
    new = decider.pool.by_address["10.0.0.9:8000"]
    assert new.slot == second.slot
    decider.prefix.index.learn(new.slot, (range(10),))
    found = msgspec.json.decode(b"{" + b"".join([*data, *pieces]) + b"}")
    assert found[second.address]["runs"] == []
