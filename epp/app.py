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
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from random import Random
from types import MappingProxyType

import msgspec
import uvloop

from epp.build import compiled
from epp.cluster import Cluster, serves_several, wants_cluster
from epp.config import Plan
from epp.core.bodies import Bodies
from epp.core.errors import ConfigError, DropReason, RequestDropped
from epp.core.exchange import Exchange, ExchangeParams
from epp.core.flow.hold import params_of
from epp.core.parse import ParseLimits
from epp.core.pool import Members
from epp.core.prompt import BYTES_PER_TOKEN, PromptLimits
from epp.core.serving import Pools
from epp.core.streams import NOT_SAID, Stream, Transport
from epp.edge import grpcio, http2, logs
from epp.edge.admin import AdminServer, StatePage, debug_state
from epp.edge.admin_tls import AdminTls
from epp.edge.discovery import FileDiscovery, StaticDiscovery, parse_endpoints
from epp.edge.grpcio import GrpcioServer
from epp.edge.health import Health
from epp.edge.http2 import Http2Server
from epp.edge.metrics import Reading
from epp.edge.telemetry import Telemetry
from epp.edge.tls import CertificateFiles, CertificateSource, SelfSigned
from epp.flags import ServeOptions
from epp.scraping import read_scraping
from epp.sites import ClusterSites, Job, Site
from epp.wire.refusing import RefusingStream
from epp.wire.stream import ExtProcStream

DRAIN_NOTICE_S = 2.0
"""After SIGTERM new streams are served for this long, since gateways need to notice first."""
HAND_OVER_S_MAX = 10.0
"""After SIGTERM a leader serves on until another one leads, but not for longer."""
RELEASE_S = 1.0
"""The Lease is released even where there is no time to drain."""
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
"""Label `name` of the pool's gauges where there is no InferencePool."""
NO_ENVIRONMENT: Mapping[str, str] = MappingProxyType({})

log = logging.getLogger(__name__)


def run(options: ServeOptions, plan: Plan, environ: Mapping[str, str]) -> int:
    """Serve until a signal; returns the exit status.

    Args:
        environ: of the process; says in which cluster and namespace it is.
    """
    logs.configure(verbosity=options.v, form=options.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(App(options, plan, environ).serve())


class App:
    """One process's objects, and the order in which they start and stop.

    Raises: ConfigError when flags and configuration do not go together, EppError when a certificate
        cannot be used.
    """

    def __init__(
        self, options: ServeOptions, plan: Plan, environ: Mapping[str, str] = NO_ENVIRONMENT
    ) -> None:
        self._options = options
        self._plan = plan
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._rng = Random()
        bodies = Bodies(plan.limits.bodies_bytes_max)
        self._several = serves_several(options)
        self.pools = Pools(several=self._several)
        self._sites: list[Site] = []
        """Those that are there from the start."""
        self._may_hold = params_of(plan.profiles[0].cost) is not None
        self.telemetry = Telemetry(
            pools=self.pools,
            clock=time.monotonic,
            label_values_max=plan.limits.label_values_max,
            bodies=bodies,
            streams_open=self._streams_open if options.enable_grpc_stream_metrics else None,
            more=self._cluster_readings,
        )
        self.health = Health()
        self._scraping = read_scraping(options, plan)
        self._tasks: asyncio.TaskGroup | None = None
        """While it serves."""
        self._running: dict[Site, list[asyncio.Task[None]]] = {}
        self._params = ExchangeParams(
            body_bytes_max=plan.limits.body_bytes_max,
            chunk_bytes_max=plan.limits.chunk_bytes,
            emit_scores=options.emit_endpoint_scores,
            use_subset=not options.disable_endpoint_subset_filter,
            verify_served=plan.served_verifier,
            parse_limits=_parse_limits(plan),
            bodies=bodies,
        )
        self._cluster: Cluster | None = None
        self._cluster = self._make_cluster(environ)
        self._discovery = None if self._cluster is not None else self._make_discovery()
        self._tls = self._make_tls()
        self._server = self._make_server()
        self._admin = self._make_admin()

    # -- building --------------------------------------------------------------------------

    def new_stream(self, transport: Transport) -> Stream:
        """The receiving half of one ext_proc stream."""
        if self._server.streams_inflight > self._plan.limits.streams_max:
            self.telemetry.refused(DropReason.SATURATED)
            return RefusingStream(transport=transport, dropped=TOO_MANY_STREAMS)
        exchange = Exchange(
            pools=self.pools,
            params=self._params,
            watcher=self.telemetry,
            now_s=time.monotonic(),
            called=transport.called if self._several else NOT_SAID,
            may_hold=self._may_hold,
        )
        return ExtProcStream(
            transport=transport,
            exchange=exchange,
            clock=time.monotonic,
            on_bug=self.telemetry.bug,
        )

    def _streams_open(self) -> int:
        return self._server.streams_inflight

    def _make_site(self, name: str) -> Site:
        return Site(
            name,
            plan=self._plan,
            scraping=self._scraping,
            telemetry=self.telemetry,
            rng=self._rng,
        )

    def _make_cluster(self, environ: Mapping[str, str]) -> Cluster | None:
        """`None` when endpoints come from elsewhere."""
        if not wants_cluster(self._options):
            return None
        if self._plan.discovery is not None:  # as in the reference, which needs both
            log.warning(
                "--pool-name and --endpoint-selector have no effect: dataLayer.discovery of the "
                "configuration says where the endpoints are"
            )
            return None
        sites = ClusterSites(
            self.pools,
            make=self._make_site,
            started=self._start_site,
            ended=self._end_site,
            changed=self._check_ready,
        )
        return Cluster(
            self._options, environ, sites=sites, changed=self._check_ready, rng=self._rng
        )

    def _make_discovery(self) -> StaticDiscovery | FileDiscovery:
        site = self._make_site(POOL_NAME)
        self.pools.put(site.serving)
        self._sites.append(site)

        def apply(members: Members) -> None:
            site.apply(members)
            self.health.set_ready(True)

        from_file = self._plan.discovery
        if self._options.endpoints:
            if from_file is not None:
                raise ConfigError(
                    "--endpoints and the configuration's dataLayer.discovery both say where the "
                    "endpoints are; give one of them",
                    path="--endpoints",
                )
            specs = parse_endpoints(",".join(self._options.endpoints))
            return StaticDiscovery(specs, apply)
        if from_file is None:
            raise ConfigError(
                "nothing says where the endpoints are: give --endpoints HOST:PORT,…, --pool-name, "
                "--endpoint-selector, or a configuration whose dataLayer.discovery refers to a "
                "file-discovery plugin",
                path="--endpoints",
            )
        return FileDiscovery(Path(from_file.path), apply, watch=from_file.watch_file)

    def _cluster_readings(self) -> Mapping[str, list[Reading]]:
        return {} if self._cluster is None else self._cluster.readings()

    def _check_ready(self) -> None:
        assert self._cluster is not None
        self.health.set_ready(self._cluster.ready)

    def _make_admin(self) -> AdminServer:
        options = self._options
        reviewer = None if self._cluster is None else self._cluster.reviewer
        return AdminServer(
            host=options.host,
            port=options.metrics_port,
            metrics=self.telemetry.metrics,
            state=self._debug_state,
            tls=_admin_tls(options),
            auth=None if reviewer is None else reviewer.check,
        )

    def _debug_state(self, pool: str | None) -> StatePage:
        serving = next(iter(self.pools.all), None) if pool is None else self.pools.get(pool)
        if serving is None:
            names = ", ".join(each.name for each in self.pools.all) or "none yet"
            raise KeyError(f"no such pool; served are: {names}")
        page = debug_state(serving.decider, time.monotonic, serving.hold)
        state = msgspec.structs.replace(
            page.state,
            pool=serving.name,
            pools=tuple(each.name for each in self.pools.all),
            objectives=dict(serving.objectives),
            rewrites=serving.rewrites.names,
        )
        return page._replace(state=state)

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
            self._tasks = tasks
            for site in self._sites:
                self._start_site(site)
            jobs = [tasks.create_task(_keep_running(job)) for job in self._jobs()]
            # What was made at start stays for ever: keep the collector from walking it again.
            gc.collect()
            gc.freeze()
            await self._stop.wait()
            self._tasks = None
            await self._drain(self._options.drain_timeout - await self._hand_over())
            for task in (*jobs, *chain.from_iterable(self._running.values())):
                task.cancel()
        await self._admin.stop()
        log.info("stopped")
        return 0

    def _jobs(self) -> list[Job]:
        jobs: list[Job] = [self._tick]
        if self._discovery is not None:
            jobs.append(self._discovery.run)
        if self._cluster is not None:
            jobs.append(self._cluster.run)
        if isinstance(self._tls, CertificateFiles) and self._options.enable_cert_reload:
            jobs.append(self._tls.watch)
        return jobs

    def _start_site(self, site: Site) -> None:
        """Run what a site needs, unless the process is about to end."""
        if self._tasks is not None:
            tasks = self._tasks
            self._running[site] = [tasks.create_task(_keep_running(job)) for job in site.jobs]

    def _end_site(self, site: Site) -> None:
        for task in self._running.pop(site, ()):
            task.cancel()

    async def _hand_over(self) -> float:
        """Let another replica lead before this one stops serving; the seconds it took."""
        if self._cluster is None:
            return 0.0
        within_s = max(RELEASE_S, min(HAND_OVER_S_MAX, self._options.drain_timeout / 2))
        started_s = time.monotonic()
        handing = asyncio.create_task(self._cluster.hand_over(within_s))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({handing, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (handing, hurry):
            task.cancel()
        return time.monotonic() - started_s

    async def _drain(self, grace_s: float) -> None:
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
        for serving in self.pools.all:
            if serving.hold is not None:
                serving.hold.close(SHUTTING_DOWN, time.monotonic())

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def _tick(self) -> None:
        """Carry out predicted releases when no request does, and sample how late the loop is: a
        late one delays every request."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            self.telemetry.loop_lag_s.observe(max(0.0, loop.time() - due_s))
            for serving in self.pools.all:
                serving.decider.inflight.advance(time.monotonic())
            if self._cluster is not None:
                self._check_ready()  # who else leads is seen without a change of ours


async def _keep_running(job: Job) -> None:
    """Run a job that never ends; a bug in it is logged and the job started again, since routing on
    what is known is better than not routing."""
    while True:
        try:
            await job()
        except Exception:
            log.exception("a bug: %s ended, starting it again", job.__qualname__)
        await asyncio.sleep(JOB_RESTART_S)


def _admin_tls(options: ServeOptions) -> AdminTls | None:
    """Raises: EppError when a certificate cannot be used."""
    if options.metrics_cert_dir is None:
        return None
    ca = options.metrics_client_ca_file
    return AdminTls(
        CertificateFiles(options.metrics_cert_dir), client_ca=None if ca is None else Path(ca)
    )


def _parse_limits(plan: Plan) -> ParseLimits:
    tokens_max = 0 if plan.prefix is None else plan.prefix.tokens_max
    view_bytes_max = min(tokens_max * BYTES_PER_TOKEN, plan.limits.body_bytes_max)
    return ParseLimits(
        read_bytes_max=plan.limits.read_bytes_max,
        decoded_bytes_max=plan.limits.decoded_bytes_max,
        apis=plan.apis,
        prompt=PromptLimits(view_bytes_max=view_bytes_max),
    )
