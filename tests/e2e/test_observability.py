"""What the EPP tells of itself after real traffic: every documented metric, a bounded state, and no
prompt or credential anywhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.stack import Epp, Stack, http_get
from epp.edge.families import DEFINITIONS, Kind
from tests.e2e.conftest import EPP_FLAGS, config
from tests.e2e.http1 import JSON_TYPE, fetch, post
from tests.e2e.site import Site, completion, metric, until
from tests.e2e.upstreams import Upstreams

ENGINE = ("--speed", "50")
SECRETS = {
    "prompt": "QUITE-PRIVATE-PROMPT",
    "answer": "QUITE-PRIVATE-ANSWER",
    "authorization": "Bearer QUITE-PRIVATE-TOKEN",
    "cookie": "session=QUITE-PRIVATE-SESSION",
    "x-api-key": "QUITE-PRIVATE-KEY",
    "query": "QUITE-PRIVATE-QUERY",
}
MARK = "QUITE-PRIVATE"
STATE_BYTES_PER_ENDPOINT_MAX = 2_000


@pytest.fixture(scope="module")
def counted(folder: Path) -> Iterator[Stack]:
    """Every kind of traffic has passed once: streamed, whole, refused, failed, elsewhere."""
    place = folder / "counted"
    place.mkdir()
    flags = ["--drain-timeout=0s", "--v=3", "--enable-grpc-stream-metrics"]
    with Stack(engines=[ENGINE] * 2, epp_flags=flags, folder=place) as stack:
        yield stack


async def drive(stack: Stack) -> None:
    port = stack.envoy.port
    body = {"model": "sim", "prompt": "tell me " * 200, "max_tokens": 4}
    usage = {"stream_options": {"include_usage": True}}
    for n in range(3):
        assert (await post(port, "/v1/completions", {**body, "user": f"u{n}"})).status == 200
        streamed = await post(port, "/v1/completions", {**body, "stream": True, **usage})
        assert streamed.status == 200
    assert (await post(port, "/v1/completions", {**body, "model": "no such"})).status == 404
    assert (await fetch(port, "POST", "/v1/completions", [JSON_TYPE], b"[")).status == 400
    stack.engines[0].post("/sim/fault", {"metrics": "error"})
    await until(
        lambda: metric(stack.epp.metrics(), "llm_d_epp_datalayer_poll_errors_total") > 0,
        what="a failed scrape",
    )


async def speak_no_http2(stack: Stack) -> None:
    """The fast transport hangs up on what does not begin as HTTP/2, and counts it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.epp.ports["grpc"])
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    await reader.read()
    writer.close()


async def test_N06_every_documented_metric_is_exported(counted: Stack, transport: str) -> None:
    await drive(counted)
    only_fast = {"epp_connection_faults_total"}
    if transport == "fast":
        await speak_no_http2(counted)
        only_fast.clear()
    page = counted.epp.metrics()
    only_with_rewrites = {"llm_d_epp_model_rewrite_decisions_total"}
    for definition in DEFINITIONS.values():
        name = definition.name
        if name.startswith("epp_kubernetes_") or name == "epp_leader":
            assert name not in page, "there is no cluster"
            continue
        kind = definition.kind.value
        family = name.removesuffix("_total") if definition.kind is Kind.COUNTER else name
        assert f"# TYPE {name} {kind}" in page or f"# TYPE {family} {kind}" in page, name
        if name in only_fast | only_with_rewrites:
            continue
        sample = f"{name}_bucket" if definition.kind is Kind.HISTOGRAM else name
        samples = [
            line for line in page.splitlines() if line.startswith((sample + "{", sample + " "))
        ]
        assert samples, f"{name} has no sample after traffic of every kind"
        for label in definition.labels:
            assert all(f'{label}="' in line for line in samples), (name, label)
    types = [line for line in page.splitlines() if line.startswith("# TYPE ")]
    assert len(types) == len(set(types)), "each family stands there once"


async def test_N06_counts_are_those_of_the_traffic(counted: Stack) -> None:
    await drive(counted)
    before = counted.epp.metrics()
    await drive(counted)
    page = counted.epp.metrics()

    def grew(name: str, *parts: str) -> float:
        return metric(page, name, *parts) - metric(before, name, *parts)

    assert grew("llm_d_epp_request_total", 'model_name="sim"') == 6
    assert grew("llm_d_epp_request_output_tokens_sum", 'model_name="sim"') == 6 * 4
    assert grew("llm_d_epp_request_ttft_seconds_count", 'streaming="true"') == 3
    assert grew("llm_d_epp_request_streaming_tpot_seconds_count") == 3
    assert grew("llm_d_epp_request_error_total", 'error_code="ModelServerError"') == 1
    assert grew("llm_d_epp_request_error_total", 'error_code="rejected-bad-request"') == 1
    assert grew("epp_drops_total", 'reason="rejected-bad-request"') == 1
    assert grew("llm_d_epp_scheduler_attempts_total", 'status="success"') == 7
    assert grew("llm_d_epp_extproc_streams_total") == 8
    assert metric(page, "llm_d_epp_request_running") == 0
    assert metric(page, "llm_d_epp_inflight_requests") == 0
    assert metric(page, "epp_bugs_total") == 0


async def test_extproc_streams_inflight_counts_open_streams(counted: Stack) -> None:
    """While a request is held up in the engine its stream is open."""
    for engine in counted.engines:
        engine.post("/sim/fault", {"hang": True})
    body = {"model": "sim", "prompt": "wait", "max_tokens": 1}
    request = asyncio.create_task(post(counted.envoy.port, "/v1/completions", body))
    try:
        await until(lambda: counted.epp.state()["inflight_requests"] == 1, what="a charged request")
        await until(
            lambda: metric(counted.epp.metrics(), "llm_d_epp_extproc_streams_inflight") == 1,
            what="one open stream",
        )
    finally:
        for engine in counted.engines:
            engine.post("/sim/fault", {})
        assert (await request).status == 200
    await until(
        lambda: metric(counted.epp.metrics(), "llm_d_epp_extproc_streams_inflight") == 0,
        what="no open stream",
    )


async def test_D06_no_prompt_and_no_credential_is_told(site: Site) -> None:
    """At the highest verbosity, whatever happens to the request."""
    before = len(site.epp.text())
    secret = [(name, SECRETS[name]) for name in ("authorization", "cookie", "x-api-key")]
    good = completion(3_000, salt="d06", prompt=SECRETS["prompt"])
    chat = json.dumps(
        {"model": "sim", "messages": [{"role": "user", "content": SECRETS["prompt"]}]}
    ).encode()
    target = f"/v1/completions?key={SECRETS['query']}"
    for body in (good, good[:-5], good[:100], b'"%s"' % SECRETS["prompt"].encode(), chat):
        path = "/v1/chat/completions" if body is chat else target
        answer, test_id = await site.send("POST", path, [JSON_TYPE, *secret], body)
        assert answer.status in {200, 400}
        if answer.status == 400:
            assert MARK not in answer.body.decode(), "a refusal does not repeat the body"
        else:
            assert site.upstreams.one(test_id).values("authorization") == [SECRETS["authorization"]]
    site.upstreams.plan("d06-answer", body=json.dumps({"text": SECRETS["answer"]}).encode())
    answer, _ = await site.send("POST", target, [JSON_TYPE], good, test_id="d06-answer")
    assert SECRETS["answer"] in answer.body.decode()
    await site.idle()
    log = site.epp.text()[before:]
    assert "picked" in log, "it logs at the highest verbosity"
    assert MARK not in log
    assert MARK not in site.epp.metrics()
    assert MARK not in json.dumps(site.epp.state())


async def test_D11_the_state_is_bounded_json(site: Site) -> None:
    state = site.epp.state()
    assert len(json.dumps(state)) < STATE_BYTES_PER_ENDPOINT_MAX * len(state["endpoints"])
    assert {e["address"] for e in state["endpoints"]} == set(site.upstreams.addresses)
    url = f"http://127.0.0.1:{site.epp.ports['metrics']}"
    assert http_get(f"{url}/healthz") == b"ok\n"
    for path in ("/debug/state", "/metrics"):
        answer = await fetch(site.epp.ports["metrics"], "POST", path, (), b"{}")
        assert answer.status == 405


async def test_D05_label_values_a_client_chooses_are_capped(
    folder: Path, upstreams: Upstreams, start_envoy: Callable[..., Site]
) -> None:
    """Models beyond the limit are counted as `other`, none is lost, and the page stays small."""
    flags = [*EPP_FLAGS, config() + "  labelValuesMax: 20\n"]
    epp = Epp(folder, [*flags, f"--endpoints={','.join(upstreams.addresses)}"], name="epp-capped")
    epp.start()
    capped = start_envoy(epp=epp)
    try:
        for n in range(60):
            body = json.dumps({"model": f"model-{n}", "prompt": "x"}).encode()
            answer, _ = await capped.send("POST", "/v1/completions", [JSON_TYPE], body)
            assert answer.status == 200
        page = epp.metrics()
    finally:
        capped.envoy.stop()
        epp.stop()
    assert metric(page, "epp_label_values", 'label="model_name"') == 20
    assert metric(page, "llm_d_epp_request_total") == 60
    assert metric(page, "llm_d_epp_request_total", 'model_name="other"') == 40
    named = [line for line in page.splitlines() if line.startswith("llm_d_epp_request_total{")]
    assert len(named) == 21
