"""Builds the objects, runs the tasks, drains on SIGTERM: the only module that knows everyone.

Life of the process: read flags and configuration (nothing is bound yet), bind the ports, start
discovery and scraping, be ready as soon as discovery has spoken once. On SIGTERM or SIGINT health
says NOT_SERVING at once and streams go on until the last has ended or the drain timeout is over; a
second signal ends the wait.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import ssl
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random

import uvloop

from epp.build import compiled
from epp.config import Plan
from epp.config.parameters import EngineConfig, MetricsDataSource
from epp.core.bodies import Bodies
from epp.core.decide import Decider, PrefixKeeper
from epp.core.errors import ConfigError, DropReason, RequestDropped
from epp.core.exchange import Exchange, ExchangeParams
from epp.core.flow.hold import Hold, params_of
from epp.core.inflight import Inflight
from epp.core.latency.expected import ExpectedLatency
from epp.core.latency.forecast import Forecast
from epp.core.parse import ParseLimits
from epp.core.pool import Members, Pool, PoolEvent
from epp.core.prompt import BYTES_PER_TOKEN, PromptLimits
from epp.core.streams import Stream, Transport
from epp.edge import grpcio, http2, logs
from epp.edge.admin import AdminServer, debug_state
from epp.edge.discovery import FileDiscovery, StaticDiscovery, parse_endpoints
from epp.edge.grpcio import GrpcioServer
from epp.edge.health import Health
from epp.edge.http2 import Http2Server
from epp.edge.scrape import ENGINE_LABELS, EngineChooser, Scraper, ScrapeSettings
from epp.edge.telemetry import Telemetry
from epp.edge.tls import CertificateFiles, CertificateSource, SelfSigned
from epp.flags import ServeOptions
from epp.wire.exposition import ENGINES, EngineMapping, MetricSpec
from epp.wire.refusing import RefusingStream
from epp.wire.stream import ExtProcStream

DRAIN_NOTICE_S = 2.0
"""After SIGTERM new streams are served for this long, since gateways need to notice first."""
LAST_WORDS_S = 0.5
"""Before the end of a drain, who is held still is refused: a stream that is cut says nothing."""
TICK_S = 0.5
TOO_MANY_STREAMS = RequestDropped(
    DropReason.SATURATED, "too many requests at once for this endpoint picker (limits.streamsMax)"
)
SHUTTING_DOWN = RequestDropped(
    DropReason.SHUTTING_DOWN, "no endpoint had room for this request in time"
)
JOB_RESTART_S = 1.0
TLS_VERSIONS = {
    "VersionTLS12": ssl.TLSVersion.TLSv1_2,
    "VersionTLS13": ssl.TLSVersion.TLSv1_3,
}
POOL_NAME = "static"
"""Label `name` of the pool's gauges while there is no InferencePool."""

log = logging.getLogger(__name__)


def run(options: ServeOptions, plan: Plan) -> int:
    """Serve until a signal; returns the exit status."""
    logs.configure(verbosity=options.v, form=options.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(App(options, plan).serve())


class App:
    """One process's objects, and the order in which they start and stop.

    Raises: ConfigError when flags and configuration do not go together, EppError when a certificate
        cannot be used.
    """

    def __init__(self, options: ServeOptions, plan: Plan) -> None:
        self._options = options
        self._plan = plan
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        rng = Random()
        bodies = Bodies(plan.limits.bodies_bytes_max)
        self.pool = Pool(stale_after_s=_stale_after_s(options, plan))
        self.decider = Decider(
            pool=self.pool,
            profile=plan.profiles[0],
            inflight=Inflight(plan.inflight),
            prefix=None if plan.prefix is None else PrefixKeeper(plan.prefix),
            rng=rng,
            forecast=_forecast_of(plan),
        )
        self._hold = _hold_of(plan, self.decider)
        self._held = asyncio.Event()
        if self._hold is not None:
            self._hold.on_first = self._held.set
        self.telemetry = Telemetry(
            decider=self.decider,
            clock=time.monotonic,
            pool_name=POOL_NAME,
            label_values_max=plan.limits.label_values_max,
            bodies=bodies,
            hold=self._hold,
            streams_open=self._streams_open if options.enable_grpc_stream_metrics else None,
        )
        self.pool.listen(self.telemetry)
        self.health = Health()
        self._params = ExchangeParams(
            body_bytes_max=plan.limits.body_bytes_max,
            chunk_bytes_max=plan.limits.chunk_bytes,
            emit_scores=options.emit_endpoint_scores,
            use_subset=not options.disable_endpoint_subset_filter,
            verify_served=plan.served_verifier,
            parse_limits=_parse_limits(plan),
            bodies=bodies,
        )
        self._discovery = self._make_discovery()
        self._scraper = self._make_scraper(rng)
        self._tls = self._make_tls()
        self._server = self._make_server()
        self._admin = AdminServer(
            host=options.host,
            port=options.metrics_port,
            metrics=self.telemetry.metrics,
            state=lambda: debug_state(self.decider, time.monotonic, self._hold),
        )

    # -- building --------------------------------------------------------------------------

    def new_stream(self, transport: Transport) -> Stream:
        """The receiving half of one ext_proc stream."""
        if self._server.streams_inflight > self._plan.limits.streams_max:
            self.telemetry.refused(DropReason.SATURATED)
            return RefusingStream(transport=transport, dropped=TOO_MANY_STREAMS)
        exchange = Exchange(
            decider=self.decider,
            params=self._params,
            watcher=self.telemetry,
            now_s=time.monotonic(),
            hold=self._hold,
        )
        return ExtProcStream(
            transport=transport,
            exchange=exchange,
            clock=time.monotonic,
            on_bug=self.telemetry.bug,
        )

    def _streams_open(self) -> int:
        return self._server.streams_inflight

    def apply(self, event: PoolEvent) -> None:
        """Fold what discovery or a scrape said into the pool, and tell who follows membership."""
        now_s = time.monotonic()
        # What was predicted to end by now is not in flight, whether or not another request came.
        self.decider.inflight.advance(now_s)
        self.pool.apply(event, now_s)
        if isinstance(event, Members):
            if self._scraper is not None:
                self._scraper.members_changed()
            self.health.set_ready(True)
        if self._hold is not None:
            self._hold.wake(time.monotonic())

    def _make_discovery(self) -> StaticDiscovery | FileDiscovery:
        from_file = self._plan.discovery
        if self._options.endpoints:
            if from_file is not None:
                raise ConfigError(
                    "--endpoints and the configuration's dataLayer.discovery both say where the "
                    "endpoints are; give one of them",
                    path="--endpoints",
                )
            specs = parse_endpoints(",".join(self._options.endpoints))
            return StaticDiscovery(specs, self.apply)
        if from_file is None:
            raise ConfigError(
                "nothing says where the endpoints are: give --endpoints HOST:PORT,… or a "
                "configuration whose dataLayer.discovery refers to a file-discovery plugin",
                path="--endpoints",
            )
        return FileDiscovery(Path(from_file.path), self.apply, watch=from_file.watch_file)

    def _make_scraper(self, rng: Random) -> Scraper | None:
        source = self._plan.scrape
        if source is None:
            return None
        limits = self._plan.limits
        return Scraper(
            pool=self.pool,
            apply=self.apply,
            chooser=_engine_chooser(self._plan),
            settings=ScrapeSettings(
                scheme=source.scheme,
                path=source.path,
                port=source.port,
                interval_s=source.interval_s or self._options.refresh_metrics_interval,
                timeout_s=limits.scrape_timeout_s,
                concurrency_max=limits.scrape_concurrency_max,
            ),
            rng=rng,
            tls=_scrape_tls(source),
            report=self.telemetry.scraped_page,
        )

    def _make_tls(self) -> CertificateSource | None:
        options = self._options
        if not options.secure_serving:
            return None
        if options.cert_path is None:
            return SelfSigned()
        return CertificateFiles(options.cert_path)

    def _make_server(self) -> GrpcioServer | Http2Server:
        options = self._options
        # Streams beyond ours are refused with an answer a client can read, as long as there are not
        # far too many of them.
        bounds: dict[str, int] = {"streams_max": 2 * self._plan.limits.streams_max}
        if options.grpc_max_recv_msg_size is not None:
            bounds["message_bytes_max"] = options.grpc_max_recv_msg_size
        if options.transport == "grpcio":
            return GrpcioServer(
                new_stream=self.new_stream,
                health=self.health,
                host=options.host,
                port=options.grpc_port,
                health_port=options.grpc_health_port,
                tls=self._tls,
                limits=grpcio.Limits(**bounds),
            )
        return Http2Server(
            new_stream=self.new_stream,
            health=self.health,
            host=options.host,
            port=options.grpc_port,
            health_port=options.grpc_health_port,
            tls=self._tls,
            tls_version_min=TLS_VERSIONS[options.tls_min_version],
            limits=http2.Limits(**bounds),
            report_fault=self.telemetry.connection_fault,
        )

    # -- running ---------------------------------------------------------------------------

    async def serve(self) -> int:
        """Run until a signal and the drain after it; returns the exit status."""
        self._catch_signals()
        for notice in (*self._options.notices, *self._plan.notices):
            log.warning("%s", notice)
        port, health_port = await self._server.start()
        metrics_port = await self._admin.start()
        ports = {"grpc": port, "health": health_port, "metrics": metrics_port}
        log.info(
            "serving",
            extra={
                "fields": {
                    "ports": ports,
                    "tls": self._tls is not None,
                    "transport": self._options.transport,
                    "compiled": compiled(),
                }
            },
        )
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_keep_running(job)) for job in self._jobs()]
            # What was made at start stays for ever: keep the collector from walking it again.
            gc.collect()
            gc.freeze()
            await self._stop.wait()
            await self._drain()
            for task in running:
                task.cancel()
        await self._admin.stop()
        log.info("stopped")
        return 0

    def _jobs(self) -> list[Callable[[], Coroutine[None, None, None]]]:
        jobs = [self._discovery.run, self._tick]
        if self._hold is not None:
            jobs.append(self._wake_held)
        if self._scraper is not None:
            jobs.append(self._scraper.run)
        if isinstance(self._tls, CertificateFiles) and self._options.enable_cert_reload:
            jobs.append(self._tls.watch)
        return jobs

    async def _drain(self) -> None:
        grace_s = self._options.drain_timeout
        log.info(
            "draining",
            extra={"fields": {"streams": self._server.streams_inflight, "grace_s": grace_s}},
        )
        patient_s = grace_s - LAST_WORDS_S
        if patient_s <= 0:
            self._refuse_held()
        draining = asyncio.create_task(self._server.drain(grace_s, notice_s=DRAIN_NOTICE_S))
        hurry = asyncio.create_task(self._hurry.wait())
        if patient_s > 0:
            await asyncio.wait(
                {draining, hurry}, timeout=patient_s, return_when=asyncio.FIRST_COMPLETED
            )
            self._refuse_held()
        await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not draining.done():
            draining.cancel()
            await asyncio.wait({draining})
            await self._server.drain(0.0)

    def _refuse_held(self) -> None:
        if self._hold is not None:
            self._hold.close(SHUTTING_DOWN, time.monotonic())

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def _wake_held(self) -> None:
        """Room also comes with time: look for it while something is held."""
        hold = self._hold
        assert hold is not None
        while True:
            # Asked first, since this job may have been started again while some are held.
            if not hold.requests:
                self._held.clear()
                await self._held.wait()
            await asyncio.sleep(hold.params.recheck_s)
            hold.wake(time.monotonic())

    async def _tick(self) -> None:
        """Carry out predicted releases when no request does, and sample how late the loop is: a
        late one delays every request."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            self.telemetry.loop_lag_s.observe(max(0.0, loop.time() - due_s))
            self.decider.inflight.advance(time.monotonic())


async def _keep_running(job: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run a job that never ends; a bug in it is logged and the job started again, since routing on
    what is known is better than not routing."""
    while True:
        try:
            await job()
        except Exception:
            log.exception("a bug: %s ended, starting it again", job.__qualname__)
        await asyncio.sleep(JOB_RESTART_S)


def _forecast_of(plan: Plan) -> Forecast:
    cost = plan.profiles[0].cost
    if not isinstance(cost, ExpectedLatency):
        return Forecast()
    return Forecast(chunk_tokens=cost.chunk_tokens)


def _hold_of(plan: Plan, decider: Decider) -> Hold | None:
    params = params_of(plan.profiles[0].cost)
    return None if params is None else Hold(decider, params)


def _stale_after_s(options: ServeOptions, plan: Plan) -> float:
    if options.metrics_staleness_threshold is not None:
        return options.metrics_staleness_threshold
    if plan.limits.stale_after_s is not None:
        return plan.limits.stale_after_s
    interval_s = options.refresh_metrics_interval
    if plan.scrape is not None and plan.scrape.interval_s:
        interval_s = plan.scrape.interval_s
    return max(5 * interval_s, 2.0)


def _parse_limits(plan: Plan) -> ParseLimits:
    tokens_max = 0 if plan.prefix is None else plan.prefix.tokens_max
    view_bytes_max = min(tokens_max * BYTES_PER_TOKEN, plan.limits.body_bytes_max)
    return ParseLimits(
        read_bytes_max=plan.limits.read_bytes_max,
        decoded_bytes_max=plan.limits.decoded_bytes_max,
        apis=plan.apis,
        prompt=PromptLimits(view_bytes_max=view_bytes_max),
    )


def _engine_chooser(plan: Plan) -> EngineChooser:
    metrics = plan.metrics
    own = {engine.name: _engine_mapping(engine) for engine in metrics.engine_configs}
    key = metrics.engine_label_key
    labels = ENGINE_LABELS if key in ENGINE_LABELS else (key,)
    return EngineChooser(
        engines={**ENGINES, **own}, default=metrics.default_engine, label_keys=labels
    )


def _engine_mapping(engine: EngineConfig) -> EngineMapping:
    path = f"engineConfigs[{engine.name}]"

    def one(text: str) -> MetricSpec | None:
        return MetricSpec.parse(text, path=path) if text else None

    def some(text: str) -> tuple[MetricSpec, ...]:
        spec = one(text)
        return () if spec is None else (spec,)

    return EngineMapping(
        name=engine.name,
        waiting=some(engine.queued_requests_spec),
        running=some(engine.running_requests_spec),
        kv_usage=some(engine.kv_usage_spec),
        lora=one(engine.lora_spec),
        cache_info=one(engine.cache_info_spec),
        block_tokens_label=engine.cache_block_size_label_name,
        blocks_label=engine.cache_num_blocks_label_name,
        block_tokens=some(engine.cache_block_size_spec),
        blocks=some(engine.cache_num_blocks_spec),
        custom={
            c.attribute_key: MetricSpec.parse(c.metric_spec, path=path)
            for c in engine.custom_metrics
        },
    )


def _scrape_tls(source: MetricsDataSource) -> ssl.SSLContext | None:
    """How to speak TLS to an engine's metrics port; `None` for plain HTTP."""
    if source.scheme != "https":
        return None
    try:
        context = ssl.create_default_context(cafile=source.ca_cert_path or None)
        if source.client_cert_path:
            context.load_cert_chain(source.client_cert_path, source.client_key_path)
    except OSError as error:
        raise ConfigError(
            f"the certificates of metrics-data-source cannot be read: {error}",
            path="$.plugins",
        ) from error
    if source.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
