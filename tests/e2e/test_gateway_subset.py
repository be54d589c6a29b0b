"""The gateway's subset of endpoints: kept, on every path."""

from __future__ import annotations

import pytest

from epp.core.headers import DROP_REASON
from tests.e2e.conftest import SUBSET_HEADER
from tests.e2e.http1 import JSON_TYPE
from tests.e2e.site import Site, completion, picked

BODIES = [None, completion(300, salt="subset")]


async def served_by(site: Site, subset: str, body: bytes | None) -> str:
    method = "GET" if body is None else "POST"
    answer, test_id = await site.send(
        method, "/v1/completions", [JSON_TYPE, (SUBSET_HEADER, subset)], body
    )
    assert answer.status == 200, answer
    received = site.upstreams.one(test_id)
    assert picked(received) == [received.upstream]
    assert not received.values(SUBSET_HEADER)
    return received.upstream


@pytest.mark.parametrize("body", BODIES, ids=["GET", "POST"])
async def test_K05_a_subset_of_one_is_kept(site: Site, body: bytes | None) -> None:
    for address in site.upstreams.addresses:
        assert {await served_by(site, address, body) for _ in range(4)} == {address}


@pytest.mark.parametrize("body", BODIES, ids=["GET", "POST"])
async def test_K05_all_of_a_subset_and_nobody_else_serves(site: Site, body: bytes | None) -> None:
    first, second, _ = site.upstreams.addresses
    subset = f" {second} , {first},10.9.8.7:1"
    assert {await served_by(site, subset, body) for _ in range(12)} == {first, second}


@pytest.mark.parametrize("body", BODIES, ids=["GET", "POST"])
@pytest.mark.parametrize("subset", ["10.9.8.7:8000", ",", "nonsense"])
async def test_K05_a_subset_with_nobody_in_it_is_answered_503(
    site: Site, subset: str, body: bytes | None
) -> None:
    method = "GET" if body is None else "POST"
    answer, test_id = await site.send(
        method, "/v1/completions", [JSON_TYPE, (SUBSET_HEADER, subset)], body
    )
    assert answer.status == 503
    assert answer.header(DROP_REASON) == "rejected-no-endpoints"
    assert answer.header("content-type") == "application/json"
    assert answer.header("retry-after") == "1"
    assert "subset" in answer.json()["error"]["message"]
    assert site.upstreams.received(test_id) == []
