"""Processes shared by the end-to-end tests: started on first use, stopped at the end.

Two EPPs, with and without TLS, run in front of the same three recording upstreams for all the tests
that do not disturb them; each Envoy variant comes and goes in front of one of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.stack import Envoy, Epp
from epp.envoy.options import BodyProcessing, EnvoyOptions, Routing
from tests.e2e.site import Site, problems
from tests.e2e.upstreams import Upstreams

BODY_BYTES_MAX = 6 << 20
SUBSET_HEADER = "x-test-subset"
CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - type: header-based-testing-filter
  - type: destination-endpoint-served-verifier
  - type: prefix-cache-scorer
  - type: queue-scorer
  - type: active-request-scorer
  - type: max-score-picker
    parameters:
      maxNumOfEndpoints: {endpoints}
limits:
  # A scrape that is late on a busy machine is no problem of the picker's.
  scrapeTimeout: 60s
  bodyBytesMax: {body_bytes}
"""
EPP_FLAGS = (
    "--drain-timeout=0s",
    "--v=5",
    "--enable-grpc-stream-metrics",
    "--emit-endpoint-scores",
)

REQUESTS = (BodyProcessing.FULL_DUPLEX, BodyProcessing.BUFFERED)
RESPONSES = tuple(BodyProcessing)
COMBINATIONS = list(itertools.product(REQUESTS, RESPONSES, Routing))
VARIANTS = [
    # Half of them over TLS, so that every mode is seen with and without.
    (request, response, routing, (at + at // 2 + at // 8) % 2 == 0)
    for at, (request, response, routing) in enumerate(COMBINATIONS)
]


def variant_id(variant: tuple[BodyProcessing, BodyProcessing, Routing, bool]) -> str:
    request, response, routing, tls = variant
    return f"{request.value}/{response.value}/{routing.value}/{'tls' if tls else 'plain'}"


def config(*, endpoints: int = 1) -> str:
    """Flag with a configuration in which a request may ask for its endpoint.

    Args:
        endpoints: how many are named for each request.
    """
    text = CONFIG.format(endpoints=endpoints, body_bytes=BODY_BYTES_MAX)
    return f"--config-text={text}"


@pytest.fixture(scope="session", autouse=True)
def transport(request: pytest.FixtureRequest) -> Iterator[str]:
    """What all EPPs serve with: `pytest --transport`."""
    name = str(request.config.getoption("--transport"))
    before, Epp.flags_first = Epp.flags_first, (f"--transport={name}",)
    yield name
    Epp.flags_first = before


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes' output goes."""
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture(scope="session")
def upstreams() -> Iterator[Upstreams]:
    with Upstreams(3) as running:
        yield running


@pytest.fixture(scope="session")
def epps(folder: Path, upstreams: Upstreams) -> Iterator[Callable[[bool], Epp]]:
    """The shared EPPs, by whether they speak TLS."""
    running: dict[bool, Epp] = {}

    def get(tls: bool) -> Epp:
        if tls not in running:
            flags = [*EPP_FLAGS, config(), f"--endpoints={','.join(upstreams.addresses)}"]
            flags += [] if tls else ["--secure-serving=false"]
            running[tls] = Epp(folder, flags, name="epp-tls" if tls else "epp-plain")
            running[tls].start()
        return running[tls]

    yield get
    for epp in running.values():
        assert epp.stop() == 0, epp.text()[-2000:]
        assert problems(epp) == []


@pytest.fixture(scope="session")
def start_envoy(
    folder: Path, upstreams: Upstreams, epps: Callable[[bool], Epp]
) -> Callable[..., Site]:
    """Makes a `Site` of a new Envoy in front of a shared EPP; the caller stops the Envoy."""
    numbers = itertools.count(1)

    def start(*, tls: bool = True, epp: Epp | None = None, **differing: Any) -> Site:
        epp = epp or epps(tls)
        options = EnvoyOptions(
            **{
                "listen": "127.0.0.1:0",
                "admin": "127.0.0.1:0",
                "epp": epp.address,
                "epp_tls": tls,
                "endpoints": tuple(upstreams.addresses),
                **differing,
            }
        )
        envoy = Envoy(folder, options, name=f"envoy-{next(numbers)}")
        envoy.start()
        return Site(envoy, epp, upstreams, options)

    return start


@pytest.fixture(scope="session", params=VARIANTS, ids=variant_id)
def variant(request: pytest.FixtureRequest, start_envoy: Callable[..., Site]) -> Iterator[Site]:
    """Every way bodies and picks can pass, one Envoy at a time."""
    request_body, response_body, routing, tls = request.param
    site = start_envoy(
        tls=tls, request_body=request_body, response_body=response_body, routing=routing
    )
    yield site
    site.envoy.stop()


@pytest.fixture(scope="session")
def site(start_envoy: Callable[..., Site]) -> Iterator[Site]:
    """The defaults of `epp envoy-config`, TLS included, and a header that sets the subset."""
    site = start_envoy(subset_header=SUBSET_HEADER)
    yield site
    site.envoy.stop()
