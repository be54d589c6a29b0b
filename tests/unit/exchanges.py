"""What the tests of `core.exchange` share: a real decider over a small pool, and event makers."""

from random import Random

import msgspec

from epp.core.decide import Decider, PrefixKeeper, PrefixParams
from epp.core.exchange import Exchange, ExchangeParams
from epp.core.flow.hold import Hold
from epp.core.inflight import Inflight
from epp.core.messages import BodyMode, RequestBody, RequestHeaders, ResponseBody, ResponseHeaders
from epp.core.model import EndpointSpec
from epp.core.pickers.max_score import MaxScorePicker
from epp.core.pool import Members, Pool
from epp.core.schedule import Profile, WeightedScorer
from epp.core.scorers.inflight import ActiveRequestScorer
from epp.core.scorers.prefix import PrefixCacheScorer
from epp.core.serving import Pools, Serving

DUPLEX = (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED)
HEADERS = {
    ":method": "POST",
    ":path": "/v1/chat/completions",
    "content-type": "application/json",
    "x-request-id": "r-1",
}


class Watched:
    """A watcher that remembers what it was told."""

    def __init__(self) -> None:
        self.decided_exchanges: list[Exchange] = []
        self.finished_exchanges: list[Exchange] = []

    def decided(self, exchange: Exchange) -> None:
        self.decided_exchanges.append(exchange)

    def finished(self, exchange: Exchange) -> None:
        self.finished_exchanges.append(exchange)


class World:
    """A pool of endpoints 10.0.0.1.. with one decider; makes exchanges."""

    def __init__(self, endpoints: int = 3, *, fallbacks: int = 1, **params: object) -> None:
        self.pool = Pool(stale_after_s=5.0)
        specs = tuple(EndpointSpec(host=f"10.0.0.{n + 1}", port=8000) for n in range(endpoints))
        self.pool.apply(Members(specs), 0.0)
        scorers = (
            WeightedScorer("prefix-cache-scorer", 3.0, PrefixCacheScorer()),
            WeightedScorer("active-request-scorer", 2.0, ActiveRequestScorer()),
        )
        picker = MaxScorePicker(max_num_of_endpoints=fallbacks)
        self.decider = Decider(
            pool=self.pool,
            profile=Profile("default", (), scorers, picker),
            inflight=Inflight(),
            prefix=PrefixKeeper(PrefixParams()),
            rng=Random(1),
        )
        self.serving = Serving("static", self.decider)
        self.params = ExchangeParams(**params)
        self.watched = Watched()

    def exchange(self, hold: Hold | None = None) -> Exchange:
        return Exchange(
            pools=self.pools(hold),
            params=self.params,
            watcher=self.watched,
            now_s=1.0,
            may_hold=hold is not None,
        )

    def pools(self, hold: Hold | None = None) -> Pools:
        return Pools(Serving("static", self.decider, hold=hold) if hold else self.serving)

    def counters(self) -> list[tuple[int, int, int]]:
        return [
            (e.inflight_requests, e.waiting_requests, e.inflight_tokens)
            for e in self.pool.endpoints
        ]

    @property
    def idle(self) -> bool:
        """Nothing is charged anywhere."""
        return self.decider.inflight.requests == 0 and not any(map(any, self.counters()))


def chat(text: str = "hello", **fields: object) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
    return msgspec.json.encode(body)


def request_headers(
    modes: tuple[BodyMode, BodyMode] | None = DUPLEX,
    *,
    end_of_stream: bool = False,
    subset: tuple[str, ...] | None = None,
    **headers: str,
) -> RequestHeaders:
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    return RequestHeaders({**HEADERS, **more}, end_of_stream, modes=modes, subset=subset)


def body(data: bytes, *, end_of_stream: bool = True) -> RequestBody:
    return RequestBody(data, end_of_stream)


def response_headers(status: str = "200", *, served: str | None = None, **headers: str):
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    return ResponseHeaders({":status": status, **more}, False, served=served)


def response_body(data: bytes, *, end_of_stream: bool = False) -> ResponseBody:
    return ResponseBody(data, end_of_stream)
