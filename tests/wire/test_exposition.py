"""Metrics pages, recorded and made up, to loads."""

import contextlib
import time
from pathlib import Path

import msgspec
import pytest

from epp.core.errors import ConfigError
from epp.core.model import Load, Lora
from epp.wire.exposition import (
    ENGINES,
    SAMPLES_MAX,
    EngineMapping,
    ExpositionError,
    MetricSpec,
    detect_engine,
    parse_metrics,
)

PAGES = Path(__file__).parent / "data" / "metrics"
VLLM = ENGINES["vllm"]
RUNNING = "vllm:num_requests_running"
PREFILL_TOTALS = {
    "idle": (0.0, 0.0, 0),
    "after": (0.3492773670002407, 939.0, 30),
    "under_load": (0.5465929990000404, 1283.0, 37),
    "overload": (1.3365615009993235, 2553.0, 58),
    "preempted": (0.5278368829999636, 1000.0, 5),
    "dp2": (0.07563445199957641 + 0.13815106100037156, 816.0, 11),
    "embed": (0.13130570500015892, 11.0, 3),
}
"""Seconds, tokens and number of the prefills on each recorded page."""


def read(page: str, engine: str = "vllm") -> Load:
    return parse_metrics(page.encode(), ENGINES[engine], at_s=7.0)


def custom(page: str, spec: str) -> float | None:
    mapping = EngineMapping(name="own", custom={"key": MetricSpec.parse(spec)})
    return parse_metrics(page.encode(), mapping, at_s=7.0).attributes.get("key")


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("idle", Load(7.0, 0, 0, 0.0, 32, 256)),
        ("after", Load(7.0, 0, 0, 0.0, 32, 256, Lora(max_adapters=1))),
        ("under_load", Load(7.0, 8, 2, 0.06666666666666665, 32, 256, Lora(max_adapters=1))),
        (
            "overload",
            Load(
                *(7.0, 2, 1, 0.019607843137254943, 32, 256),
                Lora(frozenset({"lora-b"}), frozenset({"lora-b"}), 1),
            ),
        ),
        ("preempted", Load(7.0, 0, 3, 0.5215686274509803, 32, 256)),
        ("dp2", Load(7.0, 0, 0, 0.0, 32, 16384)),
        ("embed", Load(7.0, 0, 0, 0.0, 32, 4096)),
    ],
)
def test_a_recorded_vllm_page_gives_its_load(name: str, load: Load) -> None:
    page = (PAGES / f"{name}.txt").read_bytes()
    seconds, tokens, prefills = PREFILL_TOTALS[name]
    assert parse_metrics(page, VLLM, at_s=7.0) == msgspec.structs.replace(
        load, prefill_s_sum=seconds, prefill_tokens_sum=tokens, prefills=prefills
    )
    assert detect_engine(page) == "vllm"


@pytest.mark.parametrize(
    ("page", "usage_ratio"),
    [
        ("vllm:kv_cache_usage_perc 0.25\n", 0.25),
        ("vllm:gpu_cache_usage_perc 0.5\n", 0.5),
        ("vllm:gpu_cache_usage_perc 0.5\nvllm:kv_cache_usage_perc 0.25\n", 0.25),
        ("vllm:gpu_cache_usage_perc 0.5\nvllm:kv_cache_usage_perc NaN\n", None),
        (f"{RUNNING} 1\n", None),
    ],
)
def test_F01_the_newer_name_wins_and_none_at_all_is_unknown(
    page: str, usage_ratio: float | None
) -> None:
    assert read(page).kv_usage_ratio == usage_ratio


def test_F02_a_page_without_optional_families_has_no_lora_and_no_error() -> None:
    assert read(f"{RUNNING} 3\n") == Load(at_s=7.0, running=3)


def test_F03_requests_of_several_ranks_add_up_and_the_fullest_cache_counts() -> None:
    page = f"""\
{RUNNING}{{engine="0"}} 9
{RUNNING}{{engine="1"}} 1
vllm:num_requests_waiting{{engine="1"}} 4
vllm:num_requests_waiting{{engine="0"}} 3
vllm:kv_cache_usage_perc{{engine="0"}} 0.9
vllm:kv_cache_usage_perc{{engine="1"}} 0.1
vllm:cache_config_info{{engine="0",block_size="16",num_gpu_blocks="100"}} 1
vllm:cache_config_info{{engine="1",block_size="16",num_gpu_blocks="50"}} 1
"""
    assert read(page) == Load(7.0, 7, 10, 0.9, 16, 150)


def test_ranks_that_disagree_about_the_block_size_report_none() -> None:
    info = 'vllm:cache_config_info{{engine="{}",block_size="{}",num_gpu_blocks="{}"}} 1\n'
    page = info.format(0, 16, 8) + info.format(1, 32, 8)
    assert (read(page).kv_block_tokens, read(page).kv_blocks) == (None, 16)


@pytest.mark.parametrize("tokens", ["None", "0", "-16"])
def test_a_block_size_that_is_none_is_not_reported(tokens: str) -> None:
    page = f'vllm:cache_config_info{{block_size="{tokens}",num_gpu_blocks="9"}} 1\n'
    assert (read(page).kv_block_tokens, read(page).kv_blocks) == (None, 9)


@pytest.mark.parametrize("blocks", ["None", "", "-1", "0", "1.5", "9" * 400, "१"])
def test_a_number_of_blocks_that_is_none_is_not_reported(blocks: str) -> None:
    page = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}"}} 1\n'
    assert (read(page).kv_block_tokens, read(page).kv_blocks) == (16, None)


@pytest.mark.parametrize("value", ["NaN", "nan", "+Inf", "-Inf", "-1", "1e400"])
def test_F05_a_value_that_is_no_count_or_ratio_is_not_reported(value: str) -> None:
    page = f"{RUNNING} {value}\nvllm:kv_cache_usage_perc {value}\nvllm:num_requests_waiting 2\n"
    assert read(page) == Load(at_s=7.0, waiting=2)


def test_F05_a_count_too_large_to_be_exact_is_not_reported() -> None:
    assert read(f"{RUNNING} {2**53}\n").running is None
    assert read(f"{RUNNING} {2**53 - 1}\n").running == 2**53 - 1


def test_F05_one_unknown_rank_makes_the_sum_and_the_maximum_unknown() -> None:
    page = f'{RUNNING}{{e="0"}} 9\n{RUNNING}{{e="1"}} NaN\n'
    usage = page.replace(RUNNING, "vllm:kv_cache_usage_perc").replace("9", "0.9")
    assert read(page).running is None
    assert read(usage).kv_usage_ratio is None


def totals(page: str) -> tuple[float | None, float | None, int | None]:
    load = read(page)
    return load.prefill_s_sum, load.prefill_tokens_sum, load.prefills


def test_prefill_totals_are_read_apart_and_buckets_are_not() -> None:
    seconds, tokens = "vllm:request_prefill_time_seconds", "vllm:request_prefill_kv_computed_tokens"
    page = f"""\
{seconds}_bucket{{le="0.3"}} 7
{seconds}_count{{e="0"}} 3
{seconds}_count{{e="1"}} 4
{seconds}_sum{{e="0"}} 0.5
{seconds}_sum{{e="1"}} 0.25
{seconds}_created 1.7e9
{tokens}_bucket{{le="1.0"}} 7
{tokens}_count 7
{tokens}_created 1.7e9
"""
    assert totals(page) == (0.75, None, 7)
    assert totals(f"{page}{tokens}_sum 900.5\n") == (0.75, 900.5, 7)
    assert totals(f"{RUNNING} 1\n") == (None, None, None)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-0.5", "1e300"])
def test_F05_a_total_of_a_rank_that_is_none_makes_the_sum_unknown(value: str) -> None:
    family = "vllm:request_prefill_time_seconds_sum"
    assert totals(f"{RUNNING} 1\n{family} {value}\n") == (None, None, None)
    assert totals(f'{family}{{e="0"}} 1.5\n{family}{{e="1"}} {value}\n') == (None, None, None)


def test_names_that_begin_alike_are_told_apart() -> None:
    names = ("a", "ab", "abc", "abd", "b", "a:c")
    specs = {name: MetricSpec(name) for name in names}
    mapping = EngineMapping(name="own", custom=specs)
    page = "".join(f"{name} {at}\n" for at, name in enumerate((*names, "abcd", "aa", "ba", "")))
    load = parse_metrics(page.encode(), mapping, at_s=7.0)
    assert load.attributes == {name: at for at, name in enumerate(names)}


def test_F05_a_usage_above_one_is_one() -> None:
    assert read("vllm:kv_cache_usage_perc 1.7\n").kv_usage_ratio == 1.0


@pytest.mark.parametrize(
    "page",
    [
        "",
        "\n",
        "<html><body>404 not found vllm:num_requests_running 1</body></html>\n",
        "python_info 1\n# HELP vllm:num_requests_running Requests.\n",
        "sglang:num_running_reqs 1\n",
        "vllm:num_requests_running_by_reason 1\n",
        f"{RUNNING} 1",
        f"{RUNNING} 1\nvllm:num_requests_wai",
        f"{RUNNING} \n",
        f"{RUNNING} one\n",
        f"{RUNNING} 1{{}}\n",
        f'{RUNNING} 1"2"\n',
        f"{RUNNING} 1_000\n",
        f'{RUNNING}{{engine="0" 1\n',
        f'{RUNNING}{{engine="0}} 1\n',
        f'{RUNNING}{{engine="0\\"}} 1\n',
        f'{RUNNING}{{engine="0\n"}} 1\n',
        "\x1f\x8b\x08\x00\n",
    ],
)
def test_F06_a_page_that_is_none_or_is_cut_off_is_refused(page: str) -> None:
    with pytest.raises(ExpositionError):
        read(page)


def test_F06_a_malformed_line_elsewhere_is_none_of_our_business() -> None:
    assert read(f'python_info{{ 1\n{RUNNING} 1\n}}"\n').running == 1


@pytest.mark.parametrize(
    "page",
    [
        f'# TYPE {RUNNING} gauge\n{RUNNING}{{engine="0"}} 5.0 1795957543\n# EOF\n',
        f'{RUNNING}{{engine="0"}} 5.0 1795957543.125\n# EOF',
        f'{RUNNING}{{engine="0"}} 5 # {{trace_id="a b"}} 0.67 1795957543.1\n',
        f'{RUNNING}{{engine="0"}} 5\r\n',
        f'{RUNNING} {{ engine = "0" , }}\t5  \n',
        f'{RUNNING}{{a="}} 9\\n",b="\\"{{",c="\\\\"}} 5e0\n',
        f"{RUNNING} 5\nother 1\n{RUNNING}_by_reason 7\n",
        f'{RUNNING}{{a="1",b="2"}} 4\nother 1\n{RUNNING}{{b="2",a="1"}} 5\n',
        f'{RUNNING}{{a="1"}} 2\nother 1\n{RUNNING}{{a="2"}} 3\n',
        f'{RUNNING}{{a="ä€"}} 5\n',
    ],
)
def test_F06_openmetrics_crlf_escapes_and_split_families_are_understood(page: str) -> None:
    assert read(page).running == 5


def test_a_page_of_samples_without_end_is_refused() -> None:
    line = RUNNING + '{{rank="{}"}} 1\n'
    page = "".join(map(line.format, range(SAMPLES_MAX)))
    assert read(page).running == SAMPLES_MAX
    with pytest.raises(ExpositionError, match="samples"):
        read(page + line.format("x"))


def test_a_hostile_line_is_read_in_linear_time() -> None:
    for rest in ('{a="' + '\\"' * 500_000, "{" + 'a="b",' * 200_000, "{" + "a" * 1_000_000):
        with pytest.raises(ExpositionError):
            read(f"{RUNNING}{rest}\n")


@pytest.mark.parametrize(
    "rest",
    [
        " " * 60_000,
        "\t" * 30_000 + " " * 30_000 + "x x",
        "{" + "a" * 60_000 + "} 1",
        "{" + "a_" * 20_000 + "=" + "} 1",
        "{a" + " " * 60_000 + "} 1",
        '{a="' + '\\"a="' * 9_000 + "} 1",
    ],
)
def test_F06_no_line_an_engine_can_write_stalls_the_loop(rest: str) -> None:
    started_s = time.process_time()
    with contextlib.suppress(ExpositionError):
        read(f"{RUNNING}{rest}\n")
    assert time.process_time() - started_s < 0.5, "it takes half a minute if a pattern backtracks"


def test_F06_the_text_of_all_samples_is_bounded() -> None:
    label = RUNNING + '{a="%s",rank="%d"} 1\n'
    assert read("".join(label % ("x" * 60_000, n) for n in range(17))).running == 17
    with pytest.raises(ExpositionError, match="too much text"):
        read("".join(label % ("x" * 60_000, n) for n in range(18)))
    with pytest.raises(ExpositionError, match="too much text"):
        read(label % ("x" * 66_000, 1))


@pytest.mark.parametrize(
    ("engine", "page", "load"),
    [
        (
            "sglang",
            'sglang:num_queue_reqs{model_name="m"} 4\nsglang:num_running_reqs{model_name="m"} 2\n'
            'sglang:token_usage{model_name="m"} 0.5\n'
            'sglang:cache_config_info{page_size="64",num_pages="1000"} 1\n',
            Load(7.0, 4, 2, 0.5, 64, 1000),
        ),
        (
            "trtllm-serve",
            "trtllm_num_requests_waiting 4\ntrtllm_num_requests_running 2\n"
            "trtllm_kv_cache_utilization 0.5\ntrtllm_kv_cache_tokens_per_block 32\n"
            "trtllm_kv_cache_max_blocks 1000\n",
            Load(7.0, 4, 2, 0.5, 32, 1000),
        ),
        (
            "triton-tensorrt-llm",
            'nv_trt_llm_request_metrics{model="m",request_type="waiting",version="1"} 4\n'
            'nv_trt_llm_request_metrics{model="m",request_type="scheduled",version="1"} 2\n'
            'nv_trt_llm_request_metrics{model="m",request_type="max",version="1"} 512\n'
            'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="m"} 0.5\n'
            'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="m"} 64\n'
            'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="m"} 1000\n'
            'nv_inference_pending_request_count{model="m"} 99\n',
            Load(7.0, 4, 2, 0.5, 64, 1000),
        ),
        (
            "triton",
            'nv_inference_pending_request_count{model="a"} 3\n'
            'nv_inference_pending_request_count{model="b"} 1\n'
            'nv_inference_exec_count{model="a"} 2\n',
            Load(7.0, 4, 2),
        ),
    ],
)
def test_F15_each_engine_is_detected_and_read_by_its_own_names(
    engine: str, page: str, load: Load
) -> None:
    assert detect_engine(page.encode()) == engine
    assert read(page, engine) == load


def test_F15_a_page_of_no_known_engine_is_not_guessed() -> None:
    assert detect_engine(b"python_info 1\n") is None


def lora(running: str, waiting: str, at_s: float, max_lora: str = "2") -> str:
    return (
        f'vllm:lora_requests_info{{max_lora="{max_lora}",running_lora_adapters="{running}",'
        f'waiting_lora_adapters="{waiting}"}} {at_s}\n'
    )


def test_I01_the_newest_lora_series_wins_wherever_it_stands() -> None:
    page = lora("b", "", 2e9) + lora("c", "d", 3e9) + lora("a", "", 1e9)
    assert read(page).lora == Lora(frozenset("c"), frozenset("d"), 2)


def test_I01_lora_series_of_the_same_time_are_united() -> None:
    page = lora("a", "x", 2e9) + lora("b", "y", 2e9, "4") + lora("old", "", 1e9)
    assert read(page).lora == Lora(frozenset("ab"), frozenset("xy"), 4)


def test_I01_without_a_usable_lora_series_there_is_none() -> None:
    assert read(f"{RUNNING} 1\n# TYPE vllm:lora_requests_info gauge\n").lora is None
    assert read(lora("a", "", float("nan"))).lora is None


@pytest.mark.parametrize(
    ("csv", "names"),
    [("", ""), (" , ,", ""), (" a , b", "ab"), ("a,,b,a", "ab")],
)
def test_I03_adapter_lists_are_trimmed_and_blanks_dropped(csv: str, names: str) -> None:
    assert read(lora(csv, csv, 1e9)).lora == Lora(frozenset(names), frozenset(names), 2)


def test_I03_an_adapter_may_have_blanks_and_quotes_in_its_name() -> None:
    assert read(lora(' my \\"lora\\" v2 ,x', "", 1e9)).lora == Lora(
        frozenset({'my "lora" v2', "x"}), frozenset(), 2
    )


@pytest.mark.parametrize("max_lora", ["", "0", "None", "-3", "x"])
def test_I03_a_number_of_slots_that_is_none_is_not_reported(max_lora: str) -> None:
    assert read(lora("a", "", 1e9, max_lora)).lora == Lora(frozenset("a"))
    other = 'vllm:lora_requests_info{running_lora_adapters="a"} 1\n'
    assert read(other).lora == Lora(frozenset("a"))


def test_F14_a_counter_is_found_by_its_family_and_by_its_sample_name() -> None:
    page = "hits_total 5\nhits_created 9\nother 1\n"
    assert custom(page, "hits") == 5
    assert custom(page, "hits_total") == 5
    assert custom("hits 4\n" + page, "hits") == 4


def test_custom_metrics_add_up_over_the_series_their_labels_choose() -> None:
    page = 'util{gpu="0"} -0.5\nutil{gpu="1"} 2\nutil{gpu="1",x="y"} 3\n'
    assert custom(page, "util") == 4.5
    assert custom(page, "util{gpu=1}") == 5
    assert custom(page, "util{gpu=1,x=y}") == 3
    assert custom(page, "util{gpu=7}") is None
    assert custom("util NaN\n", "util") is None
    assert custom('util{gpu="0"} 4\n', "util{gpu=1}") is None


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("a:b_c", MetricSpec("a:b_c")),
        (" a { x = 1 , y=b c } ", MetricSpec("a", (("x", "1"), ("y", "b c")))),
        ('a{x="1,2}",}', MetricSpec("a", (("x", "1,2}"),))),
        ("a{}", MetricSpec("a")),
        ("a{x=}", MetricSpec("a", (("x", ""),))),
    ],
)
def test_a_metric_spec_is_a_name_and_labels(text: str, spec: MetricSpec) -> None:
    assert MetricSpec.parse(text) == spec


@pytest.mark.parametrize("text", ["", "1a", "a b", "a{", "a{x}", "a{x=1", "a{x=1}y", 'a{x="1}'])
def test_N02_a_malformed_metric_spec_is_refused_with_its_key(text: str) -> None:
    with pytest.raises(ConfigError, match=r"name\{label=value.*`\$\.plugins\[0\]`"):
        MetricSpec.parse(text, path="$.plugins[0]")


def test_a_mapping_without_metrics_is_refused() -> None:
    with pytest.raises(ConfigError, match="'own' names no metric"):
        EngineMapping(name="own")


def test_ranks_whose_counts_add_up_to_no_exact_count_are_not_reported() -> None:
    ranks = "".join(f'{RUNNING}{{rank="{n}"}} {2**53 - 1}\n' for n in range(2000))
    assert read(ranks).running is None
