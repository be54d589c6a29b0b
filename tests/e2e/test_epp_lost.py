"""The EPP goes away: requests fail open where they may, and all is well again when it is back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.stack import Epp
from epp.core.headers import DESTINATION, NOT_FOR_UPSTREAM
from epp.envoy.options import BodyProcessing, Routing
from tests.e2e.conftest import EPP_FLAGS, config
from tests.e2e.http1 import JSON_TYPE
from tests.e2e.site import Site, completion, metric, until
from tests.e2e.upstreams import Upstreams

WINDOW_S_MAX = 4.0
"""From the EPP's death until Envoy's health check, once a second, has told."""
LOAD_WORKERS = 8


@pytest.fixture(scope="module")
def mortal(folder: Path, upstreams: Upstreams) -> Iterator[Epp]:
    """An EPP that may be killed."""
    flags = [*EPP_FLAGS, config(), f"--endpoints={','.join(upstreams.addresses)}"]
    epp = Epp(folder, flags, name="epp-mortal")
    epp.start()
    yield epp
    epp.stop()


@pytest.fixture(scope="module")
def sites(mortal: Epp, start_envoy: Callable[..., Site]) -> Iterator[dict[str, Site]]:
    """Envoys in front of it."""
    running = {
        "open": start_envoy(epp=mortal),
        "open buffered": start_envoy(
            epp=mortal,
            request_body=BodyProcessing.BUFFERED,
            response_body=BodyProcessing.STREAMED,
        ),
        "closed": start_envoy(epp=mortal, fail_open=False),
        "original-dst": start_envoy(epp=mortal, routing=Routing.ORIGINAL_DST),
    }
    yield running
    for site in running.values():
        site.envoy.stop()


@pytest.fixture(scope="module")
def stripped(sites: dict[str, Site]) -> tuple[str, ...]:
    """What the bootstrap removes by itself. Its module is loaded by now (it warns when it is)."""
    from epp.envoy.bootstrap import CLIENT_MAY_NOT_SEND

    return CLIENT_MAY_NOT_SEND


@pytest.fixture
async def dead(mortal: Epp, sites: dict[str, Site]) -> dict[str, Site]:
    """The sites, with the EPP dead and known to be."""
    mortal.kill()
    for site in sites.values():
        await until(lambda site=site: not site.envoy.sees_epp(), what="the EPP known as down")
    return sites


@pytest.fixture(autouse=True)
def revive(mortal: Epp, sites: dict[str, Site]) -> Iterator[None]:
    """After each test the EPP runs, on its old ports, and every Envoy has noticed."""
    yield
    if mortal.process is None:
        mortal.start()
    for site in sites.values():
        site.envoy.wait_for("healthy EPP", lambda site=site: site.envoy.sees_epp() or None)


@pytest.mark.parametrize("name", ["open", "open buffered"])
async def test_A22_requests_fail_open_while_the_epp_is_down(
    dead: dict[str, Site], stripped: tuple[str, ...], name: str
) -> None:
    """With bodies of any size, exactly as sent, spread by Envoy, and never where a client says."""
    site = dead[name]
    wrong = site.upstreams.addresses[0]
    forged = [(header, wrong) for header in stripped]
    served = []
    for size in (300, 2_000, 100_000, 3 << 20) * 3:
        body = completion(size, salt="open")
        answer, test_id = await site.send("POST", "/v1/completions", [JSON_TYPE, *forged], body)
        assert answer.status == 200, (size, answer)
        received = site.upstreams.one(test_id)
        assert received.body == body
        assert not {name for name, _ in received.headers} & set(stripped)
        served.append(received.upstream)
    answer, _ = await site.send("GET", "/v1/models")
    assert answer.status == 200
    assert max(map(served.count, served)) <= len(served) // 3 + 1, served


def test_D02_what_could_steer_an_engine_is_stripped_without_the_epp_too(
    stripped: tuple[str, ...],
) -> None:
    """What stays until the EPP reads it are instructions to the picker: they steer nobody else."""
    left = NOT_FOR_UPSTREAM - set(stripped)
    assert not [name for name in left if "host" in name or "url" in name]
    assert DESTINATION in stripped


async def test_fail_closed_is_an_error_of_the_gateway(dead: dict[str, Site]) -> None:
    site = dead["closed"]
    for method, body in (("GET", None), ("POST", completion(3_000, salt="closed"))):
        answer, test_id = await site.send(method, "/v1/completions", [JSON_TYPE], body)
        assert 500 <= answer.status < 600, answer
        assert site.upstreams.received(test_id) == []


async def test_D01_without_the_epp_a_client_cannot_choose_where_original_dst_connects(
    dead: dict[str, Site],
) -> None:
    site = dead["original-dst"]
    forged = [(DESTINATION, site.upstreams.addresses[0])]
    for method, body in (("GET", None), ("POST", completion(3_000, salt="dst"))):
        answer, test_id = await site.send(method, "/v1/completions", [JSON_TYPE, *forged], body)
        assert answer.status == 503, (method, answer, site.envoy.text()[-3000:])
        assert site.upstreams.received(test_id) == []


@pytest.mark.parametrize("name", ["open", "open buffered"])
async def test_A22_a_killed_epp_costs_a_second_and_needs_no_help(
    mortal: Epp, sites: dict[str, Site], name: str
) -> None:
    """Under load: errors only before Envoy has noticed, none on the way back."""
    site = sites[name]
    outcomes: list[tuple[float, int]] = []
    stop = asyncio.Event()

    async def worker(number: int) -> None:
        while not stop.is_set():
            started_s = time.monotonic()
            body = completion(3_000, salt=f"load-{number}")
            try:
                answer, _ = await site.send("POST", "/v1/completions", [JSON_TYPE], body)
                outcomes.append((started_s, answer.status))
            except (ConnectionError, asyncio.IncompleteReadError):
                outcomes.append((started_s, 0))

    async def more_outcomes(count: int) -> None:
        seen = len(outcomes)
        await until(lambda: len(outcomes) >= seen + count, what="load")

    workers = [asyncio.create_task(worker(n)) for n in range(LOAD_WORKERS)]
    try:
        await more_outcomes(50)
        killed_s = time.monotonic()
        mortal.kill()
        await until(lambda: not site.envoy.sees_epp(), what="the EPP known as down")
        noticed_s = time.monotonic()
        assert noticed_s - killed_s < WINDOW_S_MAX
        await more_outcomes(50)
        await asyncio.to_thread(mortal.start)
        await until(site.envoy.sees_epp, what="the EPP known as up")
        await more_outcomes(100)
    finally:
        stop.set()
        await asyncio.gather(*workers)
    bad = [(started_s, status) for started_s, status in outcomes if status != 200]
    late = [(round(at - killed_s, 3), status) for at, status in bad if at > noticed_s]
    assert late == [], (
        noticed_s - killed_s,
        late[-1],
        site.envoy.admin("/stats?filter=epp.(health|member|upstream_cx)"),
    )
    early = [(round(at - killed_s, 3), status) for at, status in bad if at < killed_s - 1.0]
    assert early == []
    assert metric(mortal.metrics(), "llm_d_epp_request_total") > 0, "the new EPP picks"
    await site.idle()
