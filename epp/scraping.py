"""How a pool's endpoints are scraped, as flags and configuration say: read once, used per pool."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from random import Random

import msgspec

from epp.config import Plan
from epp.config.parameters import EngineConfig, MetricsDataSource
from epp.core.errors import ConfigError
from epp.core.pool import Pool, PoolEvent
from epp.edge.scrape import ENGINE_LABELS, EngineChooser, Scraper, ScrapeSettings
from epp.flags import ServeOptions
from epp.wire.exposition import ENGINES, EngineMapping, MetricSpec


class Scraping(msgspec.Struct, frozen=True):
    """Makes scrapers."""

    stale_after_s: float
    """Age at which a report is no longer believed."""
    chooser: EngineChooser
    settings: ScrapeSettings | None
    """`None` = nothing is scraped."""
    tls: ssl.SSLContext | None
    """How to speak to an engine's metrics port; `None` = plain HTTP."""

    def scraper(
        self,
        pool: Pool,
        *,
        apply: Callable[[PoolEvent], object],
        report: Callable[[str | None, float], None],
        rng: Random,
    ) -> Scraper | None:
        """One for this pool.

        Args:
            report: told of each scrape: why it failed (`None` = it worked), and its seconds.
        """
        if self.settings is None:
            return None
        return Scraper(
            pool=pool,
            apply=apply,
            chooser=self.chooser,
            settings=self.settings,
            rng=rng,
            tls=self.tls,
            report=report,
        )


def read_scraping(options: ServeOptions, plan: Plan) -> Scraping:
    """Raises: ConfigError when certificates cannot be read or a metric's name is none."""
    source = plan.scrape
    return Scraping(
        stale_after_s=_stale_after_s(options, plan),
        chooser=_engine_chooser(plan),
        settings=None if source is None else _settings(source, options, plan),
        tls=None if source is None else _tls(source),
    )


def _settings(source: MetricsDataSource, options: ServeOptions, plan: Plan) -> ScrapeSettings:
    return ScrapeSettings(
        scheme=source.scheme,
        path=source.path,
        port=source.port,
        interval_s=source.interval_s or options.refresh_metrics_interval,
        timeout_s=plan.limits.scrape_timeout_s,
        concurrency_max=plan.limits.scrape_concurrency_max,
    )


def _stale_after_s(options: ServeOptions, plan: Plan) -> float:
    if options.metrics_staleness_threshold is not None:
        return options.metrics_staleness_threshold
    if plan.limits.stale_after_s is not None:
        return plan.limits.stale_after_s
    interval_s = options.refresh_metrics_interval
    if plan.scrape is not None and plan.scrape.interval_s:
        interval_s = plan.scrape.interval_s
    return max(5 * interval_s, 2.0)


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


def _tls(source: MetricsDataSource) -> ssl.SSLContext | None:
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
