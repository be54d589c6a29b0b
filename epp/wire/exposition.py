"""A Prometheus text page to a `Load`, by engine.

Only lines of the families an engine's mapping names are read: one regular expression per mapping
finds them at line starts, the rest of the page is skipped without being looked at. The text format
0.0.4 and OpenMetrics are both understood as far as these lines go: labels in any order with escaped
values, CRLF, timestamps and exemplars (ignored), `_total` added to a counter's name.

How several series of one family (data-parallel ranks behind one port) become one number:

| reading | rule |
|---|---|
| waiting, running, KV blocks, prefill totals, custom metrics | sum |
| KV usage | the fullest rank |
| tokens per KV block | the value all ranks agree on |
| LoRA | the series with the largest value (a Unix time), equal ones united |

Equal labels twice: the last line counts. A reading is `None` ("not reported", never 0) when its
family is missing, and also when one of its values is NaN, infinite, or negative where that makes no
sense: a sum with an unknown part is unknown. A usage above 1 is 1.

A page is taken whole or not at all. It is refused when no family of the mapping is in it (an HTML
page, another engine), when a line that matters is malformed, or when it does not end with a line
end (it was cut off), so that no endpoint is ever half updated.

Cost: 92 to 130 us of CPU per recorded page of vLLM 0.32 (50 to 81 kB), half of it the search; 180
us with two ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from types import MappingProxyType

import msgspec

from epp.core.errors import ConfigError, EppError
from epp.core.model import NO_ATTRIBUTES, Load, Lora

COUNT_MAX = 2**53
"""Counts from here on are not exact floats, so they are not counts: not reported."""
TOTAL_MAX = 1e300
"""Totals from here on might not be finite once added up."""
SAMPLES_MAX = 20_000
"""Samples that matter on one page; a page with more is refused. vLLM keeps a LoRA series for every
combination of adapters it ever ran, so thousands can be honest."""
LINE_BYTES_MAX = 1 << 16
"""Longest line that matters; a page with a longer one is refused."""
LINES_BYTES_MAX = 1 << 20
"""All lines that matter, without their names: they cost up to 180 ms of CPU, read one by one."""

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_SPEC = re.compile(rf"\s*({_NAME})\s*(?:\{{(.*)\}}\s*)?")
_SPEC_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*(?:"([^"]*)"|([^",{}]*?))\s*(?:,|$)')

# Nothing here gives back what it took, and no name is looked for inside another: a line that does
# not match costs no more than its length, whatever an engine puts into it.
_LABEL = re.compile(
    rb'(?<![a-zA-Z0-9_])([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+=[ \t]*+"((?:[^"\\]++|\\.)*+)"'
)
_SAMPLE = re.compile(
    rb'[ \t]*+(?:\{((?:[^"}]++|"(?:[^"\\]++|\\.)*+")*+)\})?[ \t]*+([^ \t\r{}"_]++)(?![^ \t\r])'
)
_ESCAPE = re.compile(rb"\\(.)")
_UNESCAPED = {b"n": b"\n"}

Labels = dict[bytes, bytes]
Lines = Mapping[str, Sequence[bytes]]
"""Name as it stands on the page -> what follows it, one entry per line, page order."""


class ExpositionError(EppError):
    """The page is not a metrics page of this engine; nothing of it may be used."""


class MetricSpec(msgspec.Struct, frozen=True):
    """Which series to read: a family and the labels a series must have, others being free."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str, *, path: str = "$") -> MetricSpec:
        """Read `name` or `name{label=value,...}`; a value may stand in double quotes.

        Raises: ConfigError, with `path`, if the text is neither.
        """
        match = _SPEC.fullmatch(text)
        labels = None if match is None else _spec_labels(match[2] or "")
        if match is None or labels is None:
            raise ConfigError(
                f"{text!r} is not a metric: expected `name` or `name{{label=value,...}}`",
                path=path,
            )
        return cls(match[1], labels)


def _spec_labels(text: str) -> tuple[tuple[str, str], ...] | None:
    """The label conditions of a spec; `None` if the text is malformed."""
    labels = []
    at, text = 0, text.strip()
    while at < len(text):
        match = _SPEC_LABEL.match(text, at)
        if match is None:
            return None
        labels.append((match[1], match[3] if match[2] is None else match[2]))
        at = match.end()
    return tuple(labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMapping:
    """Where an engine reports what we read. Of several specs for a reading the first one that is on
    the page counts, so newer names stand first.

    Raises: ConfigError if it names no metric at all.
    """

    name: str
    waiting: tuple[MetricSpec, ...] = ()
    running: tuple[MetricSpec, ...] = ()
    kv_usage: tuple[MetricSpec, ...] = ()
    """A ratio, 0..1."""
    lora: MetricSpec | None = None
    """Labels `running_lora_adapters`, `waiting_lora_adapters` (comma lists), `max_lora`."""
    cache_info: MetricSpec | None = None
    """Block size and number as labels of an info family."""
    block_tokens_label: str = "block_size"
    blocks_label: str = "num_gpu_blocks"
    block_tokens: tuple[MetricSpec, ...] = ()
    """Block size as a family of its own; read where `cache_info` is `None`."""
    blocks: tuple[MetricSpec, ...] = ()
    prefill_s_sum: tuple[MetricSpec, ...] = ()
    """Sum of a histogram of the seconds from admission to first token."""
    prefill_tokens_sum: tuple[MetricSpec, ...] = ()
    """Sum of a histogram, over the same requests, of the prompt tokens computed."""
    prefills: tuple[MetricSpec, ...] = ()
    """Count of either."""
    custom: Mapping[str, MetricSpec] = field(default_factory=dict)
    """Attribute key -> spec."""
    pattern: re.Pattern[bytes] = field(init=False, repr=False, compare=False)
    """Finds (name, `_total` or empty, rest of the line) of every sample that matters."""

    def __post_init__(self) -> None:
        names = {spec.name for spec in self._specs()}
        if not names:
            raise ConfigError(f"engine {self.name!r} names no metric: give it at least one")
        # The names are matched after the line feed that ends the line before: a literal start lets
        # the expression skip through the page at the speed of a plain search.
        source = rf"\n({_any_of(names)})((?:_total)?)(?=[{{ \t])([^\n]*)"
        object.__setattr__(self, "pattern", re.compile(source.encode()))

    def _specs(self) -> Iterable[MetricSpec]:
        yield from (*self.waiting, *self.running, *self.kv_usage, *self.block_tokens, *self.blocks)
        yield from (*self.prefill_s_sum, *self.prefill_tokens_sum, *self.prefills)
        yield from self.custom.values()
        yield from (spec for spec in (self.lora, self.cache_info) if spec is not None)


def _any_of(names: Iterable[str]) -> str:
    """An expression for these names. What several begin with stands in it once, or most lines of a
    page would be compared with it as often."""
    by_first: dict[str, list[str]] = {}
    for name in sorted(names):
        by_first.setdefault(name[:1], []).append(name)
    choices = []
    for group in by_first.values():
        pairs = enumerate(zip(group[0], group[-1], strict=False))
        shared = next((at for at, (a, b) in pairs if a != b), len(group[0]))
        rest = _any_of(name[shared:] for name in group) if len(group) > 1 else group[0][shared:]
        choices.append(group[0][:shared] + rest)
    return choices[0] if len(choices) == 1 else f"(?:{'|'.join(choices)})"


def _specs(*texts: str) -> tuple[MetricSpec, ...]:
    return tuple(map(MetricSpec.parse, texts))


_TRITON_BLOCKS = "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=%s}"
ENGINES: Mapping[str, EngineMapping] = MappingProxyType(
    {
        mapping.name: mapping
        for mapping in (
            EngineMapping(
                name="vllm",
                waiting=_specs("vllm:num_requests_waiting"),
                running=_specs("vllm:num_requests_running"),
                kv_usage=_specs("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
                lora=MetricSpec("vllm:lora_requests_info"),
                cache_info=MetricSpec("vllm:cache_config_info"),
                prefill_s_sum=_specs("vllm:request_prefill_time_seconds_sum"),
                prefill_tokens_sum=_specs("vllm:request_prefill_kv_computed_tokens_sum"),
                prefills=_specs("vllm:request_prefill_time_seconds_count"),
            ),
            EngineMapping(
                name="sglang",
                waiting=_specs("sglang:num_queue_reqs"),
                running=_specs("sglang:num_running_reqs"),
                kv_usage=_specs("sglang:token_usage"),
                cache_info=MetricSpec("sglang:cache_config_info"),
                block_tokens_label="page_size",
                blocks_label="num_pages",
            ),
            EngineMapping(
                name="trtllm-serve",
                waiting=_specs("trtllm_num_requests_waiting"),
                running=_specs("trtllm_num_requests_running"),
                kv_usage=_specs("trtllm_kv_cache_utilization"),
                block_tokens=_specs("trtllm_kv_cache_tokens_per_block"),
                blocks=_specs("trtllm_kv_cache_max_blocks"),
            ),
            EngineMapping(
                name="triton-tensorrt-llm",
                waiting=_specs("nv_trt_llm_request_metrics{request_type=waiting}"),
                running=_specs("nv_trt_llm_request_metrics{request_type=scheduled}"),
                kv_usage=_specs(_TRITON_BLOCKS % "fraction"),
                block_tokens=_specs(_TRITON_BLOCKS % "tokens_per"),
                blocks=_specs(_TRITON_BLOCKS % "max"),
            ),
            EngineMapping(
                name="triton",
                waiting=_specs("nv_inference_pending_request_count"),
                running=_specs("nv_inference_exec_count"),
            ),
        )
    }
)
"""Engine name -> mapping. Source: the table of llm-d's `core-metrics-extractor`, and vLLM's older
name for KV usage (0.6 to 0.10). The order is that of detection: a Triton server with TensorRT-LLM
has the families of both."""


def detect_engine(page: bytes, engines: Mapping[str, EngineMapping] = ENGINES) -> str | None:
    """Name of the first engine with a family on the page, or `None`."""
    text = b"\n" + page
    return next((name for name, m in engines.items() if m.pattern.search(text)), None)


def parse_metrics(page: bytes, mapping: EngineMapping, *, at_s: float) -> Load:
    """Read one page.

    Args:
        page: the whole page, uncompressed; its size is the caller's to bound.
        at_s: monotonic time of the scrape, copied to the result.
    Raises: ExpositionError; see the module's text.
    """
    lines = _lines(page, mapping)
    block_tokens, blocks = _cache(lines, mapping)
    return Load(
        at_s=at_s,
        waiting=_count(_values(lines, mapping.waiting)),
        running=_count(_values(lines, mapping.running)),
        kv_usage_ratio=_usage_ratio(_values(lines, mapping.kv_usage)),
        kv_block_tokens=block_tokens,
        kv_blocks=blocks,
        lora=_lora(lines, mapping),
        attributes=_attributes(lines, mapping.custom),
        prefill_s_sum=_total(_values(lines, mapping.prefill_s_sum)),
        prefill_tokens_sum=_total(_values(lines, mapping.prefill_tokens_sum)),
        prefills=_count(_values(lines, mapping.prefills)),
    )


def _lines(page: bytes, mapping: EngineMapping) -> Lines:
    """The lines that matter."""
    if not page.endswith((b"\n", b"# EOF")):
        raise ExpositionError(f"{len(page)} bytes that do not end with a line end: cut off?")
    lines: dict[str, list[bytes]] = {}
    number = lines_bytes = 0
    for number, match in enumerate(mapping.pattern.finditer(b"\n" + page), start=1):
        if number > SAMPLES_MAX:
            raise ExpositionError(f"more than {SAMPLES_MAX} samples of engine {mapping.name!r}")
        line_bytes = len(match[3])
        lines_bytes += line_bytes
        if line_bytes > LINE_BYTES_MAX or lines_bytes > LINES_BYTES_MAX:
            raise ExpositionError(f"too much text in the samples of engine {mapping.name!r}")
        lines.setdefault((match[1] + match[2]).decode(), []).append(match[3])
    if not number:
        raise ExpositionError(f"none of the metrics of engine {mapping.name!r} is on the page")
    return lines


def _find(lines: Lines, spec: MetricSpec) -> Sequence[bytes]:
    """A family's lines. A counter may have `_total` added to its name."""
    return lines.get(spec.name) or lines.get(spec.name + "_total") or ()


def _sample(spec: MetricSpec, line: bytes) -> tuple[bytes, float]:
    """Labels, still raw, and value.

    Raises: ExpositionError if the line is no sample.
    """
    match = _SAMPLE.match(line)
    try:
        if match is not None:
            return match[1] or b"", float(match[2])
    except ValueError:
        pass
    raise ExpositionError(f"malformed sample of {spec.name}")


def _series(lines: Lines, spec: MetricSpec) -> list[tuple[Labels, float]]:
    """The series of a family that have the labels the spec asks for."""
    by_labels = {}
    for line in _find(lines, spec):
        raw_labels, value = _sample(spec, line)
        labels = _labels(raw_labels)
        by_labels[frozenset(labels.items())] = labels, value
    wanted = [(name.encode(), value.encode()) for name, value in spec.labels]
    return [s for s in by_labels.values() if all(s[0].get(n) == v for n, v in wanted)]


def _labels(raw: bytes) -> Labels:
    labels = dict(_LABEL.findall(raw))
    if b"\\" in raw:
        for name, value in labels.items():
            labels[name] = _ESCAPE.sub(lambda m: _UNESCAPED.get(m[1], m[1]), value)
    return labels


def _values(lines: Lines, specs: Iterable[MetricSpec]) -> list[float]:
    """The values of the first spec that is on the page."""
    for spec in specs:
        found = _find(lines, spec)
        if len(found) == 1 and not spec.labels:
            return [_sample(spec, found[0])[1]]  # its labels tell nothing
        series = _series(lines, spec)
        if series:
            return [value for _, value in series]
    return []


def _count(values: Sequence[float]) -> int | None:
    """Their sum; `None` when there is none, or one is no count. NaN fails the comparison."""
    if not values or not all(0 <= value < COUNT_MAX for value in values):
        return None
    total = sum(values)
    return int(total) if total < COUNT_MAX else None


def _total(values: Sequence[float]) -> float | None:
    """The same of what need not be whole. NaN and infinity fail the comparison."""
    return sum(values) if values and all(0 <= value < TOTAL_MAX for value in values) else None


def _usage_ratio(values: Sequence[float]) -> float | None:
    if not values or not all(isfinite(value) and value >= 0 for value in values):
        return None
    return min(1.0, max(values))


def _agreed(values: Iterable[int | None]) -> int | None:
    """The value they all have, if it can be a size."""
    distinct = set(values)
    value = distinct.pop() if len(distinct) == 1 else None
    return value or None


def _cache(lines: Lines, mapping: EngineMapping) -> tuple[int | None, int | None]:
    """Tokens per KV block and KV blocks."""
    if mapping.cache_info is None:
        sizes = _values(lines, mapping.block_tokens)
        blocks = _count(_values(lines, mapping.blocks))
        return _agreed(_count([size]) for size in sizes), blocks or None
    ranks = [labels for labels, _ in _series(lines, mapping.cache_info)]
    block_tokens = _agreed(_int(rank.get(mapping.block_tokens_label.encode())) for rank in ranks)
    counts = [_int(rank.get(mapping.blocks_label.encode())) for rank in ranks]
    return block_tokens, sum(c for c in counts if c) if counts and all(counts) else None


def _int(raw: bytes | None) -> int | None:
    """A label value that is a count of at most 15 digits; anything else (`None`) is none."""
    return int(raw) if raw is not None and raw.isdigit() and len(raw) <= 15 else None


def _lora(lines: Lines, mapping: EngineMapping) -> Lora | None:
    """Series of earlier times stay on vLLM's page for ever, so only the newest counts, and only its
    labels are read."""
    if mapping.lora is None:
        return None
    samples = [_sample(mapping.lora, line) for line in _find(lines, mapping.lora)]
    newest_s = max((value for _, value in samples if isfinite(value)), default=None)
    if newest_s is None:
        return None
    newest = [_labels(raw) for raw, value in samples if value == newest_s]
    sizes = [size for labels in newest if (size := _int(labels.get(b"max_lora")))]
    return Lora(
        running=_adapters(newest, b"running_lora_adapters"),
        waiting=_adapters(newest, b"waiting_lora_adapters"),
        max_adapters=max(sizes, default=None),
    )


def _adapters(series: Iterable[Labels], label: bytes) -> frozenset[str]:
    names = (name.strip() for labels in series for name in labels.get(label, b"").split(b","))
    return frozenset(name.decode(errors="replace") for name in names if name)


def _attributes(lines: Lines, custom: Mapping[str, MetricSpec]) -> Mapping[str, float]:
    """Custom metrics that are on the page and finite."""
    if not custom:
        return NO_ATTRIBUTES
    values = {key: _values(lines, (spec,)) for key, spec in custom.items()}
    return {key: sum(v) for key, v in values.items() if v and isfinite(sum(v))}
