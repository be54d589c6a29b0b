"""The page reader against a slow reader that goes line by line, and on damaged pages."""

import math
from pathlib import Path

from hypothesis import given, strategies as st

from epp.core.model import Load
from epp.wire.exposition import ENGINES, ExpositionError, detect_engine, parse_metrics

PAGE = (Path(__file__).parents[1] / "wire/data/metrics/overload.txt").read_bytes()
VLLM = ENGINES["vllm"]
NAMES = {
    "waiting": "vllm:num_requests_waiting",
    "running": "vllm:num_requests_running",
    "usage": "vllm:kv_cache_usage_perc",
    "seconds": "vllm:request_prefill_time_seconds_sum",
    "prefills": "vllm:request_prefill_time_seconds_count",
    "other": "vllm:num_requests_waiting_by_reason",
}

values = st.one_of(
    st.integers(0, 999).map(str),
    st.floats(-0.5, 2.0).map(repr),
    st.sampled_from(["NaN", "+Inf", "-Inf", "1e3"]),
)
label_values = st.text('ab,{}= \\"\n#', max_size=4)
labels = st.dictionaries(st.sampled_from(["engine", "model_name", "a"]), label_values)
samples = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), labels, values), max_size=8)


def escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def line(name: str, label_set: dict[str, str], value: str) -> str:
    inside = ",".join(f'{k}="{escape(v)}"' for k, v in label_set.items())
    return f"{NAMES[name]}{'{' + inside + '}' if inside else ''} {value}"


def slow_numbers(page: list[tuple[str, dict[str, str], str]], name: str) -> list[float]:
    latest = {frozenset(ls.items()): float(v) for n, ls, v in page if n == name}
    return list(latest.values())


def slow_count(numbers: list[float]) -> int | None:
    if not numbers or any(math.isnan(n) or math.isinf(n) or n < 0 for n in numbers):
        return None
    return int(sum(numbers))


def slow_total(numbers: list[float]) -> float | None:
    known = numbers and all(math.isfinite(n) and n >= 0 for n in numbers)
    return sum(numbers) if known else None


@given(samples, st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_the_fast_reader_says_what_the_slow_one_says(
    page: list[tuple[str, dict[str, str], str]], line_end: str, noise: bool
) -> None:
    lines = [line(*sample) for sample in page]
    if noise:
        lines = [x for sample in lines for x in ("# HELP " + sample, sample, "other 1")]
    text = "".join(x + line_end for x in lines).encode()
    if all(name == "other" for name, _, _ in page):
        assert detect_engine(text) is None
        return
    usage = slow_numbers(page, "usage")
    usage_known = usage and all(math.isfinite(n) and n >= 0 for n in usage)
    assert parse_metrics(text, VLLM, at_s=1.0) == Load(
        at_s=1.0,
        waiting=slow_count(slow_numbers(page, "waiting")),
        running=slow_count(slow_numbers(page, "running")),
        kv_usage_ratio=min(1.0, max(usage)) if usage_known else None,
        prefill_s_sum=slow_total(slow_numbers(page, "seconds")),
        prefills=slow_count(slow_numbers(page, "prefills")),
    )


@given(st.binary(max_size=300), st.integers(0, len(PAGE)), st.integers(0, 40))
def test_F06_any_bytes_give_a_load_or_a_refusal(noise: bytes, at: int, cut_bytes: int) -> None:
    for page in (noise, PAGE[:at] + noise + PAGE[at + cut_bytes :]):
        for mapping in ENGINES.values():
            try:
                load = parse_metrics(page, mapping, at_s=1.0)
            except ExpositionError:
                continue
            assert load.kv_usage_ratio is None or 0 <= load.kv_usage_ratio <= 1
            assert all(n is None or n >= 0 for n in (load.waiting, load.running))


@given(st.integers(0, len(PAGE)))
def test_F06_a_page_cut_anywhere_never_gives_a_wrong_number(at: int) -> None:
    whole = parse_metrics(PAGE, VLLM, at_s=1.0)
    try:
        cut = parse_metrics(PAGE[:at], VLLM, at_s=1.0)
    except ExpositionError:
        return
    for name in ("waiting", "running", "kv_usage_ratio", "kv_block_tokens", "kv_blocks"):
        assert getattr(cut, name) in (None, getattr(whole, name))
