"""`/metrics` as vLLM 0.32 writes it: the families a router could read, with their labels.

Names, types, labels, label order and buckets are those of recorded pages (the tests compare them);
families that say nothing about load (flops, multi-modal cache, HTTP handlers) are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec
from prometheus_client.utils import floatToGoString

from bench.engine.scheduler import EngineLimits, EngineLoad
from bench.engine.stats import Histogram, Stats

_go_float: Callable[[float], str] = floatToGoString

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"

_CACHE_CONFIG: Mapping[str, str] = {
    "_block_size_resolved": "True",
    "cache_dtype": "auto",
    "cache_hit_alignment_tokens": "None",
    "enable_mamba_shared_prefix_checkpoint": "False",
    "gpu_memory_utilization": "0.92",
    "hash_block_size": "None",
    "is_attention_free": "False",
    "kv_cache_dtype_skip_layers": "[]",
    "kv_cache_layout": "None",
    "kv_cache_memory_bytes": "None",
    "kv_offloading_backend": "native",
    "kv_offloading_size": "None",
    "kv_sharing_fast_prefill": "False",
    "mamba_block_size": "None",
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "mamba_page_size_padded": "None",
    "mamba_ssm_cache_dtype": "auto",
    "num_cpu_blocks": "None",
    "num_gpu_blocks_override": "None",
    "prefix_cache_retention_interval": "0",
    "prefix_caching_hash_algo": "sha256",
    "prefix_match_unit": "None",
    "replayssm_buffer_len": "16",
    "skip_page_size_padded": "None",
    "sliding_window": "None",
    "swa_bounded_replay": "True",
    "use_kda_recoverssm": "False",
    "use_replayssm": "False",
    "user_specified_block_size": "True",
}


class PageContext(NamedTuple):
    """What the page needs besides the statistics."""

    model_name: str
    """The first served name, whatever name requests use."""
    limits: EngineLimits
    max_model_len: int
    has_loras: bool
    started_unix_s: float
    clock_offset_s: float
    """Unix time minus monotonic time."""


def load_header(load: EngineLoad, wanted: str | None) -> dict[str, str] | None:
    """The load header a client may ask for, as TEXT or JSON; two metrics only, as vLLM gives."""
    if wanted == "TEXT":
        value = f"TEXT named_metrics.num_requests_waiting={float(load.waiting)}, "
        value += f"named_metrics.kv_cache_usage_perc={load.kv_usage_ratio}"
    elif wanted == "JSON":
        named = {
            "num_requests_waiting": float(load.waiting),
            "kv_cache_usage_perc": load.kv_usage_ratio,
        }
        value = f"JSON {msgspec.json.encode({'named_metrics': named}).decode()}"
    else:
        return None
    return {"endpoint-load-metrics": value}


def render(stats: Stats, context: PageContext) -> bytes:
    """The whole page."""
    page = _Page(context.model_name, context.started_unix_s)
    _gauges(page, stats)
    _counters(page, stats)
    for name, help_text, histogram in _histograms(stats):
        page.histogram(name, help_text, histogram)
    if context.has_loras:
        _lora_info(page, stats, context)
    _cache_config(page, context)
    return page.bytes()


class _Page:
    """Lines of a page being written; each method writes one family."""

    def __init__(self, model_name: str, created_unix_s: float) -> None:
        self._lines: list[str] = []
        self._model = f'model_name="{escape(model_name)}"'
        self._created = created_unix_s

    def bytes(self) -> bytes:
        return ("\n".join(self._lines) + "\n").encode()

    def head(self, name: str, kind: str, help_text: str) -> None:
        self._lines += [f"# HELP vllm:{name} {help_text}", f"# TYPE vllm:{name} {kind}"]

    def sample(self, name: str, labels: str, value: float) -> None:
        self._lines.append(f"vllm:{name}{{{labels}}} {_go_float(value)}")

    def labels(self, extra: str = "", *, engine: bool = True) -> str:
        """In alphabetical order, as the client library of vLLM writes them."""
        parts = [self._model, extra] if extra else [self._model]
        return ",".join(sorted(['engine="0"', *parts] if engine else parts))

    def family(
        self,
        name: str,
        kind: str,
        help_text: str,
        values: Mapping[str, float],
        *,
        engine: bool = True,
    ) -> None:
        """`values`: extra label (`reason="capacity"`, or empty) -> value. A counter gets its
        `_created` family, too."""
        total = f"{name}_total" if kind == "counter" else name
        self.head(total, kind, help_text)
        for extra, value in values.items():
            self.sample(total, self.labels(extra, engine=engine), value)
        if kind == "counter":
            self.head(f"{name}_created", "gauge", help_text)
            for extra in values:
                self.sample(f"{name}_created", self.labels(extra, engine=engine), self._created)

    def histogram(self, name: str, help_text: str, histogram: Histogram) -> None:
        self.head(name, "histogram", help_text)
        cumulated = 0
        bounds = [*map(str, histogram.bounds), "+Inf"]
        for bound, count in zip(bounds, histogram.counts, strict=True):
            cumulated += count
            labels = f'engine="0",le="{bound}",{self._model}'
            self._lines.append(f"vllm:{name}_bucket{{{labels}}} {_go_float(cumulated)}")
        self.sample(f"{name}_count", self.labels(), histogram.count)
        self.sample(f"{name}_sum", self.labels(), histogram.sum)
        self.head(f"{name}_created", "gauge", help_text)
        self.sample(f"{name}_created", self.labels(), self._created)


def escape(value: str) -> str:
    """A label value between its quotes."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _by(label: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f'{label}="{key}"': value for key, value in values.items()}


def _gauges(page: _Page, stats: Stats) -> None:
    load = stats.load
    page.family("num_requests_running", "gauge", "Requests in the batch.", {"": load.running})
    page.family("num_requests_waiting", "gauge", "Requests queued.", {"": load.waiting})
    reasons = {"capacity": load.waiting - load.deferred, "deferred": load.deferred}
    page.family(
        *("num_requests_waiting_by_reason", "gauge", "Requests queued, by reason."),
        _by("reason", reasons),
    )
    states = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    page.family(
        "engine_sleep_state", "gauge", "1 for the state it is in.", _by("sleep_state", states)
    )
    page.family(
        *("kv_cache_usage_perc", "gauge", "KV blocks in use, 0 to 1."), {"": load.kv_usage_ratio}
    )


def _counters(page: _Page, stats: Stats) -> None:
    counters = stats.counters
    computed = counters.prefilled_tokens - counters.prefilled_cached_tokens
    sources = {
        "local_compute": computed,
        "local_cache_hit": counters.prefilled_cached_tokens,
        "external_kv_transfer": 0,
    }
    tiers = {"device": counters.cached_tokens, "host": 0, "p2p": 0, "disk": 0}
    tiers["external_unspecified"] = 0
    families: Iterable[tuple[str, str, Mapping[str, float]]] = (
        ("prefix_cache_queries", "Tokens looked up.", {"": counters.prompt_tokens}),
        ("prefix_cache_hits", "Tokens found.", {"": counters.cached_tokens}),
        ("num_preemptions", "Preemptions.", {"": counters.preemptions}),
        ("prompt_tokens", "Prompt tokens done.", {"": counters.prefilled_tokens}),
        ("prompt_tokens_by_source", "Prompt tokens, by source.", _by("source", sources)),
        ("prompt_tokens_cached", "From a cache.", {"": counters.prefilled_cached_tokens}),
        ("prompt_tokens_cached_by_source", "From a cache, by tier.", _by("source", tiers)),
        ("generation_tokens", "Tokens generated.", {"": counters.generated_tokens}),
        ("request_success", "Requests ended.", _by("finished_reason", stats.finish_reasons)),
    )
    for name, help_text, values in families:
        page.family(name, "counter", help_text, values)
    rejected = {"max_num_queued_reqs": counters.rejected, "max_num_queued_tokens": 0}
    page.family(
        *("admission_rejections", "counter", "Requests refused, by limit."),
        _by("reason", rejected),
        engine=False,
    )


def _histograms(stats: Stats) -> Iterable[tuple[str, str, Histogram]]:
    return (
        ("request_prompt_tokens", "Prompt tokens.", stats.request_prompt_tokens),
        ("request_generation_tokens", "Output tokens.", stats.request_generation_tokens),
        ("iteration_tokens_total", "Tokens per step.", stats.iteration_tokens),
        ("time_to_first_token_seconds", "Arrival to first token.", stats.time_to_first_token_s),
        ("inter_token_latency_seconds", "Token to token.", stats.inter_token_latency_s),
        (
            *("request_time_per_output_token_seconds", "Mean gap of a request."),
            stats.time_per_output_token_s,
        ),
        ("e2e_request_latency_seconds", "Arrival to end.", stats.e2e_latency_s),
        ("request_queue_time_seconds", "Arrival to admission.", stats.queue_time_s),
        ("request_inference_time_seconds", "Admission to end.", stats.inference_time_s),
        ("request_prefill_time_seconds", "Admission to first token.", stats.prefill_time_s),
        ("request_decode_time_seconds", "First token to end.", stats.decode_time_s),
        (
            *("request_prefill_kv_computed_tokens", "Prompt tokens not found in the cache."),
            stats.prefill_kv_computed_tokens,
        ),
    )


def _lora_info(page: _Page, stats: Stats, context: PageContext) -> None:
    """One series per set of adapters ever seen; the value is when, and the newest one is true."""
    page.head("lora_requests_info", "gauge", "Adapters in use; the value is a Unix time.")
    for names, seen_s in stats.lora_seen.items():
        seen_unix_s = seen_s + context.clock_offset_s if seen_s else context.started_unix_s
        quoted = escape(names)
        labels = f'max_lora="{context.limits.max_loras}",running_lora_adapters="{quoted}"'
        page.sample("lora_requests_info", f'{labels},waiting_lora_adapters="{quoted}"', seen_unix_s)


def _cache_config(page: _Page, context: PageContext) -> None:
    limits = context.limits
    values = {
        **_CACHE_CONFIG,
        "block_size": str(limits.block_tokens),
        "effective_attention_block_size": str(limits.block_tokens),
        "enable_prefix_caching": str(limits.prefix_caching),
        "engine": "0",
        "kv_cache_max_concurrency": str(limits.kv_tokens / context.max_model_len),
        "kv_cache_size_tokens": str(limits.kv_tokens),
        "num_gpu_blocks": str(limits.kv_blocks),
    }
    page.head("cache_config_info", "gauge", "Configuration of the cache, in the labels.")
    labels = ",".join(f'{key}="{values[key]}"' for key in sorted(values))
    page.sample("cache_config_info", labels, 1)
