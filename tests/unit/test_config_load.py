"""The file's schema: strict, with the path and the remedy in every error."""

from __future__ import annotations

import pytest

from epp.config import load_config
from epp.core.errors import ConfigError

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"


def error_of(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(text)
    return caught.value


def test_the_two_head_lines_are_enough() -> None:
    config = load_config(HEAD)
    assert config.plugins == ()
    assert config.limits.body_bytes_max == 64 << 20
    assert config.limits.scrape_timeout_s == 1.0
    assert config.limits.stale_after_s is None


def test_json_is_read_too() -> None:
    config = load_config(
        '{"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig",'
        ' "plugins": [{"type": "queue-scorer"}]}'
    )
    assert config.plugins[0].type == "queue-scorer"


@pytest.mark.parametrize("text", ["", "# nothing", "- a", "text", "null", "7"])
def test_a_file_that_is_no_mapping_says_how_to_begin(text: str) -> None:
    assert "begin with `apiVersion: llm-d.ai/v1alpha1`" in str(error_of(text))


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        # unknown keys
        ("pluginz: []", "$.pluginz", "unknown key `pluginz`; did you mean `plugins`?"),
        ("featuregates: []", "$.featuregates", "did you mean `featureGates`?"),
        ("dataLayer: {source: []}", "$.dataLayer.source", "did you mean `sources`?"),
        ("plugins: [{type: a}, {type: b, nmae: c}]", "$.plugins[1].nmae", "did you mean `name`?"),
        ("limits: {zzz: 1}", "$.limits.zzz", "unknown key `zzz`: remove it (known here: body"),
        ('"a.b c": 1', '$["a.b c"]', "unknown key `a.b c`"),
        # missing keys
        ("plugins: [{name: a}]", "$.plugins[0]", "the key `type` is missing: add it"),
        ("schedulingProfiles: [{plugins: []}]", "$.schedulingProfiles[0]", "`name` is missing"),
        ("dataLayer: {discovery: {}}", "$.dataLayer.discovery", "`pluginRef` is missing"),
        # wrong types
        (
            "dataLayer: {injectDefaults: yes}",
            "$.dataLayer.injectDefaults",
            'expected a boolean, got "yes": write true or false, without quotes',
        ),
        ("dataLayer: {injectDefaults: 'false'}", "$.dataLayer.injectDefaults", "without quotes"),
        (
            "dataLayer: {injectDefaults: 0}",
            "$.dataLayer.injectDefaults",
            "expected a boolean, got 0",
        ),
        (
            "plugins: {type: a}",
            "$.plugins",
            "expected a list, got keys with values: write one line",
        ),
        (
            "plugins: [queue-scorer]",
            "$.plugins[0]",
            'expected keys with values, got "queue-scorer"',
        ),
        ("plugins: [{type: 7}]", "$.plugins[0].type", "expected text, got 7: put it in quotes"),
        ("plugins: [{type: ''}]", "$.plugins[0].type", "length >= 1"),
        ("featureGates: [true]", "$.featureGates[0]", "expected text, got true"),
        ("limits: {streamsMax: '7'}", "$.limits.streamsMax", "expected a whole number"),
        ("limits: {streamsMax: 7.0}", "$.limits.streamsMax", "without a fraction"),
        ("limits: {scrapeTimeout: 1}", "$.limits.scrapeTimeout", "write a number with its unit"),
        ("limits: {bodyBytesMax: 1MB}", "$.limits.bodyBytesMax", "such as 1000, 5k or 10Gi"),
        ("flowControl: {enableEviction: 1}", "$.flowControl.enableEviction", "a boolean"),
        # out of range
        ("limits: {streamsMax: 0}", "$.limits.streamsMax", "expected a whole number >= 1, got 0"),
        ("limits: {chunkBytes: 70000}", "$.limits.chunkBytes", "<= 65000, got 70000"),
        ("limits: {bodyBytesMax: 10}", "$.limits.bodyBytesMax", "choose 1Ki to 1Gi"),
        ("limits: {decodedBytesMax: 2Gi}", "$.limits.decodedBytesMax", "choose 1Ki to 1Gi"),
        ("limits: {scrapeTimeout: 0s}", "$.limits.scrapeTimeout", "choose 10ms to 60s"),
        ("limits: {staleAfter: 2h}", "$.limits.staleAfter", "choose 50ms to 3600s"),
        ("flowControl: {maxBytes: -1}", "$.flowControl.maxBytes", "whole number >= 0"),
        ("dataLayer: {sources: [{pluginRef: a}, {pluginRef: b}]}", "$.dataLayer.sources", "<= 1"),
    ],
)
def test_N02_a_mistake_stops_the_start_with_its_path_and_the_remedy(
    text: str, path: str, words: str
) -> None:
    error = error_of(HEAD + text)
    assert error.path == path
    assert words in str(error)
    assert f"at `{path}`" in str(error)


@pytest.mark.parametrize("weight", ["-1", "1e9", "x", "true"])
def test_N02_a_weight_is_a_number_in_range(weight: str) -> None:
    text = f"schedulingProfiles: [{{name: a, plugins: [{{pluginRef: b, weight: {weight}}}]}}]"
    assert error_of(HEAD + text).path == "$.schedulingProfiles[0].plugins[0].weight"


def test_another_kind_of_file_is_told_apart() -> None:
    error = error_of("apiVersion: v1\nkind: ConfigMap\ndata: {}")
    assert '"v1" is not a choice: write one of' in str(error)
    error = error_of("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickrConfig")
    assert error.path == "$.kind"
    assert "did you mean `EndpointPickerConfig`?" in str(error)
    assert "`apiVersion` is missing" in str(error_of("kind: EndpointPickerConfig"))


def test_a_key_with_nothing_after_it_counts_as_not_written() -> None:
    text = HEAD + "plugins:\n- type: queue-scorer\n  name:\n  parameters:\ndataLayer:\nlimits:\n"
    assert load_config(text) == load_config(HEAD + "plugins: [{type: queue-scorer}]")
