"""From the file to the plan: defaulting rules, references, what is refused and what is noticed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from epp.config import Plan, effective_yaml, load_config, resolve
from epp.config.parameters import ENGINES
from epp.config.plugins import PARAMETERS
from epp.config.schema import FlowControl, SaturationDetector
from epp.core.decide import PrefixParams
from epp.core.errors import ConfigError
from epp.core.inflight import InflightParams
from epp.core.latency.expected import ExpectedLatency
from epp.core.model import Api
from epp.core.registry import REFERENCE
from epp.core.scorers.scraped import LoadAwareScorer
from epp.wire import exposition

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
DATA = Path(__file__).parent / "data" / "config"
ACCEPTED = sorted((DATA / "accepted").glob("*.yaml"))
REFUSED = sorted((DATA / "refused").glob("*.yaml"))


def plan_of(text: str) -> Plan:
    return resolve(load_config(HEAD + text))


def error_of(text: str) -> ConfigError:
    config = load_config(HEAD + text)
    with pytest.raises(ConfigError) as caught:
        resolve(config)
    return caught.value


def scorers_of(plan: Plan) -> dict[str, float]:
    return {s.name: s.weight for s in plan.profiles[0].scorers}


# Defaults


def test_no_file_gives_the_default_profile() -> None:
    plan = resolve(None)
    assert plan.profiles[0].name == "default"
    assert scorers_of(plan) == {}
    assert plan.profiles[0].cost == ExpectedLatency()
    assert plan.profiles[0].filters == ()
    assert plan.profiles[0].picker == PARAMETERS["max-score-picker"]()
    assert plan.prefix == PrefixParams()
    assert plan.inflight == InflightParams()
    assert plan.scrape is not None
    assert plan.scrape.path == "/metrics"
    assert plan.scrape.interval_s is None
    assert plan.discovery is None
    assert plan.apis == frozenset(Api) - {Api.OTHER}
    assert not plan.served_verifier
    assert plan.notices == ()


def test_a_file_without_scheduling_plugins_gives_the_default_profile_too() -> None:
    assert plan_of("") == resolve(None)
    plan = plan_of("plugins: [{type: destination-endpoint-served-verifier}]")
    assert plan.served_verifier
    assert plan.profiles == resolve(None).profiles


def test_without_profiles_every_scheduling_plugin_is_in_one() -> None:
    plan = resolve(load_config((DATA / "accepted/no-profile.yaml").read_text()))
    profile = plan.profiles[0]
    assert [f.name for f in profile.filters] == ["only-large"]
    assert [(s.name, s.weight, s.scorer) for s in profile.scorers] == [
        ("load-aware-scorer", 1.0, LoadAwareScorer(threshold=64))
    ]
    assert profile.picker == PARAMETERS["weighted-random-picker"](max_num_of_endpoints=2)
    assert plan.prefix is None
    assert plan.notices == ()


def test_a_profile_without_picker_takes_the_one_declared() -> None:
    text = (
        "plugins: [{type: queue-scorer}, {type: random-picker}]\n"
        "schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}]"
    )
    assert type(plan_of(text).profiles[0].picker).__name__ == "RandomPicker"


def test_of_several_declared_pickers_one_must_be_named() -> None:
    error = error_of(
        "plugins: [{type: queue-scorer}, {type: random-picker}, {type: max-score-picker}]\n"
        "schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}]"
    )
    assert "2 are declared (random-picker, max-score-picker): name one" in str(error)
    error = error_of("plugins: [{type: random-picker}, {type: max-score-picker}]")
    assert "write `schedulingProfiles` that names one" in str(error)


def test_a_scorer_without_weight_has_weight_one_and_zero_stays_zero() -> None:
    text = (
        "plugins: [{type: queue-scorer}, {type: load-aware-scorer}]\n"
        "schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer, weight: 0}, "
        "{pluginRef: load-aware-scorer}]}]"
    )
    assert scorers_of(plan_of(text)) == {"queue-scorer": 0.0, "load-aware-scorer": 1.0}


# References


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        (
            "plugins: [{type: queue-scorer}, {type: queue-scorer}]",
            "$.plugins[1].type",
            "two plugins are called `queue-scorer`: give one of them another `name`",
        ),
        (
            "plugins: [{type: queue-scorer, name: a}, {type: random-picker, name: a}]",
            "$.plugins[1].name",
            "two plugins are called `a`",
        ),
        (
            "plugins: [{type: queue-scorer, name: max-score-picker}]",
            "$.plugins[0].name",
            "which is another plugin type",
        ),
        (
            "plugins: [{type: queue-scorrer}]",
            "$.plugins[0].type",
            'unknown plugin type "queue-scorrer"; did you mean `queue-scorer`?',
        ),
        ("plugins: [{type: zzz}]", "$.plugins[0].type", "docs/configuration.md lists the types"),
        (
            "schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}]",
            "$.schedulingProfiles[0].plugins[0].pluginRef",
            "add `- type: queue-scorer` to `plugins`",
        ),
        (
            "plugins: [{type: queue-scorer, name: quick}]\n"
            "schedulingProfiles: [{name: a, plugins: [{pluginRef: quik}]}]",
            "$.schedulingProfiles[0].plugins[0].pluginRef",
            'no plugin is called "quik"; did you mean `quick`?',
        ),
        (
            "schedulingProfiles: [{name: a, plugins: [{pluginRef: session-affinity-filter}]}]",
            "$.schedulingProfiles[0].plugins[0].pluginRef",
            "exists in the reference EPP but is not built here yet",
        ),
        (
            "plugins: [{type: openai-parser}]\n"
            "schedulingProfiles: [{name: a, plugins: [{pluginRef: openai-parser}]}]",
            "$.schedulingProfiles[0].plugins[0].pluginRef",
            "`openai-parser` is a parser, and a cost policy or filter or picker or scorer is "
            "needed here",
        ),
        (
            "plugins: [{type: queue-scorer}]\nschedulingProfiles: "
            "[{name: a, plugins: [{pluginRef: queue-scorer}, {pluginRef: queue-scorer}]}]",
            "$.schedulingProfiles[0].plugins[1]",
            "stands twice",
        ),
        (
            "plugins: [{type: random-picker}, {type: max-score-picker}]\nschedulingProfiles: "
            "[{name: a, plugins: [{pluginRef: random-picker}, {pluginRef: max-score-picker}]}]",
            "$.schedulingProfiles[0]",
            "one picker, not 2 (random-picker, max-score-picker)",
        ),
        (
            "plugins: [{type: single-profile-handler}, {type: single-profile-handler, name: b}]",
            "$.plugins[1]",
            "one profile handler is possible",
        ),
        (
            "plugins: [{type: queue-scorer}]\ndataLayer: {discovery: {pluginRef: queue-scorer}}",
            "$.dataLayer.discovery.pluginRef",
            "a discovery is needed here",
        ),
        (
            "dataLayer: {sources: [{pluginRef: metrics-data-source}]}",
            "$.dataLayer.sources[0].pluginRef",
            "add `- type: metrics-data-source` to `plugins`",
        ),
        (
            "plugins: [{type: metrics-data-source}]\n"
            "dataLayer: {sources: [{pluginRef: metrics-data-source}]}",
            "$.dataLayer.sources[0]",
            "needs one extractor and has 0",
        ),
        (
            "plugins: [{type: metrics-data-source}]\ndataLayer: {sources: [{pluginRef: "
            "metrics-data-source, extractors: [{pluginRef: metrics-data-source}]}]}",
            "$.dataLayer.sources[0].extractors[0].pluginRef",
            "a data extractor is needed here",
        ),
        (
            "requestHandler: {parsers: [{pluginRef: openai}]}",
            "$.requestHandler.parsers[0].pluginRef",
            "no plugin is called",
        ),
        (
            "requestHandler: {parsers: [{pluginRef: vertexai-parser}]}",
            "$.requestHandler.parsers[0].pluginRef",
            "not built here yet",
        ),
        (
            "plugins: [{type: approx-prefix-cache-producer, name: a}, "
            "{type: approx-prefix-cache-producer, name: b}]",
            "$.plugins[1]",
            "one is possible here: remove one",
        ),
        (
            "plugins: [{type: approx-prefix-cache-producer, name: a}, {type: prefix-cache-scorer, "
            "parameters: {prefixMatchInfoProducerName: b}}]",
            "$.plugins[1].parameters.prefixMatchInfoProducerName",
            'no `approx-prefix-cache-producer` is called "b": write `a` or remove the key',
        ),
        (
            "plugins: [{type: token-load-scorer, parameters: {inFlightLoadProducerName: b}}]",
            "$.plugins[0].parameters.inFlightLoadProducerName",
            "write `inflight-load-producer` or remove the key",
        ),
    ],
)
def test_what_refers_to_nothing_or_contradicts_itself_is_refused(
    text: str, path: str, words: str
) -> None:
    error = error_of(text)
    assert error.path == path
    assert words in str(error)


# Parameters


@pytest.mark.parametrize(
    ("plugin", "path", "words"),
    [
        ("{type: load-aware-scorer, parameters: {threshold: 0}}", ".threshold", ">= 1, got 0"),
        ("{type: load-aware-scorer, parameters: {treshold: 1}}", ".treshold", "mean `threshold`?"),
        (
            "{type: max-score-picker, parameters: {maxNumOfEndpoints: '1'}}",
            ".maxNumOfEndpoints",
            "",
        ),
        (
            "{type: max-score-picker, parameters: {maxNumOfEndpoints: }}",
            ".maxNumOfEndpoints",
            "null",
        ),
        (
            "{type: label-selector-filter, parameters: {matchLabels: {a: 1}}}",
            ".matchLabels",
            "text",
        ),
        ("{type: label-selector-filter, parameters: {matchLabels: {a: }}}", ".matchLabels", "null"),
        (
            "{type: label-selector-filter, parameters: {matchExpressions: "
            "[{key: a, operator: Inn, values: [b]}]}}",
            ".matchExpressions[0].operator",
            "did you mean `In`?",
        ),
        ("{type: single-profile-handler, parameters: {a: 1}}", ".a", "no key is known here"),
        ("{type: file-discovery}", "", "the key `path` is missing"),
        ("{type: file-discovery, parameters: {path: a, watchFile: 'no'}}", ".watchFile", "boolean"),
        ("{type: metrics-data-source, parameters: {scheme: ftp}}", ".scheme", "one of http, https"),
        ("{type: metrics-data-source, parameters: {port: 65536}}", ".port", "<= 65535"),
        ("{type: metrics-data-source, parameters: {path: metrics}}", "", "must begin with `/`"),
        ("{type: metrics-data-source, parameters: {interval: 1}}", ".interval", "with its unit"),
        ("{type: metrics-data-source, parameters: {clientCertPath: a}}", "", "go together"),
        (
            "{type: core-metrics-extractor, parameters: {engineConfigs: "
            "[{name: a, kvUsageSpec: 'b{'}]}}",
            ".engineConfigs[0].kvUsageSpec",
            "expected a metric",
        ),
        (
            "{type: core-metrics-extractor, parameters: {engineConfigs: [{name: a}]}}",
            ".engineConfigs[0]",
            "names no metric",
        ),
        ("{type: core-metrics-extractor, parameters: {defaultEngine: tgi}}", "", "no engine known"),
        (
            "{type: approx-prefix-cache-producer, parameters: {blockSizeTokens: 0}}",
            ".blockSize",
            "",
        ),
        ("{type: approx-prefix-cache-producer, parameters: {blockSize: -1}}", ".blockSize", ">= 1"),
        (
            "{type: approx-prefix-cache-producer, parameters: {blockSize: 1, blockSizeTokens: 2}}",
            "",
            "keep only the new",
        ),
        ("{type: approx-prefix-cache-producer, parameters: {indexBlocksMax: 0}}", ".index", ">= 1"),
        ("{type: inflight-load-producer, parameters: {outputRatio: -1}}", ".outputRatio", ">= 0"),
        ("{type: token-producer, parameters: {vllm: {}}}", ".vllm", "not built here yet"),
        ("{type: token-producer, parameters: {modelName: m}}", ".modelName", "not built here yet"),
    ],
)
def test_N02_a_mistake_in_parameters_is_refused_with_the_plugins_path(
    plugin: str, path: str, words: str
) -> None:
    error = error_of(f"plugins:\n- {{type: queue-scorer}}\n- {plugin}")
    assert error.path.startswith(f"$.plugins[1].parameters{path}")
    assert words in str(error)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("autoTune: false", {"auto_tune": False}),
        ("blockSizeTokens: 16", {"block_tokens": 64}),
        ("blockSizeTokens: 128", {"block_tokens": 128}),
        ("blockSize: 128", {"block_tokens": 128}),
        ("maxPrefixTokensToMatch: 1000", {"tokens_max": 1000}),
        ("maxPrefixBlocksToMatch: 10", {"tokens_max": 131_072}),
        ("{maxPrefixTokensToMatch: 0, maxPrefixBlocksToMatch: 10}", {"tokens_max": 640}),
        (
            "{maxPrefixTokensToMatch: 0, maxPrefixBlocksToMatch: 10, blockSizeTokens: 100}",
            {"tokens_max": 1000, "block_tokens": 100},
        ),
        ("{maxPrefixTokensToMatch: 0, maxPrefixBlocksToMatch: 0}", {"tokens_max": 1 << 31}),
        ("lruCapacityPerServer: 7", {"endpoint_blocks_max": 7}),
        ("indexBlocksMax: 7", {"blocks_max_total": 7}),
    ],
)
def test_G10_every_key_of_the_prefix_producer_reaches_the_plan(
    parameters: str, expected: dict[str, object]
) -> None:
    parameters = parameters if parameters.startswith("{") else f"{{{parameters}}}"
    plan = plan_of(f"plugins: [{{type: approx-prefix-cache-producer, parameters: {parameters}}}]")
    assert plan.prefix == msgspec.structs.replace(PrefixParams(), **expected)


def test_G10_every_key_of_the_file_reaches_the_plan() -> None:
    plan = resolve(load_config((DATA / "accepted/everything.yaml").read_text()))
    profile = plan.profiles[0]
    assert profile.name == "all"
    assert scorers_of(plan) == {"prefix-cache-scorer": 1.5, "busy": 1.0}
    assert profile.scorers[1].scorer == PARAMETERS["active-request-scorer"](
        idle_threshold=1, max_busy_score=0.5, in_flight_load_producer_name="inflight-load-producer"
    )
    assert profile.picker == PARAMETERS["max-score-picker"](max_num_of_endpoints=3)
    assert plan.prefix == PrefixParams(
        auto_tune=False,
        block_tokens=256,
        tokens_max=25_600,
        endpoint_blocks_max=1000,
        blocks_max_total=5000,
    )
    assert plan.inflight == InflightParams(
        add_estimated_output_tokens=True, output_ratio=2.0, max_estimated_output_tokens=512
    )
    assert plan.scrape is not None
    assert msgspec.structs.asdict(plan.scrape) == {
        "scheme": "https",
        "path": "/stats/prometheus",
        "port": 9400,
        "insecure_skip_verify": False,
        "ca_cert_path": "/certs/ca.pem",
        "client_cert_path": "/certs/tls.crt",
        "client_key_path": "/certs/tls.key",
        "interval_s": 1.0,
    }
    engine = plan.metrics.engine_configs[0]
    assert (plan.metrics.default_engine, plan.metrics.engine_label_key) == (
        "house",
        "example.com/engine",
    )
    assert engine.queued_requests_spec == "house_requests{state=queued}"
    assert engine.cache_num_blocks_label_name == "blocks"
    assert engine.custom_metrics[0].metric_spec == "house_temperature"
    assert plan.discovery is not None
    assert (plan.discovery.path, plan.discovery.watch_file) == ("/etc/epp/endpoints.yaml", True)
    assert plan.apis == {Api.MESSAGES, Api.GENERATE}
    assert plan.served_verifier
    assert msgspec.structs.asdict(plan.limits) == {
        "body_bytes_max": 1 << 20,
        "bodies_bytes_max": 3 << 30,
        "read_bytes_max": 4 << 20,
        "decoded_bytes_max": 2 << 20,
        "streams_max": 100,
        "chunk_bytes": 4096,
        "label_values_max": 10,
        "scrape_concurrency_max": 8,
        "scrape_timeout_s": 0.25,
        "stale_after_s": 5.0,
    }


def test_the_engines_known_here_are_those_the_reader_knows() -> None:
    assert set(ENGINES) == set(exposition.ENGINES)


# Producers, scraping, parsers


def test_prompts_are_hashed_only_when_a_scorer_of_the_profile_asks() -> None:
    assert plan_of("plugins: [{type: queue-scorer}]").prefix is None
    assert plan_of("plugins: [{type: no-hit-lru-scorer}]").prefix == PrefixParams()
    both = "plugins: [{type: token-load-scorer}, {type: approx-prefix-cache-producer}]"
    assert plan_of(both).prefix == PrefixParams()
    unused = (
        "plugins: [{type: queue-scorer}, {type: prefix-cache-scorer}]\n"
        "schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}]"
    )
    assert plan_of(unused).prefix is None


def test_nothing_is_scraped_only_when_that_is_asked_for() -> None:
    assert plan_of("dataLayer: {injectDefaults: true}").scrape is not None
    plan = plan_of("dataLayer: {injectDefaults: false}")
    assert plan.scrape is None
    assert "nothing is scraped" in plan.notices[0]


def test_a_declared_source_is_scraped_without_being_listed() -> None:
    plan = plan_of("plugins: [{type: metrics-data-source, name: m, parameters: {port: 9}}]")
    assert plan.scrape is not None
    assert plan.scrape.port == 9


@pytest.mark.parametrize(
    ("interval", "seconds", "notices"), [("1ms", 0.05, 1), ("0s", 0.05, 1), ("50ms", 0.05, 0)]
)
def test_F13_a_too_small_interval_is_raised_with_a_notice(
    interval: str, seconds: float, notices: int
) -> None:
    plan = plan_of(
        f"plugins: [{{type: metrics-data-source, parameters: {{interval: {interval}}}}}]"
    )
    assert plan.scrape is not None
    assert plan.scrape.interval_s == seconds
    assert len(plan.notices) == notices
    assert all("`interval` is raised from" in n and "to 50ms" in n for n in plan.notices)


def test_F11_white_space_around_the_path_is_cut() -> None:
    plan = plan_of("plugins: [{type: metrics-data-source, parameters: {path: ' /m '}}]")
    assert plan.scrape is not None
    assert plan.scrape.path == "/m"


def test_the_list_of_parsers_says_which_apis_are_read() -> None:
    plan = plan_of("requestHandler: {parsers: [{pluginRef: anthropic-parser}]}")
    assert plan.apis == {Api.MESSAGES}
    assert plan_of("requestHandler: {parsers: []}").apis == resolve(None).apis
    plan = plan_of(
        "requestHandler: {parsers: [{pluginRef: passthrough-parser}, {pluginRef: openai-parser}]}"
    )
    assert plan.apis == frozenset()
    assert "stands after `passthrough-parser`" in plan.notices[0]


def test_the_old_parser_key_counts_only_without_the_new() -> None:
    plan = plan_of("parser: {pluginRef: anthropic-parser}")
    assert plan.apis == {Api.MESSAGES}
    plan = plan_of(
        "parser: {pluginRef: anthropic-parser}\n"
        "requestHandler: {parsers: [{pluginRef: vllmhttp-parser}]}"
    )
    assert plan.apis == {Api.GENERATE}
    assert "`parser` is deprecated" in plan.notices[0]


# Gates and flow control


@pytest.mark.parametrize(
    ("gates", "words"),
    [
        ("[flowcontrol]", "did you mean `flowControl`?"),
        ("[x]", "known are flowControl, haPopulateNonLeaderDatastore"),
        ("['flowControl=no']", "write `flowControl=true` or `flowControl=false`"),
        ("['flowControl=']", "write `flowControl=true`"),
        ("[flowControl]", "flow control is not built here yet"),
        ("['flowControl=true']", "flow control is not built here yet"),
        (
            "[haPopulateNonLeaderDatastore, 'haPopulateNonLeaderDatastore=false']",
            "both on and off",
        ),
    ],
)
def test_feature_gates_are_checked(gates: str, words: str) -> None:
    error = error_of(f"featureGates: {gates}")
    assert error.path.startswith("$.featureGates[")
    assert words in str(error)


def test_gates_that_change_nothing_are_accepted() -> None:
    for gates in ("['flowControl=false']", "[haPopulateNonLeaderDatastore]", "[]"):
        assert plan_of(f"featureGates: {gates}").notices == ()


def test_a_flow_control_section_is_noticed_and_checked_all_the_same() -> None:
    plan = plan_of("flowControl: {maxRequests: 5k, defaultRequestTTL: 0s}")
    assert len(plan.notices) == 1
    assert "has no effect: the feature gate `flowControl` is off" in plan.notices[0]


@pytest.mark.parametrize(
    ("section", "path", "words"),
    [
        (
            "priorityBands: [{priority: 1}, {priority: 1}]",
            ".priorityBands[1].priority",
            "two bands have priority 1",
        ),
        (
            "priorityBands: [{orderingPolicyRef: edf-ordering-policy}]",
            ".priorityBands[0].orderingPolicyRef",
            "not built here yet",
        ),
        (
            "defaultPriorityBand: {fairnessPolicyRef: mine}",
            ".defaultPriorityBand.fairnessPolicyRef",
            'no plugin is called "mine": write `global-strict-fairness-policy`',
        ),
        ("usageLimitPolicyPluginRef: x", ".usageLimitPolicyPluginRef", "no plugin is called"),
        (
            "saturationDetector: {pluginRef: concurrency-detector}",
            ".saturationDetector.pluginRef",
            "not built here yet",
        ),
    ],
)
def test_references_in_flow_control_are_followed(section: str, path: str, words: str) -> None:
    error = error_of(f"flowControl: {{{section}}}")
    assert error.path == f"$.flowControl{path}"
    assert words in str(error)


# Notices


@pytest.mark.parametrize(
    ("text", "notice"),
    [
        (
            "plugins: [{type: tokenizer}]",
            "plugin type `tokenizer` is deprecated, use `token-producer`: Change the type. - at "
            "`$.plugins[0].type`",
        ),
        (
            "plugins: [{type: approx-prefix-cache-producer, parameters: {blockSize: 64}}]",
            "`blockSize` is deprecated, use `blockSizeTokens` - at "
            "`$.plugins[0].parameters.blockSize`",
        ),
        (
            "plugins: [{type: file-discovery, parameters: {path: a}}]",
            "`file-discovery` is declared and never used: remove it or refer to it - at "
            "`$.plugins[0]`",
        ),
        (
            "plugins: [{type: metrics-data-source, parameters: {caCertPath: a}}]",
            "`caCertPath` has no effect without `scheme: https` and `insecureSkipVerify: false` - "
            "at `$.plugins[0].parameters.caCertPath`",
        ),
        (
            "plugins: [{type: random-picker}, {type: queue-scorer}]\nschedulingProfiles: [{name: a,"
            " plugins: [{pluginRef: queue-scorer}, {pluginRef: random-picker, weight: 2}]}]",
            "`weight` has no effect: `random-picker` does not score - at "
            "`$.schedulingProfiles[0].plugins[1].weight`",
        ),
        (
            "plugins: [{type: max-score-picker}]",
            "profile `default` has no scorer: endpoints are picked by chance",
        ),
    ],
)
def test_what_is_deprecated_or_without_effect_is_noticed(text: str, notice: str) -> None:
    assert plan_of(text).notices == (notice,)


def test_old_names_are_read_each_with_a_notice() -> None:
    plan = resolve(load_config((DATA / "accepted/old-names.yaml").read_text()))
    assert plan.prefix is not None
    assert plan.prefix.block_tokens == 128
    assert len(plan.notices) == 8
    for word in (
        "`tokenizer`",
        "`by-label-selector`",
        "`blockSize`",
        "`weight`",
        "`saturationDetector`",
        "`parser`",
        "flow control",
        "`inference.networking.x-k8s.io/v1alpha1`",
    ):
        assert sum(notice.startswith(word) or word in notice for notice in plan.notices) >= 1
    canonical = resolve(load_config(effective_yaml(plan)))
    assert [n for n in canonical.notices if "deprecated" in n] == []
    assert canonical.config.flow_control == FlowControl(
        saturation_detector=SaturationDetector(plugin_ref="utilization-detector")
    )


# Files


@pytest.mark.parametrize("file", ACCEPTED, ids=lambda f: f.stem)
def test_configurations_of_the_usual_kinds_resolve(file: Path) -> None:
    plan = resolve(load_config(file.read_text()))
    again = resolve(load_config(effective_yaml(plan)))
    assert msgspec.structs.replace(again, notices=()) == msgspec.structs.replace(plan, notices=())
    assert effective_yaml(again) == effective_yaml(plan)


@pytest.mark.parametrize("file", REFUSED, ids=lambda f: f.stem)
def test_what_only_the_reference_has_is_refused_by_name(file: Path) -> None:
    text = file.read_text()
    words, _, path = text.splitlines()[0].removeprefix("# refused: ").rpartition(" at ")
    with pytest.raises(ConfigError, match="not built here yet") as caught:
        resolve(load_config(text))
    assert words in str(caught.value)
    assert caught.value.path == path


@pytest.mark.parametrize("type_", sorted(REFERENCE))
def test_every_type_of_the_reference_is_built_or_refused_by_name(type_: str) -> None:
    config = load_config(HEAD + f"plugins: [{{type: {type_}}}]")
    try:
        resolve(config)
    except ConfigError as error:
        needs_a_key = type_ in PARAMETERS and "is missing" in str(error)
        assert needs_a_key or f"`{type_}`" in str(error)  # noqa: PT017


def test_the_effective_configuration_of_no_file_is_complete() -> None:
    text = effective_yaml(resolve(None))
    for line in (
        "streamsMax: 20000",
        "- pluginRef: expected-latency",
        "lruCapacityPerServer: 31250",
        "scheme: http",
        "- pluginRef: metrics-data-source",
        "- pluginRef: openai-parser",
    ):
        assert line in text
    assert resolve(load_config(text)) == resolve(None)
