import time

import pytest

from epp.app import App, _parse_limits
from epp.config import load_config, resolve
from epp.core.model import Api, Endpoint, EndpointSpec, Load, Request
from epp.core.pool import Members, Scraped
from epp.edge.admin import debug_state
from epp.flags import parse_flags
from epp.scraping import _engine_chooser, _stale_after_s

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
EVERY_3_S = """
plugins:
- {type: metrics-data-source, parameters: {interval: 3s}}
- type: core-metrics-extractor
dataLayer:
  sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: core-metrics-extractor}]}]
"""
OWN_ENGINE = """
plugins:
- type: metrics-data-source
- type: core-metrics-extractor
  parameters:
    defaultEngine: vllm
    engineConfigs:
    - name: house
      queuedRequestsSpec: 'house_queue{kind=waiting}'
      customMetrics: [{attributeKey: heat, metricSpec: house_heat}]
dataLayer:
  sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: core-metrics-extractor}]}]
"""


def plan(text: str = ""):
    return resolve(load_config(HEAD + text))


@pytest.mark.parametrize(
    ("flags", "config", "seconds"),
    [
        ({}, "", 5.0),
        ({"refresh-metrics-interval": "100ms"}, "", 2.0),
        ({"metrics-staleness-threshold": "7s"}, "limits: {staleAfter: 9s}", 7.0),
        ({}, "limits: {staleAfter: 9s}", 9.0),
        ({}, EVERY_3_S, 15.0),
    ],
)
def test_G10_staleness_follows_the_flag_then_the_file_then_the_period(
    flags, config, seconds
) -> None:
    assert _stale_after_s(parse_flags(flags), plan(config)) == seconds


def test_an_engine_of_the_configuration_is_read_and_the_built_in_ones_stay() -> None:
    chooser = _engine_chooser(plan(OWN_ENGINE))
    labels = {"llm-d.ai/engine-type": "house"}
    mapping = chooser.named(Endpoint(EndpointSpec(host="h", port=1, labels=labels)))
    assert mapping.waiting[0].labels == (("kind", "waiting"),)
    assert mapping.custom["heat"].name == "house_heat"
    assert {"vllm", "sglang", "house"} <= chooser.engines.keys()


def test_requestHandler_parsers_decides_which_bodies_are_read() -> None:
    text = """
plugins: [{type: anthropic-parser}, {type: passthrough-parser}]
requestHandler: {parsers: [{pluginRef: anthropic-parser}, {pluginRef: passthrough-parser}]}
"""
    assert _parse_limits(plan(text)).apis == {Api.MESSAGES}


def test_G10_as_much_of_a_prompt_is_viewed_as_is_hashed() -> None:
    producer = "plugins: [{{type: approx-prefix-cache-producer, parameters: {}}}]"
    text = producer.format("{maxPrefixTokensToMatch: 200000}")
    assert _parse_limits(plan(text)).prompt.view_bytes_max == 800_000
    assert _parse_limits(plan()).prompt.view_bytes_max == 131_072 * 4


def test_ends_nobody_sees_are_known_by_the_next_scrape_and_on_the_page_without_a_request() -> None:
    app = App(parse_flags({"endpoints": "10.0.0.1:8000"}), resolve(None))
    (site,) = app._sites
    pool, decider = site.decider.pool, site.decider
    pool.apply(Members((EndpointSpec(host="10.0.0.1", port=8000),)), 0.0)
    (endpoint,) = pool.endpoints

    def unseen() -> None:
        decided = decider.decide(Request(), subset=None, now_s=0.0, first_byte_seen=False)
        decider.unseen(decided, 0.0)

    unseen()
    site.apply(Scraped(endpoint, Load(at_s=time.monotonic(), running=4, waiting=0)))
    assert endpoint.inflight_requests == 0
    unseen()
    assert debug_state(decider, time.monotonic).state.inflight_requests == 0


def test_endpoints_from_a_file_win_over_a_pool_and_say_so(tmp_path, caplog) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text("endpoints: []")
    text = (
        f"plugins: [{{type: file-discovery, parameters: {{path: {path}}}}}]\n"
        "dataLayer: {discovery: {pluginRef: file-discovery}}\n"
    )
    app = App(parse_flags({"pool-name": "p"}), plan(text))
    assert [serving.name for serving in app.pools.all] == ["static"]
    assert "--pool-name and --endpoint-selector have no effect" in caplog.text


def test_the_app_is_built_from_flags_and_no_file() -> None:
    app = App(parse_flags({"endpoints": "10.0.0.1:8000,[fd00::1]:8000"}), resolve(None))
    assert app.pools.all[0].decider.profile.name == "default"
    assert not app.health.ready, "before discovery has spoken"
