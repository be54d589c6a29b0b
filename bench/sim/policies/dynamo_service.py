"""NVIDIA Dynamo's real selector as a policy: its compiled `SelectionService`, not its formula.

    view.matched_tokens ─▶ KV events over ZMQ, as vLLM sends them ─▶ its indexer
    choose              ─▶ select_and_reserve, with the hashes of the blocks
    first_byte, ended   ─▶ prefill_complete, free_reservation

Before each choice its index is brought to say of this request what the view says: blocks the view
knows and it does not are stored, others removed, and the choice waits until the index agrees on
every endpoint. So both have the same information, and time in its threads does not matter. A
block of ours has no token ids; its name, spread over two of them, stands for its content.

Slow, about a millisecond a request, and not exactly repeatable: Dynamo draws ties itself.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import struct
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

import msgspec

from bench.dynamo import DynamoMissingError, dynamo_core
from bench.sim.conditions import PolicyContext
from bench.sim.model import SimRequest, View

MODEL = "model"
AGREE_S_MAX = 10.0
"""Longest wait for its index; it takes well below a millisecond."""
RESEND_S = 0.05
SCALE_VARIABLE = "DYN_ROUTER_PREFILL_LOAD_SCALE"
"""Read when a service is made. The override in a request is accepted and has no effect (1.6.1)."""

_Result = TypeVar("_Result")


class _Feed:
    """The KV events of one endpoint, in vLLM's form."""

    def __init__(self, zmq: Any, context: Any) -> None:
        self._socket = context.socket(zmq.PUB)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._numbers = itertools.count()

    def send(self, event: list[object]) -> None:
        batch = msgspec.msgpack.encode([time.time(), [event], 0])
        self._socket.send_multipart([b"", struct.pack(">q", next(self._numbers)), batch])

    def close(self) -> None:
        self._socket.close(linger=0)


class DynamoService:
    """See the module."""

    def __init__(self, context: PolicyContext, *, prefill_load_scale: float = 1.0) -> None:
        """Raises: DynamoMissingError if Dynamo or pyzmq is not installed."""
        self._core = dynamo_core()
        self._zmq = _zmq()
        self._block_tokens = context.block_tokens
        self._loop = asyncio.new_event_loop()
        self._sockets = self._zmq.Context()
        with _environment(SCALE_VARIABLE, str(prefill_load_scale)):
            self._service = self._core.SelectionService(indexer_threads=1)
        self._feeds: dict[int, _Feed] = {}
        self._hashes: dict[int, int] = {}
        self._reserved: dict[int, str] = {}
        """Request -> its reservation, each attempt with an id of its own."""
        self._where: dict[int, int] = {}
        self._attempts = itertools.count()
        self._close = weakref.finalize(
            self, _shut_down, self._service, self._feeds, self._sockets, self._loop
        )

    def close(self) -> None:
        """Stop its threads; also done when the policy is garbage."""
        self._close()

    def choose(self, request: SimRequest, view: View, now_s: float) -> int | None:  # noqa: ARG002
        """As in `Policy`. Raises: TimeoutError when its index does not follow the view."""
        if not view.endpoints:
            return None
        return self._run(self._choose, request, view)

    def first_byte(self, request: SimRequest, now_s: float) -> None:  # noqa: ARG002
        """As in `Policy`."""
        if (reservation := self._reserved.get(request.number)) is not None:
            self._run(self._service.prefill_complete, reservation)

    def ended(self, request: SimRequest, now_s: float, *, ok: bool) -> None:  # noqa: ARG002
        """As in `Policy`."""
        if (reservation := self._reserved.pop(request.number, None)) is not None:
            del self._where[request.number]
            self._run(self._service.free_reservation, reservation)

    def left(self, endpoint: int) -> None:
        """As in `Policy`."""
        feed = self._feeds.pop(endpoint, None)
        if feed is None:
            return
        for number in [each for each, where in self._where.items() if where == endpoint]:
            del self._where[number]
            self._run(self._service.free_reservation, self._reserved.pop(number))
        self._run(self._service.delete_worker, endpoint)
        feed.close()

    def _run(self, call: Callable[..., Awaitable[_Result]], *arguments: object) -> _Result:
        async def inside() -> _Result:  # Dynamo's methods are to be called with the loop running
            return await call(*arguments)

        return self._loop.run_until_complete(inside())

    async def _choose(self, request: SimRequest, view: View) -> int:
        for endpoint in view.endpoints:
            if endpoint not in self._feeds:
                await self._join(endpoint)
        query = self._query(request)
        if request.blocks:
            await self._agree(request, view, query)
        if (before := self._reserved.pop(request.number, None)) is not None:
            await self._service.free_reservation(before)
        reservation = f"{request.number}.{next(self._attempts)}"
        chosen = await self._service.select_and_reserve({**query, "selection_id": reservation})
        endpoint = int(chosen["worker_id"])
        self._reserved[request.number], self._where[request.number] = reservation, endpoint
        return endpoint

    async def _join(self, endpoint: int) -> None:
        feed = self._feeds[endpoint] = _Feed(self._zmq, self._sockets)
        await self._service.upsert_worker(
            {
                "worker_id": endpoint,
                "model_name": MODEL,
                "block_size": self._block_tokens,
                "endpoint": f"http://127.0.0.1:{endpoint + 1}",  # never called
                "kv_events_endpoints": {0: feed.address},
            }
        )

    # -- its index -----------------------------------------------------------------------------

    async def _agree(self, request: SimRequest, view: View, query: dict[str, object]) -> None:
        """Make its index say what the view says. Events sent before a subscription is up are lost:
        they are sent again after a while."""
        wanted = {
            each: view.matched_tokens(request, each) // self._block_tokens
            for each in view.endpoints
        }
        give_up_s = time.monotonic() + AGREE_S_MAX
        sent_s = 0.0
        while True:
            scores = await self._service.overlap_scores(query)
            known = {each["worker_id"]: each["device_blocks"] for each in scores["workers"]}
            wrong = [each for each in wanted if known[each] != wanted[each]]
            now_s = time.monotonic()
            if not wrong:
                return
            if now_s > give_up_s:
                raise TimeoutError(f"Dynamo's index has {known}, the view {wanted}")
            if now_s - sent_s > RESEND_S:
                sent_s = now_s
                for endpoint in wrong:
                    self._correct(endpoint, request.blocks, known[endpoint], wanted[endpoint])
            await asyncio.sleep(0)

    def _correct(self, endpoint: int, names: Sequence[int], known: int, wanted: int) -> None:
        feed = self._feeds[endpoint]
        if known > wanted:
            feed.send(["BlockRemoved", [_id(name) for name in names[wanted:known]]])
            return
        parent = _id(names[known - 1]) if known else None
        stored = names[known:wanted]
        ids = [token for name in stored for token in self._tokens(name)]
        event = ["BlockStored", [_id(name) for name in stored], parent, ids]
        feed.send([*event, self._block_tokens, None])

    def _query(self, request: SimRequest) -> dict[str, object]:
        return {
            "model_name": MODEL,
            "block_hashes": [self._hash(name) for name in request.blocks],
            "sequence_hashes": [_id(name) for name in request.blocks],
            "isl_tokens": request.prompt_tokens,
        }

    def _hash(self, name: int) -> int:
        """What Dynamo calls a block by its content, as a signed integer."""
        known = self._hashes.get(name)
        if known is None:
            tokens = self._tokens(name)
            (unsigned,) = self._core.compute_block_hash_for_seq(tokens, self._block_tokens)
            known = self._hashes[name] = unsigned - 2**64 if unsigned >= 2**63 else unsigned
        return known

    def _tokens(self, name: int) -> list[int]:
        return [name & 0xFFFF_FFFF, name >> 32 & 0xFFFF_FFFF] + [0] * (self._block_tokens - 2)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _id(name: int) -> int:
    return name & 0x7FFF_FFFF_FFFF_FFFF


def _zmq() -> Any:
    try:
        return import_module("zmq")
    except ImportError as error:
        raise DynamoMissingError(
            "Dynamo's indexer is fed over ZMQ: pip install pyzmq (optional extra `dynamo`)"
        ) from error


def _shut_down(
    service: Any, feeds: dict[int, _Feed], sockets: Any, loop: asyncio.AbstractEventLoop
) -> None:
    service.shutdown()
    for feed in feeds.values():
        feed.close()
    sockets.term()
    loop.close()
