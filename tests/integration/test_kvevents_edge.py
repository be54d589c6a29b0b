"""KV events over real ZMQ sockets on loopback: gaps, replays, restarts, late joins, both sides."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from epp.core.errors import ConfigError
from epp.core.model import Load
from epp.core.pool import Pool, Scraped
from epp.edge.kvevents import KvEvents, KvEventsSettings
from epp.edge.kvsources import EngineSources, FixedPorts
from epp.edge.kvstream import StreamSettings
from tests.integration.kvpublisher import (
    CLEARED,
    HOST,
    QUICK,
    Books,
    Publisher,
    removed,
    stored,
    until,
    world,
)


@contextmanager
def publishing(**how: object) -> Iterator[Publisher]:
    publisher = Publisher(**how)  # type: ignore[arg-type]
    try:
        yield publisher
    finally:
        publisher.close()


def ports_of(publisher: Publisher) -> FixedPorts:
    return FixedPorts(publisher.port, replay_port=publisher.replay_port)


# -- in order --------------------------------------------------------------------------------


@pytest.mark.parametrize("replay", ["topic", None])
async def test_what_is_published_from_the_first_batch_on_is_known_exactly(
    replay: str | None,
) -> None:
    with publishing(replay=replay) as engine:
        async with world(ports_of(engine)) as w:
            await until(lambda: engine.subscribed)
            for number in range(50):
                engine.publish(stored(number, number + 100), removed(number - 1))
            await until(lambda: w.held == engine.held)
            assert w.sure
            assert w.events.totals.tally.gaps == w.events.totals.tally.restarts == 0


async def test_a_large_batch_is_handed_on_in_pieces() -> None:
    with publishing() as engine:
        async with world(ports_of(engine)) as w:
            await until(lambda: engine.subscribed)
            engine.publish(stored(*range(3_000)))
            await until(lambda: w.held == engine.held)
            assert len(w.books.batches) == 12
            assert w.events.totals.counts.batches == 1


# -- gaps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("replay", ["topic", "bare"])
async def test_a_gap_is_filled_by_a_replay_in_either_form(replay: str) -> None:
    with publishing(replay=replay) as engine:
        async with world(ports_of(engine)) as w:
            await until(lambda: engine.subscribed)
            engine.publish(stored(1, 2, 3))
            await until(lambda: w.held == {1, 2, 3})
            engine.publish(removed(2), lose=True)
            engine.publish(stored(4), lose=True)
            engine.publish(stored(5))
            await until(lambda: w.held == {1, 3, 4, 5})
            tally = w.events.totals.tally
            assert (tally.gaps, tally.lost, w.books.restarts) == (1, 0, 0)
            assert tally.replayed >= 3
            assert w.sure


async def test_a_replay_that_loses_answers_and_its_end_is_asked_for_again() -> None:
    with publishing(replay="lossy") as engine:
        for number in range(20):
            engine.publish(stored(number), removed(number - 5))
        async with world(ports_of(engine)) as w:
            await until(lambda: w.held == engine.held and w.sure)
            assert engine.requests == 3


async def test_a_gap_that_nothing_fills_leaves_no_stale_block_behind() -> None:
    with publishing(replay=None) as engine:
        async with world(ports_of(engine)) as w:
            await until(lambda: engine.subscribed)
            engine.publish(stored(1, 2, 3))
            await until(lambda: w.sure)
            engine.publish(removed(1, 2), lose=True)
            engine.publish(stored(4))
            await until(lambda: w.held == {4})
            assert not w.sure
            assert w.events.totals.tally.lost == 1
            engine.publish(CLEARED, stored(5))
            await until(lambda: w.sure)
            assert w.held == engine.held == {5}


async def test_a_gap_older_than_the_replay_buffer_is_lost_and_the_rest_told() -> None:
    with publishing(buffer=3) as engine:
        async with world(ports_of(engine)) as w:
            await until(lambda: engine.subscribed)
            engine.publish(stored(1, 2, 3))
            await until(lambda: w.held == {1, 2, 3})
            for number in range(10, 20):
                engine.publish(stored(number), removed(1), lose=True)
            engine.publish(stored(20))
            await until(lambda: w.held == {18, 19, 20})
            assert not w.sure
            assert w.books.restarts == 1


async def test_a_silent_replay_socket_delays_what_follows_and_stops_nothing() -> None:
    with publishing(replay="silent") as engine:
        engine.publish(stored(1))
        async with world(ports_of(engine)) as w:
            await until(lambda: w.events.ready.is_set())
            assert not w.sure
            await until(lambda: engine.subscribed)
            engine.publish(stored(2))
            await until(lambda: w.held == {2})
            assert w.events.totals.tally.replays_failed >= 1
            await until(lambda: engine.requests >= 2)


async def test_what_a_full_queue_drops_is_replayed() -> None:
    """The loop stands still while the engine publishes more than all buffers together hold."""
    tight = msgspec.structs.replace(QUICK, live_messages_max=2, replay_idle_s=5.0)
    with publishing(hwm=2) as engine:
        async with world(ports_of(engine), stream=tight) as w:
            await until(lambda: engine.subscribed)
            for number in range(300):
                engine.publish(stored(number), pad=2**18)
            engine.publish(stored(1_000))
            await until(lambda: engine.subscribed)
            while not w.events.totals.tally.gaps:  # only a message that comes through shows the gap
                engine.publish(stored(2_000))
                await asyncio.sleep(0.01)
            await until(lambda: w.held == engine.held and w.sure)
            assert w.events.totals.tally.lost == 0


# -- restarts and connections ----------------------------------------------------------------


async def test_an_engine_that_restarted_and_is_silent_is_found_out() -> None:
    with publishing() as engine:
        async with world(ports_of(engine)) as w:
            await until(lambda: engine.subscribed)
            engine.publish(stored(1))
            engine.publish(stored(2))
            await until(lambda: w.held == {1, 2})
            engine.restart()
            await until(lambda: w.held == set() and w.sure)
            assert w.events.totals.tally.restarts == 1
            await until(lambda: engine.subscribed)
            engine.publish(stored(7))
            await until(lambda: w.held == {7})
            assert w.events.totals.reconnects == 1


async def test_a_restart_that_has_come_further_than_we_had_is_no_gap() -> None:
    with publishing() as engine:
        async with world(ports_of(engine)) as w:
            await until(lambda: engine.subscribed)
            engine.publish(stored(1))
            engine.publish(stored(2))
            await until(lambda: w.held == {1, 2})
            engine.restart()
            for number in range(30, 40):
                engine.publish(stored(number), lose=True)
            await until(lambda: w.held == engine.held and w.sure)
            assert w.events.totals.tally.restarts == 1


async def test_without_a_replay_socket_a_new_connection_counts_as_a_restart() -> None:
    with publishing(replay=None) as engine:
        async with world(ports_of(engine)) as w:
            await until(lambda: engine.subscribed)
            engine.publish(stored(1))
            engine.publish(stored(2))
            await until(lambda: w.held == {1, 2})
            engine.restart()
            await until(lambda: engine.subscribed)
            engine.publish(stored(3))
            await until(lambda: w.held == {3})
            assert w.sure
            assert w.books.restarts == 1


async def test_a_connection_that_broke_costs_nothing_but_a_replay() -> None:
    with publishing() as engine:
        async with world(ports_of(engine)) as w:
            await until(lambda: engine.subscribed)
            engine.publish(stored(1))
            await until(lambda: w.held == {1})
            engine.reopen()
            engine.publish(stored(2), lose=True)
            await until(lambda: w.held == {1, 2})
            assert w.sure
            assert w.books.restarts == 0


async def test_an_engine_that_starts_after_us_is_connected_to() -> None:
    with publishing() as engine:
        sources = ports_of(engine)
        engine.close()
        async with world(sources) as w:
            await until(lambda: w.events.following)
            engine.restart_closed()
            await until(lambda: engine.subscribed)
            engine.publish(stored(1))
            await until(lambda: w.held == {1} and w.sure)


# -- late joins ------------------------------------------------------------------------------


async def test_a_late_join_has_the_whole_history_before_it_is_ready() -> None:
    with publishing() as engine:
        for number in range(2_000):
            engine.publish(stored(number), removed(number - 50))
        async with world(ports_of(engine)) as w:
            await until(lambda: w.events.ready.is_set())
            await until(lambda: w.held == engine.held)
            assert w.sure
            assert w.events.totals.tally.replayed == 2_000


async def test_a_late_join_without_all_history_is_sure_once_the_cache_has_turned_over() -> None:
    with publishing(buffer=2) as engine:
        for number in range(10):
            engine.publish(stored(number))
        async with world(ports_of(engine)) as w:
            w.pool.apply(Scraped(w.endpoint, Load(at_s=0.0, kv_blocks=20)), 0.0)
            await until(lambda: w.events.ready.is_set() and engine.subscribed)
            await until(lambda: w.held == {8, 9})
            assert not w.sure
            for number in range(10, 28):
                engine.publish(stored(number), removed(number - 10))
            await until(lambda: w.sure)
            assert w.held == engine.held


async def test_nobody_waits_for_an_endpoint_that_does_not_answer() -> None:
    with publishing() as engine:
        sources = ports_of(engine)
        engine.close()
        async with world(sources, startup_s=0.05) as w:
            await until(lambda: w.events.ready.is_set())
            assert not w.sure
        engine.restart_closed()


# -- what cannot be read ---------------------------------------------------------------------


async def test_malformed_frames_are_counted_and_end_nothing() -> None:
    with publishing() as engine:
        async with world(ports_of(engine)) as w:
            await until(lambda: engine.subscribed)
            engine.frames(b"kv@x@y", b"\0\0\0", b"\x90")
            engine.frames(b"kv@x@y", b"\x90")
            engine.frames(b"only")
            engine.frames(b"1", b"2", b"3", b"4", b"5")
            engine.frames(b"t", b"\xff" * 8, b"")
            engine.publish(stored(1))
            await until(lambda: w.held == {1})
            assert w.events.totals.malformed_frames == 5
            assert w.sure


async def test_an_unreadable_payload_may_have_been_a_removal() -> None:
    with publishing() as engine:
        async with world(ports_of(engine)) as w:
            await until(lambda: engine.subscribed)
            engine.publish(stored(1))
            await until(lambda: w.held == {1})
            engine.raw(b"\xc1 no msgpack")
            engine.publish(stored(2))
            await until(lambda: w.held == {2})
            assert not w.sure
            assert w.events.totals.counts.malformed_payloads == 1


async def test_a_message_beyond_the_limit_is_lost_and_what_follows_is_not() -> None:
    small = StreamSettings(
        replay_idle_s=0.3, replay_cooldown_s=60.0, message_bytes_max=10_000, resubscribe_s=0.2
    )
    with publishing() as engine:
        async with world(ports_of(engine), stream=small) as w:
            await until(lambda: engine.subscribed)
            engine.publish(stored(1))
            await until(lambda: w.held == {1})
            engine.publish(stored(2), pad=20_000)
            await until(lambda: w.events.totals.reconnects and engine.subscribed)
            await until(lambda: w.events.totals.tally.replays_failed)
            engine.publish(stored(3))
            await until(lambda: w.held == {3})
            assert not w.sure


# -- many endpoints, ranks, sides ------------------------------------------------------------


async def test_engines_that_connect_to_us_are_told_apart_by_topic_and_rank() -> None:
    async with world(None, bind=f"tcp://{HOST}:*", ports=(8001, 8002)) as w:
        await until(lambda: w.events.bound_to)
        to = w.events.bound_to
        first, second = w.pool.endpoints
        with (
            publishing(connect=to, topic=b"kv@127.0.0.1:8001@m", rank=0) as one,
            publishing(connect=to, topic=b"kv@127.0.0.1:8001@m", rank=1) as other,
            publishing(connect=to, topic=b"kv@pod-8002@m") as by_name,
            publishing(connect=to, topic=b"kv@stranger@m") as stranger,
        ):
            engines = (one, other, by_name, stranger)
            await until(lambda: all(engine.subscribed for engine in engines))
            for number in range(20):
                one.publish(stored(number))
                other.publish(stored(number + 100))
                by_name.publish(stored(number + 200))
            stranger.publish(stored(1))
            await until(lambda: w.books.held.get(first) == one.held | other.held)
            await until(lambda: w.books.held.get(second) == by_name.held)
            await until(lambda: w.events.totals.unknown_publishers == 1)
            assert w.books.complete == {first: True, second: True}
            assert w.events.totals.tally.gaps == 0


async def test_an_address_in_use_is_a_configuration_error() -> None:
    async with world(None, bind=f"tcp://{HOST}:*") as w:
        await until(lambda: w.events.bound_to)
        settings = KvEventsSettings(bind=w.events.bound_to)
        events = KvEvents(pool=w.pool, sink=Books(), sources=None, settings=settings, rng=Random(1))
        with pytest.raises(ConfigError, match="choose a free address"):
            await events.run()


def engine_page(*publishers: Publisher) -> bytes:
    return msgspec.json.encode(
        {
            str(rank): {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{engine.port}",
                "replay_endpoint": f"tcp://*:{engine.replay_port}",
                "buffer_steps": 10_000,
            }
            for rank, engine in enumerate(publishers)
        }
    )


async def test_an_engine_says_itself_where_its_ranks_publish() -> None:
    with publishing(rank=0) as zero, publishing(rank=1) as one:
        zero.publish(stored(1))
        one.publish(stored(2))
        answers = [web.Response(status=503), web.Response(body=engine_page(zero, one))]

        async def sources(_request: web.Request) -> web.Response:
            return answers.pop(0) if len(answers) > 1 else answers[0]

        app = web.Application()
        app.router.add_get("/kv_event_sources", sources)
        async with TestServer(app, host=HOST) as server:
            assert server.port
            async with world(EngineSources(), ports=(server.port,)) as w:
                await until(lambda: w.held == {1, 2} and w.sure)
                assert w.events.totals.source_failures == 1


async def test_one_rank_restarting_does_not_cost_what_the_other_holds() -> None:
    with publishing(rank=0) as zero, publishing(rank=1) as one:

        async def sources(_request: web.Request) -> web.Response:
            return web.Response(body=engine_page(zero, one))

        app = web.Application()
        app.router.add_get("/kv_event_sources", sources)
        async with TestServer(app, host=HOST) as server:
            assert server.port
            async with world(EngineSources(), ports=(server.port,)) as w:
                await until(lambda: zero.subscribed and one.subscribed)
                zero.publish(stored(1))
                one.publish(stored(2))
                await until(lambda: w.held == {1, 2})
                zero.restart()
                await until(lambda: w.held == {2} and w.sure)
                assert w.events.totals.tally.restarts == 1


async def test_an_engine_too_old_to_say_is_given_up_waiting_for() -> None:
    async with TestServer(web.Application(), host=HOST) as server:
        assert server.port
        async with world(EngineSources(), ports=(server.port,)) as w:
            await until(lambda: w.events.ready.is_set())
            await until(lambda: w.events.totals.source_failures >= 2)
            assert not w.sure


async def test_of_an_endpoint_that_left_nothing_more_is_told() -> None:
    with publishing() as engine:
        async with world(ports_of(engine)) as w:
            await until(lambda: engine.subscribed)
            engine.publish(stored(1))
            await until(lambda: w.held == {1})
            told = len(w.books.batches)
            w.members()
            w.events.members_changed()
            await until(lambda: not engine.subscribed)
            assert len(w.books.batches) == told
            assert not w.events.following


async def test_without_pyzmq_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    pool = Pool(stale_after_s=10.0)
    settings = KvEventsSettings()
    events = KvEvents(
        pool=pool, sink=Books(), sources=FixedPorts(5557), settings=settings, rng=Random(1)
    )
    with pytest.raises(ConfigError, match=r"envoy-endpoint-picker\[kv-events\]"):
        await events.run()
