"""The HTTP port for people and Prometheus: `/metrics`, `/debug/state`, `/healthz`.

`/debug/state` is bounded JSON without prompt text: what the picker knows of each endpoint, the
profile it runs, the size of what it remembers. It answers GET and HEAD only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import hdrs, web
from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from epp.core.decide import Decider
from epp.core.errors import EppError
from epp.core.model import Clock, Endpoint
from epp.core.registry import PICKERS
from epp.edge.metrics import Metrics

ENDPOINTS_MAX = 1_000
"""Endpoints listed by `/debug/state`; the rest is counted."""
STOP_S = 1.0
"""Who reads a page slowly does not hold up the end of the process for longer."""

INDEX = """Envoy Endpoint Picker {version}

/metrics      Prometheus metrics
/debug/state  what the picker knows, as JSON
/healthz      ok while the process runs
"""


class AdminServer:
    """Serves the admin port.

    Args:
        port: 0 = a free one.
        state: what `/debug/state` shows.
    """

    def __init__(
        self, *, host: str, port: int, metrics: Metrics, state: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._host, self._port = host, port
        self._state = state
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._own = metrics
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/debug/state", self._debug_state)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/", self._index)
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=STOP_S
        )

    async def start(self) -> int:
        """Bind and serve; returns the port.

        Raises: EppError naming the address when it cannot be bound.
        """
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, reuse_port=False)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise EppError(
                f"cannot listen on {self._host}:{self._port} for metrics ({error.strerror}); "
                "free it or choose another --metrics-port"
            ) from error
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Close the port; requests under way get `STOP_S`, then their connections are cut."""
        await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE_LATEST})
        await response.prepare(request)
        if request.method == hdrs.METH_HEAD:
            return response
        # Who hangs up in the middle of the page has what it wanted.
        with contextlib.suppress(ConnectionError):
            for piece in self._own.text():
                await response.write(piece.encode(errors="replace"))
                await asyncio.sleep(0)  # a page may be long: requests pass between its pieces
            await response.write(generate_latest(self._registry))
            await response.write_eof()
        return response

    async def _debug_state(self, _request: web.Request) -> web.Response:
        body = msgspec.json.format(msgspec.json.encode(self._state()), indent=2) + b"\n"
        return web.Response(body=body, content_type="application/json")

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _index(self, _request: web.Request) -> web.Response:
        return web.Response(text=INDEX.format(version=version("envoy-endpoint-picker")))


def debug_state(decider: Decider, clock: Clock) -> dict[str, Any]:
    """What the picker knows now, as plain values."""
    now_s = clock()
    pool, prefix, profile = decider.pool, decider.prefix, decider.profile
    eligible = set(pool.snapshot(now_s).endpoints)
    listed = pool.endpoints[:ENDPOINTS_MAX]
    return {
        "version": version("envoy-endpoint-picker"),
        "synced": pool.synced,
        "inflight_requests": decider.inflight.requests,
        "profile": {
            "name": profile.name,
            "filters": [f.name for f in profile.filters],
            "scorers": {s.name: s.weight for s in profile.scorers},
            "picker": next(n for n, cls in PICKERS.items() if isinstance(profile.picker, cls)),
        },
        "prefix_index": None if prefix is None else msgspec.to_builtins(prefix.state()),
        "endpoints_not_listed": len(pool.endpoints) - len(listed),
        "endpoints": [_endpoint_state(e, decider, e in eligible, now_s) for e in listed],
    }


def _endpoint_state(
    endpoint: Endpoint, decider: Decider, eligible: bool, now_s: float
) -> dict[str, Any]:
    load, prefix = endpoint.last_load, decider.prefix
    return {
        "address": endpoint.address,
        "name": endpoint.name,
        "namespace": endpoint.namespace,
        "labels": dict(endpoint.labels),
        "eligible": eligible,
        "ejected_for_s": round(max(0.0, endpoint.ejected_until_s - now_s), 3),
        "on_probation": endpoint.on_probation,
        "failures_in_a_row": endpoint.failures,
        "scrape_failures_in_a_row": endpoint.scrape_failures,
        "inflight_requests": endpoint.inflight_requests,
        "waiting_for_first_byte": endpoint.waiting_requests,
        "inflight_tokens": endpoint.inflight_tokens,
        "prefix_blocks": None if prefix is None else prefix.held_by(endpoint),
        "load": {
            "stale": endpoint.load.at_s is None,
            "age_s": None if load.at_s is None else round(now_s - load.at_s, 3),
            "waiting": load.waiting,
            "running": load.running,
            "kv_usage_ratio": load.kv_usage_ratio,
            "kv_block_tokens": load.kv_block_tokens,
            "kv_blocks": load.kv_blocks,
            "lora_running": sorted(load.lora.running) if load.lora else None,
        },
    }
