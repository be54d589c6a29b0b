"""The scraper against real sockets on loopback, in real time with short intervals."""

from __future__ import annotations

import asyncio
import gzip
import logging
import os
import resource
import socket
import ssl
import time
from collections import Counter
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from epp.core.model import EndpointSpec
from epp.core.pool import Pool, Scraped, ScrapeFailed
from epp.edge.scrape import EngineChooser, FailureReason, Scraper, ScrapeSettings
from epp.wire.exposition import ENGINES
from tests.integration.scraping import (
    IMPATIENT,
    PAGE,
    Engine,
    World,
    engines,
    reply,
    world,
)

SGLANG_PAGE = b"sglang:num_queue_reqs 4\nsglang:num_running_reqs 2\nsglang:token_usage 0.25\n"


async def test_a_scrape_reaches_the_pool_and_says_when_it_was_made() -> None:
    async with engines(reply()) as [engine], world() as w:
        before_s = time.monotonic()
        event = await w.one(engine)
        load = w.endpoint(engine).load
        assert isinstance(event, Scraped)
        assert (load.waiting, load.running, load.kv_usage_ratio) == (3, 1, 0.5)
        assert load.at_s is not None
        assert before_s <= load.at_s <= time.monotonic()
        assert w.reasons == {None: 1}
        assert engine.requests[0].startswith("GET /metrics HTTP/1.1\r\n")


async def test_F07_a_failing_endpoint_grows_stale_and_is_never_taken_for_idle() -> None:
    async with engines(reply(PAGE.replace(b" 3", b" 0"))) as [engine], world() as w:
        await w.one(engine)
        endpoint = w.endpoint(engine)
        assert endpoint.load.waiting == 0
        engine.answer = reply(status="500 Internal Server Error")
        await w.until(lambda: endpoint.scrape_failures >= 2)
        assert endpoint.load.at_s is not None
        stale_at_s = endpoint.load.at_s + w.pool.stale_after_s
        w.pool.snapshot(stale_at_s - 0.01)
        assert endpoint.load.waiting == 0
        w.pool.snapshot(stale_at_s + 0.01)
        assert endpoint.load.waiting is None
        engine.answer = reply()
        await w.until(lambda: endpoint.load.waiting == 3)


async def test_F09_one_silent_endpoint_of_fifty_delays_no_other() -> None:
    async with engines(None, *[reply()] * 49) as [tarpit, *others], world(settings=IMPATIENT) as w:
        w.members(*(e.spec for e in (tarpit, *others)))
        await w.until(lambda: w.reasons[FailureReason.TIMEOUT] >= 2)
        assert tarpit.at_once_max == 1
        for engine in others:
            times_s = engine.request_times_s
            gaps_s = [b - a for a, b in pairwise(times_s)]
            assert len(times_s) > 4
            # Far below the time-out; the margin is for a busy machine.
            assert sorted(gaps_s)[len(gaps_s) // 2] < 0.12
        assert w.reasons[None] > 49 * 4
        assert not [e for e in w.events if isinstance(e, ScrapeFailed) and e.unreachable]


async def test_F09_more_silent_endpoints_than_scrapes_at_once_still_let_others_through() -> None:
    settings = ScrapeSettings(interval_s=0.05, timeout_s=0.2, concurrency_max=4)
    async with engines(*[None] * 9) as many, world(settings=settings) as w:
        *tarpits, good = sorted(many, key=lambda e: e.spec.address)  # the pool's order
        good.answer = reply()
        w.members(*(e.spec for e in many))
        at_once = []
        while w.reasons[None] < 2:
            seen = len(w.events)
            await w.until(lambda seen=seen: len(w.events) > seen)
            at_once.append(sum(t.at_once for t in tarpits))
        assert max(at_once) <= 4
        assert max(t.at_once_max for t in tarpits) == 1
        # Waiting in line is no time-out.
        assert not [
            e for e in w.events if isinstance(e, ScrapeFailed) and e.endpoint is w.endpoint(good)
        ]
        assert [e.reason for e in w.events if isinstance(e, ScrapeFailed)][:4] == ["timeout"] * 4


async def test_scrapes_run_together_up_to_the_limit_and_the_rest_waits_in_line() -> None:
    settings = ScrapeSettings(interval_s=0.05, timeout_s=30.0, concurrency_max=3)
    async with engines(*[None] * 5) as tarpits, world(settings=settings) as w:
        tarpits.sort(key=lambda e: e.spec.address)  # the pool's order
        w.members(*(e.spec for e in tarpits))
        for tarpit in tarpits[:3]:
            await tarpit.until(lambda t=tarpit: t.at_once == 1)
        w.members(*(e.spec for e in (*tarpits[:2], tarpits[4])))
        await tarpits[4].until(lambda: tarpits[4].at_once == 1)
        assert tarpits[3].requests == []
        assert w.events == []


async def test_F10_a_hundred_and_fifty_endpoints_are_scraped_over_kept_connections() -> None:
    settings = ScrapeSettings(interval_s=0.3, timeout_s=30.0)
    async with engines(*[reply()] * 150) as many, world(settings=settings) as w:
        w.members(*(e.spec for e in many))
        await w.until(lambda: min(len(e.requests) for e in many) >= 3)
        assert all(w.endpoint(e).load.waiting == 3 for e in many)
        assert w.reasons.keys() == {None}
        assert {e.connections for e in many} == {1}


async def test_phases_of_endpoints_that_join_together_are_spread() -> None:
    settings = ScrapeSettings(interval_s=1.0, timeout_s=5.0)
    seen = []
    for _ in range(5):  # a machine that stands still for a second does all at once, for once
        async with engines(*[reply()] * 40) as many, world(settings=settings) as w:
            w.members(*(e.spec for e in many))
            await w.until(lambda: min(len(e.requests) for e in many) >= 2)
            gaps_s = sorted(e.request_times_s[1] - e.request_times_s[0] for e in many)
        most = max(Counter(int(gap_s * 10) for gap_s in gaps_s).values())
        if gaps_s[10] < 0.5 < gaps_s[-8] and most <= 20:
            return
        seen.append(gaps_s)
    raise AssertionError(f"not spread: {seen}")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (reply(b"<html>\n<body>It works</body>\n</html>\n"), FailureReason.NOT_METRICS),
        (reply(b"python_info 1\n"), FailureReason.NOT_METRICS),
        (reply(PAGE[:-1]), FailureReason.NOT_METRICS),
        (reply(gzip.compress(PAGE)), FailureReason.NOT_METRICS),
        (reply(b""), FailureReason.NOT_METRICS),
        (reply(status="404 Not Found"), FailureReason.STATUS),
        (reply(status="401 Unauthorized"), FailureReason.STATUS),
        (reply(status="206 Partial Content"), FailureReason.STATUS),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", FailureReason.CONNECT),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n" + PAGE, FailureReason.CONNECT),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nvllm:", FailureReason.CONNECT),
        (reply(PAGE, headers="Content-Encoding: gzip\r\n"), FailureReason.CONNECT),
    ],
)
async def test_F06_a_page_that_is_none_is_a_failed_scrape_and_the_next_good_one_counts(
    answer: bytes, reason: FailureReason
) -> None:
    async with engines(answer) as [engine], world() as w:
        engine.close_after = True
        event = await w.one(engine)
        endpoint = w.endpoint(engine)
        assert event == ScrapeFailed(endpoint, reason, unreachable=False)
        assert endpoint.load.waiting is None
        engine.answer = reply()
        await w.until(lambda: endpoint.load.waiting == 3)


@pytest.mark.parametrize(
    "answer",
    [
        reply(gzip.compress(PAGE), headers="Content-Encoding: gzip\r\n"),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
        % (len(PAGE), PAGE),
        b"HTTP/1.0 200 OK\r\n\r\n" + PAGE,
    ],
)
async def test_F06_compressed_chunked_and_unframed_pages_are_read(answer: bytes) -> None:
    async with engines(answer) as [engine], world() as w:
        engine.close_after = True
        assert isinstance(await w.one(engine), Scraped)


async def test_an_endpoint_nobody_listens_on_is_unreachable_and_a_slow_one_is_not() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: refused
        gone = EndpointSpec("127.0.0.1", unused.getsockname()[1])
        async with engines(None) as [slow], world(settings=IMPATIENT) as w:
            w.members(gone, slow.spec)
            await w.until(lambda: len(w.reasons) == 2)
            told = {e.endpoint.address: (e.reason, e.unreachable) for e in w.events}
            assert told == {gone.address: ("connect", True), slow.spec.address: ("timeout", False)}


async def test_an_endpoint_whose_packets_are_lost_is_unreachable() -> None:
    """A listener with a full backlog: the kernel drops what else knocks."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as callers:
        for _ in range(4):
            caller = callers.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        async with world(settings=IMPATIENT) as w:
            w.members(EndpointSpec("127.0.0.1", full.getsockname()[1]))
            await w.until(lambda: bool(w.events))
            [endpoint] = w.pool.endpoints
            assert w.events[0] == ScrapeFailed(endpoint, FailureReason.CONNECT, unreachable=True)


async def test_want_of_file_descriptors_of_our_own_is_not_held_against_an_endpoint() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with engines() as [engine], world() as w:
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            event = await w.one(engine)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert event == ScrapeFailed(w.endpoint(engine), FailureReason.CONNECT)
        await w.until(lambda: w.reasons[None] == 1)


async def test_D03_a_redirect_is_not_followed() -> None:
    async with engines(reply(), reply()) as [lured, engine], world() as w:
        target = f"http://{lured.spec.address}/metrics"
        engine.answer = reply(status="302 Found", headers=f"Location: {target}\r\n")
        event = await w.one(engine)
        assert event == ScrapeFailed(w.endpoint(engine), FailureReason.STATUS)
        assert lured.connections == 0


async def test_D03_no_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engines(reply(), reply()) as [proxy, engine]:
        monkeypatch.setenv("http_proxy", f"http://{proxy.spec.address}")
        monkeypatch.delenv("no_proxy", raising=False)
        async with world() as w:
            assert isinstance(await w.one(engine), Scraped)
            assert proxy.connections == 0


BIG = PAGE + b"# " + b"x" * 70_000 + b"\n"
FRUGAL = ScrapeSettings(interval_s=0.05, timeout_s=5.0, page_bytes_max=60_000)


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 200 OK\r\n\r\n" + BIG, b"HTTP/1.1 200 OK\r\nContent-Length: 60001\r\n\r\n"],
)
async def test_a_page_too_large_is_refused_and_the_connection_closed(answer: bytes) -> None:
    async with engines(answer) as [engine], world(settings=FRUGAL) as w:
        event = await w.one(engine)
        assert event == ScrapeFailed(w.endpoint(engine), FailureReason.TOO_LARGE)
        await engine.until(lambda: engine.connections > 1 or not engine.open)


async def test_a_small_answer_that_unpacks_to_a_page_too_large_is_refused() -> None:
    bomb = reply(gzip.compress(BIG * 300), headers="Content-Encoding: gzip\r\n")
    assert len(bomb) < FRUGAL.page_bytes_max
    async with engines(bomb) as [engine], world(settings=FRUGAL) as w:
        event = await w.one(engine)
        assert event == ScrapeFailed(w.endpoint(engine), FailureReason.TOO_LARGE)


async def test_an_endpoint_that_leaves_during_its_scrape_is_let_go_at_once() -> None:
    settings = ScrapeSettings(interval_s=0.05, timeout_s=30.0)
    async with engines(None, reply()) as [leaver, other], world(settings=settings) as w:
        w.members(leaver.spec, other.spec)
        await leaver.until(lambda: leaver.at_once == 1)
        w.members(other.spec)
        await leaver.until(lambda: leaver.at_once == 0 and not leaver.open)
        seen = len(w.events)
        await w.until(lambda: len(w.events) >= seen + 3)
        assert {e.endpoint.address for e in w.events} == {other.spec.address}
        assert len(leaver.requests) == 1


async def test_F10_the_idle_connection_of_an_endpoint_that_left_is_closed() -> None:
    async with engines(reply()) as [engine], world(settings=IMPATIENT) as w:
        await w.one(engine)
        assert len(engine.open) == 1
        w.members()
        await engine.until(lambda: not engine.open)


async def test_a_replaced_pod_with_the_old_address_is_a_new_endpoint() -> None:
    async with engines(None) as [engine], world() as w:
        w.members(engine.spec)
        await engine.until(lambda: engine.at_once == 1)
        old = w.endpoint(engine)
        engine.answer = reply()
        w.members(EndpointSpec("127.0.0.1", engine.spec.port, uid="next"))
        await w.until(lambda: w.endpoint(engine).load.waiting == 3)
        assert all(e.endpoint is not old for e in w.events)


async def test_members_from_before_the_start_are_scraped() -> None:
    async with engines(reply()) as [engine]:
        made = World()
        made.members(engine.spec)
        task = asyncio.ensure_future(made.scraper.run())
        await made.until(lambda: bool(made.events))
        task.cancel()
        await asyncio.wait([task])


async def test_a_failing_endpoint_is_asked_less_often_until_it_works_again() -> None:
    settings = ScrapeSettings(interval_s=0.05, timeout_s=5.0, backoff_max=4)
    async with engines(reply(status="503 Busy")) as [engine], world(settings=settings) as w:
        w.members(engine.spec)
        await engine.until(lambda: len(engine.requests) == 6)
        times_s = engine.request_times_s
        steps_s = [b - a for a, b in pairwise(times_s)]
        assert min(steps_s[2:]) > 0.15
        assert sum(steps_s[2:]) < 1.5
        engine.answer = reply()
        await engine.until(lambda: len(engine.requests) == 12)
        times_s = engine.request_times_s[7:]
        assert sorted(b - a for a, b in pairwise(times_s))[2] < 0.15


async def test_logs_tell_of_changes_not_of_scrapes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "epp.edge.scrape")
    async with engines(reply(status="503 Busy")) as [engine], world() as w:
        w.members(engine.spec)
        await w.until(lambda: w.reasons[FailureReason.STATUS] >= 3)
        engine.answer = reply()
        await w.until(lambda: w.reasons[None] >= 3)
    address = engine.spec.address
    assert caplog.messages == [
        f"Metrics of {address} cannot be read: status: status 503",
        f"Metrics of {address} can be read again",
    ]


async def test_what_a_peer_sends_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with engines(b"nonsense\nERROR forged\n" * 100 + b"\r\n\r\n") as [engine], world() as w:
        await w.one(engine)
    [message] = caplog.messages
    assert "Bad status line" in message
    assert len(message) < 300


async def test_F01_a_missing_reading_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async with engines(reply(b"vllm:num_requests_running 1\n")) as [engine], world() as w:
        w.members(engine.spec)
        await w.until(lambda: w.reasons[None] >= 3)
    message = f"Metrics of {engine.spec.address} do not report waiting, kv_usage_ratio"
    assert caplog.messages == [message]


async def test_F11_path_and_port_are_those_of_the_settings() -> None:
    async with engines(reply(), reply()) as [engine, sidecar]:
        settings = ScrapeSettings(path=" stats/prometheus?x=1 ", port=sidecar.spec.port)
        async with world(settings=settings) as w:
            assert isinstance(await w.one(engine), Scraped)
            assert sidecar.requests[0].startswith("GET /stats/prometheus?x=1 HTTP/1.1\r\n")
            assert engine.requests == []


def self_signed(folder: Path) -> ssl.SSLContext:
    """A server context with a certificate nobody vouches for."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "engine")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    pem, key_pem = folder / "cert.pem", folder / "key.pem"
    pem.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    form = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    key_pem.write_bytes(key.private_bytes(*form))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, key_pem)
    return context


async def test_F11_a_self_signed_engine_is_read_only_without_verification(tmp_path: Path) -> None:
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    settings = ScrapeSettings(scheme="https", interval_s=0.05, timeout_s=1.0)
    async with engines(tls=self_signed(tmp_path)) as [engine]:
        async with world(settings=settings, tls=trusting) as w:
            assert isinstance(await w.one(engine), Scraped)
        async with world(settings=settings) as w:
            event = await w.one(engine)
            assert event == ScrapeFailed(w.endpoint(engine), FailureReason.CONNECT)


async def test_E19_an_ipv6_endpoint_is_asked_at_its_bracketed_address() -> None:
    engine = Engine()
    try:
        server = await asyncio.start_server(engine.serve, "::1", 0)
    except OSError:
        pytest.skip("no IPv6 on this machine")
    engine.spec = EndpointSpec("::1", server.sockets[0].getsockname()[1])
    async with server, world() as w:
        assert isinstance(await w.one(engine), Scraped)
        assert f"\r\nHost: [::1]:{engine.spec.port}\r\n" in engine.requests[0]
        for writer in list(engine.open):
            writer.transport.abort()


async def test_a_host_that_makes_no_url_is_a_failure_like_any_other() -> None:
    async with engines(reply()) as [engine], world() as w:
        w.members(EndpointSpec("a b\x00", 1), engine.spec)
        await w.until(lambda: len(w.reasons) == 2)
        assert w.reasons.keys() == {None, FailureReason.CONNECT}


def test_F13_too_short_an_interval_is_raised_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for interval_s in (0.0, 0.001, 0.05, float("nan")):
        settings = ScrapeSettings(interval_s=interval_s)
        Scraper(
            pool=Pool(stale_after_s=1.0),
            apply=print,
            chooser=EngineChooser(),
            settings=settings,
            rng=Random(1),
        )
    assert [m.split(",")[0] for m in caplog.messages] == [
        "Scrape interval of 0.0 s is too short",
        "Scrape interval of 0.001 s is too short",
        "Scrape interval of nan s is too short",
    ]


async def test_F15_the_engine_is_taken_from_the_label_else_from_the_page() -> None:
    async with engines(*[reply(SGLANG_PAGE)] * 3, reply()) as [plain, right, wrong, vllm]:
        labels = {
            right: {"llm-d.ai/engine-type": "sglang"},
            wrong: {"inference.networking.k8s.io/engine-type": "vllm"},
            vllm: {"llm-d.ai/engine-type": "unheard-of"},
        }
        specs = [
            EndpointSpec("127.0.0.1", e.spec.port, labels=labels.get(e, {}))
            for e in (plain, right, wrong, vllm)
        ]
        async with world() as w:
            w.members(*specs)
            await w.until(lambda: len({e.endpoint for e in w.events}) == 4)
            waiting = [w.endpoint(e).load.waiting for e in (plain, right, wrong, vllm)]
            assert waiting == [4, 4, None, 3]
            plain.answer = reply()  # another engine comes up at the old address
            await w.until(lambda: w.endpoint(plain).load.waiting == 3)


async def test_F15_the_default_engine_is_preferred_on_a_page_of_two() -> None:
    chooser = EngineChooser(engines=ENGINES, default="sglang")
    async with engines(reply(PAGE + SGLANG_PAGE)) as [engine], world(chooser=chooser) as w:
        await w.one(engine)
        assert w.endpoint(engine).load.waiting == 4
