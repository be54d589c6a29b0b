"""What the answers that pass by teach about the endpoints that gave them."""

from __future__ import annotations

import pytest

from epp.core.exchange import Exchange, ExchangeParams
from epp.core.serving import Pools, Serving
from tests.unit.exchanges import (
    Watched,
    body,
    chat,
    request_headers,
    response_body,
    response_headers,
)
from tests.unit.roundrates import left_over, world


@pytest.mark.parametrize(
    ("status", "learned"), [("200", 1), ("400", 0), ("404", 0), ("429", 0), ("503", 0)]
)
def test_who_refuses_at_once_does_not_seem_to_be_fast(status: str, learned: int) -> None:
    decider = world(1)
    exchange = Exchange(
        pools=Pools(Serving("static", decider)),
        params=ExchangeParams(),
        watcher=Watched(),
        now_s=1.0,
    )
    exchange.receive(request_headers(), 1.0)
    exchange.receive(body(chat("hello " * 2000, stream=True)), 1.0)
    exchange.receive(response_headers(status), 1.001)
    exchange.receive(response_body(b"{}"), 1.001)
    (endpoint,) = decider.pool.endpoints
    assert endpoint.waiting_requests == 0
    exchange.receive(response_body(b"", end_of_stream=True), 1.002)
    calls = [name for name, _, _ in decider.forecast.learner.calls]
    assert calls.count("first_byte") == learned
    assert left_over(decider) == []
