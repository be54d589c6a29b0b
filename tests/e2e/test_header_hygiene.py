"""What of a client's headers reaches the model server, and what must not."""

from __future__ import annotations

import pytest

from epp.core.headers import DESTINATION, FAIRNESS_ID, NOT_FOR_UPSTREAM, TEST_SELECTION
from epp.envoy.options import BodyProcessing
from tests.e2e.http1 import JSON_TYPE
from tests.e2e.site import Site, completion, metric, picked
from tests.e2e.upstreams import new_id

CONTROL = sorted(NOT_FOR_UPSTREAM - {TEST_SELECTION})
ODD = [
    ("x-repeated", "one"),
    ("x-repeated", "two"),
    ("x-repeated", "one"),
    ("x-odd-bytes", b"caf\xe9 \xff\xfe"),
    ("x-empty", ""),
    ("x-long", "y" * 8_000),
    ("cookie", "a=1; b=2"),
    ("authorization", "Bearer not-ours"),
    ("accept-encoding", "gzip, br;q=0.5"),
    ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ("x-request-id", "chosen-by-the-client"),
]


@pytest.mark.parametrize("body", [None, completion(400, salt="h")], ids=["GET", "POST"])
async def test_D02_no_control_header_of_a_client_reaches_the_upstream(
    variant: Site, body: bytes | None
) -> None:
    wrong = variant.upstreams.addresses[1]
    forged = [(name.title(), wrong) for name in [DESTINATION, *CONTROL]]
    method = "GET" if body is None else "POST"
    answer, test_id = await variant.send(
        method, "/v1/completions", [JSON_TYPE, *forged], body, to=2
    )
    assert answer.status == 200, answer
    received = variant.upstreams.one(test_id)
    assert received.upstream == variant.upstreams.addresses[2]
    assert picked(received) == [received.upstream]
    assert not {name for name, _ in received.headers} & {*CONTROL, TEST_SELECTION}
    assert wrong not in {value for _, value in received.headers}


async def test_A13_other_headers_arrive_as_they_were_sent(variant: Site) -> None:
    for method, body in (("GET", None), ("POST", completion(500, salt="odd"))):
        answer, test_id = await variant.send(method, "/v1/completions", [JSON_TYPE, *ODD], body)
        assert answer.status == 200, answer
        received = variant.upstreams.one(test_id)
        for name in {name for name, _ in ODD}:
            sent = [v if isinstance(v, str) else v.decode("latin-1") for n, v in ODD if n == name]
            assert received.values(name) == sent
        assert received.values("content-type") == ["application/json"]
        assert received.values("host") == ["llm.example.com"]


async def test_A17_the_length_is_told_exactly_once(variant: Site) -> None:
    """Content-length where Envoy keeps it, chunks where it cannot, nothing where no body is."""
    _, test_id = await variant.send("GET", "/v1/models")
    received = variant.upstreams.one(test_id)
    assert not received.values("content-length")
    assert not received.values("transfer-encoding")
    for size in (1_000, 100_000):
        body = completion(size, salt="length")
        _, test_id = await variant.send("POST", "/v1/completions", [JSON_TYPE], body)
        received = variant.upstreams.one(test_id)
        if variant.options.request_body is BodyProcessing.BUFFERED:
            assert received.values("content-length") == [str(size)]
            assert not received.values("transfer-encoding")
        else:
            assert not received.values("content-length")
            assert received.values("transfer-encoding") == ["chunked"]
    _, test_id = await variant.send("POST", "/upload", (), b"")
    received = variant.upstreams.one(test_id)
    assert received.values("content-length") == ["0"]


async def test_A18_response_headers_arrive_as_they_were_sent(variant: Site) -> None:
    test_id = new_id()
    sent = [
        ("content-type", "application/json; charset=utf-8"),
        ("set-cookie", "a=1; Path=/"),
        ("set-cookie", "b=2"),
        ("x-odd-bytes", "caf\xe9 \xff"),
        ("x-ratelimit-remaining", "0"),
    ]
    variant.upstreams.plan(test_id, status=429, headers=sent, body=b'{"error":1}')
    answer, _ = await variant.send("GET", "/v1/models", test_id=test_id)
    assert (answer.status, answer.body) == (429, b'{"error":1}')
    names = {name for name, _ in sent}
    assert [(n, v) for n, v in answer.headers if n in names] == sent
    lengths = [v for n, v in answer.headers if n == "content-length"]
    chunked = [v for n, v in answer.headers if n == "transfer-encoding"]
    assert (lengths, chunked) in ((["11"], []), ([], ["chunked"]))


@pytest.mark.parametrize("name", FAIRNESS_ID)
async def test_the_fairness_id_is_read_and_stays_here(variant: Site, name: str) -> None:
    flow = f"flow-of-{name}-{variant.envoy.name}"
    answer, test_id = await variant.send(
        "POST", "/v1/completions", [JSON_TYPE, (name, flow)], completion(300, salt="f")
    )
    assert answer.status == 200
    received = variant.upstreams.one(test_id)
    assert flow not in {value for _, value in received.headers}
    total = metric(variant.epp.metrics(), "llm_d_epp_request_total", f'fairness_id="{flow}"')
    assert total == 1
