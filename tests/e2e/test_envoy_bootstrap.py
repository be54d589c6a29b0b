"""What `epp envoy-config` prints: Envoy takes every variant, and the command's own output runs."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.stack import Envoy, Epp
from epp.envoy.command import render
from epp.envoy.options import BodyProcessing, EnvoyOptions, Routing
from tests.e2e.conftest import REQUESTS, RESPONSES
from tests.e2e.http1 import JSON_TYPE
from tests.e2e.site import Site, completion
from tests.e2e.upstreams import Upstreams

ENVOY = Path(sys.executable).with_name("envoy")
ENDPOINTS = ("127.0.0.1:8000", "[fd00::10]:8001", "vllm-2.example.com:8002")
OTHERS: list[dict[str, Any]] = [
    {},
    {"epp_tls": False},
    {"admin": None},
    {"fail_open": False},
    {"retries": 0},
    {"buffer_bytes": 0},
    {"buffer_bytes": (1 << 31) - 1, "retries": 9},
    {"subset_header": "x-subset", "message_timeout_s": 0.25},
    {"listen": "[::1]:0", "epp": "[fd00::1]:9002"},
    {"listen": "0.0.0.0:8080", "epp": "epp.example.com:9002"},
]
VARIANTS = [
    {"request_body": request, "response_body": response, "routing": routing, **other}
    for (request, response, routing), other in zip(
        itertools.product(REQUESTS, RESPONSES, Routing), itertools.cycle(OTHERS)
    )
] + [dict(other) for other in OTHERS]


def name_of(variant: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in variant.items()) or "defaults"


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
async def test_envoy_takes_every_variant(variant: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "envoy.yaml"
    file.write_text(render(EnvoyOptions(endpoints=ENDPOINTS, **variant)))
    status, output = await run(str(ENVOY), "--mode", "validate", "-c", str(file), "-l", "warning")
    assert status == 0, output
    assert "[warning]" not in output, output


@pytest.mark.parametrize("variant", OTHERS, ids=name_of)
def test_envoy_acts_at_once_on_news_of_the_epp(variant: dict[str, Any]) -> None:
    """By default it holds changes of a cluster's health back until a second has passed since the
    last one; until then requests go to an EPP that is known to be down, and those with a body fail.
    0 has to be written down to be different from that default."""
    document = yaml.safe_load(render(EnvoyOptions(endpoints=ENDPOINTS, **variant)))
    clusters = {cluster["name"]: cluster for cluster in document["static_resources"]["clusters"]}
    common = clusters["epp"]["common_lb_config"]
    assert common["update_merge_window"] == "0s"
    assert common["healthy_panic_threshold"].get("value", 0) == 0


async def run(*command: str) -> tuple[int, str]:
    """Exit status and all output."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    async with asyncio.timeout(60.0):
        output, _ = await process.communicate()
    return process.returncode or 0, output.decode(errors="replace")


@pytest.mark.parametrize("form", ["yaml", "json"])
async def test_the_command_s_output_runs(
    form: str, tmp_path: Path, upstreams: Upstreams, epps: Callable[[bool], Epp]
) -> None:
    """Flags to file to Envoy, as in the README."""
    epp = epps(False)
    flags = ["--listen=127.0.0.1:0", "--admin=127.0.0.1:0", f"--epp={epp.address}"]
    flags += ["--epp-tls=false", f"--endpoints={', '.join(upstreams.addresses)},"]
    status, text = await run(
        *(sys.executable, "-m", "epp", "envoy-config", *flags), f"--format={form}"
    )
    assert status == 0, text
    assert (json.loads(text) if form == "json" else yaml.safe_load(text))["static_resources"]
    options = EnvoyOptions(endpoints=tuple(upstreams.addresses))
    # Envoy takes a file's form from the ending of its name; JSON is YAML as well.
    envoy = Envoy(tmp_path, options, bootstrap=text)
    envoy.start()
    try:
        site = Site(envoy, epp, upstreams, options)
        answer, test_id = await site.send(
            "POST", "/v1/completions", [JSON_TYPE], completion(300, salt=form), to=1
        )
        assert answer.status == 200
        assert upstreams.one(test_id).upstream == upstreams.addresses[1]
        answer, test_id = await site.send(
            "GET", "/v1/models", [("connection", "upgrade"), ("upgrade", "irc")]
        )
        assert answer.status == 403, "only web sockets are configured, so Envoy refuses the rest"
        assert upstreams.received(test_id) == []
        assert "[warning]" not in envoy.text()
    finally:
        assert envoy.stop() == 0


async def test_without_the_receiving_namespace_the_pick_would_be_lost(
    start_envoy: Callable[..., Site],
    upstreams: Upstreams,
    epps: Callable[[bool], Epp],
    folder: Path,
) -> None:
    """Shows that the tests of the pick can tell: Envoy drops it silently and goes round robin."""
    options = EnvoyOptions(
        listen="127.0.0.1:0",
        admin="127.0.0.1:0",
        epp=epps(True).address,
        endpoints=tuple(upstreams.addresses),
    )
    document = yaml.safe_load(render(options))
    manager = document["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]
    for http_filter in manager["typed_config"]["http_filters"]:
        config = http_filter["typed_config"]
        if "metadata_options" in config:
            del config["metadata_options"]["receiving_namespaces"]
    envoy = Envoy(folder, options, name="envoy-deaf", bootstrap=yaml.safe_dump(document))
    envoy.start()
    try:
        site = Site(envoy, epps(True), upstreams, options)
        served = set()
        for _ in range(6):
            _, test_id = await site.send("GET", "/v1/models", to=0)
            served.add(upstreams.one(test_id).upstream)
    finally:
        envoy.stop()
    assert len(served) == len(upstreams.addresses)


async def test_A23_a_buffered_body_over_the_buffer_is_refused_by_the_gateway(
    start_envoy: Callable[..., Site],
) -> None:
    site = start_envoy(request_body=BodyProcessing.BUFFERED, buffer_bytes=100_000)
    try:
        for size, status in ((90_000, 200), (300_000, 413)):
            answer, _ = await site.send(
                "POST", "/v1/completions", [JSON_TYPE], completion(size, salt="buffer")
            )
            assert answer.status == status
    finally:
        site.envoy.stop()
    await site.idle()
