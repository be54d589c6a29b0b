"""Endpoints from a file that changes while the EPP runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from bench.stack import Epp
from epp.core.headers import DROP_REASON
from tests.e2e.http1 import JSON_TYPE
from tests.e2e.http2 import SERVING, health
from tests.e2e.site import Site, completion, log_entries, problems, until
from tests.e2e.upstreams import Upstreams

CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
limits: {{scrapeTimeout: 60s}}
plugins:
  - type: file-discovery
    parameters:
      path: {path}
      watchFile: true
dataLayer:
  discovery:
    pluginRef: file-discovery
"""


class File:
    """The file, replaced in one step as a ConfigMap's is."""

    def __init__(self, path: Path, upstreams: Upstreams) -> None:
        self.path, self._upstreams = path, upstreams

    def list(self, numbers: Sequence[int]) -> None:
        entries = []
        for number in numbers:
            host, _, port = self._upstreams.addresses[number].rpartition(":")
            entries.append({"name": f"vllm-{number}", "address": host, "port": port})
        self.write(json.dumps({"endpoints": entries}))

    def write(self, text: str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(text)
        new.rename(self.path)


@pytest.fixture(scope="module")
def file(folder: Path, upstreams: Upstreams) -> File:
    file = File(folder / "endpoints.yaml", upstreams)
    file.list([])
    return file


@pytest.fixture(scope="module")
def listed(folder: Path, file: File, start_envoy: Callable[..., Site]) -> Iterator[Site]:
    """An EPP whose file is empty when it starts."""
    path = folder / "discovery.yaml"
    path.write_text(CONFIG.format(path=file.path))
    epp = Epp(folder, [f"--config-file={path}", "--drain-timeout=0s"], name="epp-file")
    epp.start()
    site = start_envoy(epp=epp, retries=0)
    yield site
    site.envoy.stop()
    assert epp.stop() == 0


async def take_over(site: Site, file: File, numbers: Sequence[int]) -> None:
    """List these upstreams in the file and wait until the EPP knows them and no others."""
    file.list(numbers)
    wanted = {site.upstreams.addresses[number] for number in numbers}

    def known() -> bool:
        return {e["address"] for e in site.epp.state()["endpoints"]} == wanted

    await until(known, what=f"endpoints {numbers}")


async def picks(site: Site, count: int = 12) -> Counter[str]:
    served = Counter[str]()
    for n in range(count):
        answer, test_id = await site.send(
            "POST", "/v1/completions", [JSON_TYPE], completion(300, salt=f"file-{n}")
        )
        assert answer.status == 200, answer
        served[site.upstreams.one(test_id).upstream] += 1
    return served


async def test_M09_without_endpoints_the_epp_is_ready_and_answers_503(
    listed: Site, file: File
) -> None:
    await take_over(listed, file, [])
    assert await health(listed.epp.ports["health"]) == SERVING
    for method, body in (("GET", None), ("POST", completion(300, salt="none"))):
        answer, test_id = await listed.send(method, "/v1/completions", [JSON_TYPE], body)
        assert answer.status == 503
        assert answer.header("retry-after") == "1"
        assert answer.header(DROP_REASON) == "rejected-no-endpoints"
        assert answer.header("content-type") == "application/json"
        assert answer.json()["error"]["type"] == "ServiceUnavailableError"
        assert listed.upstreams.received(test_id) == []


async def test_K10_endpoints_that_appear_in_the_file_are_picked(listed: Site, file: File) -> None:
    await take_over(listed, file, [0, 1, 2])
    assert set(await picks(listed)) == set(listed.upstreams.addresses)


async def test_E01_an_endpoint_removed_from_the_file_gets_no_more_picks(
    listed: Site, file: File
) -> None:
    await take_over(listed, file, [0, 1, 2])
    await picks(listed)
    await take_over(listed, file, [0, 2])
    first, gone, third = listed.upstreams.addresses
    assert set(await picks(listed)) == {first, third}
    page = listed.epp.metrics()
    assert gone not in page, "series of an endpoint that has left are dropped"


async def test_a_broken_file_changes_nothing_and_is_complained_about_once(
    listed: Site, file: File
) -> None:
    await take_over(listed, file, [0, 1])
    file.write("endpoints: [{name: x, addres: 1.2.3.4, port: 1}]")
    complaint = await until(lambda: problems(listed.epp), what="a complaint")
    assert "addres" in complaint[0]["message"]
    assert set(await picks(listed)) == set(listed.upstreams.addresses[:2])
    await take_over(listed, file, [0, 1, 2])
    assert len(problems(listed.epp)) == 1
    assert any("Endpoints read from" in e["message"] for e in log_entries(listed.epp))
