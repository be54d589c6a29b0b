"""Publishes KV events over ZeroMQ in a thread of its own, so that the engine's timing is its own.

Sockets, frames and replay are vLLM's. A batch gets its sequence number, from 0 in every process,
when the step ends; the thread encodes, sends and keeps it for replay. Of the faults, only the pause
acts on what is queued already: the others are those of the moment the step ended, so whoever sets
one knows from which batch on it acts.

    live     PUB     topic, sequence (8 bytes, big-endian), payload
    replay   ROUTER  asked with: empty, first sequence wanted
                     answers per batch: empty, topic, sequence, payload
                     in the end: empty, empty, 2**64 - 1, empty
                     without the third frame from the end in the old dialect of arrays

As in vLLM, the ROUTER socket keeps ZeroMQ's high-water mark of 1000: a long replay can lack batches
in the middle, and its end, if the client reads too slowly. The cost to the engine's thread is one
append and one wake-up per batch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import zmq

from bench.engine.faults import Faults
from bench.engine.kvcache import BlockName
from bench.engine.kvevents import (
    Event,
    KvEventsConfig,
    PublishingError,
    cleared_event,
    encode_batch,
    removed_event,
    stored_event,
)
from bench.engine.scheduler import StepResult, Stored

RANK = 0
SEQUENCE_BYTES = 8
END = b"\xff" * SEQUENCE_BYTES
WAKE_ADDRESS = "inproc://wake"
CLOSE_S_MAX = 5.0


class PublisherCounts(msgspec.Struct):
    """Batches since the start."""

    sent: int = 0
    dropped: int = 0
    """Kept for replay, but not sent: a fault."""
    repeated: int = 0
    """Sent twice: a fault."""
    lost: int = 0
    """Neither sent nor kept: too many were waiting."""
    replays: int = 0
    """Answered requests for replay, and in `replayed` the batches sent for them."""
    replayed: int = 0


class _Batch(NamedTuple):
    sequence: int
    at_unix_s: float
    cleared: bool
    removed: list[BlockName]
    stored: list[Stored]
    faults: Faults


class Publisher:
    """See the module. All methods are for the thread that made it."""

    def __init__(self, config: KvEventsConfig, *, block_tokens: int, faults: Faults) -> None:
        """Opens the sockets. Raises: PublishingError."""
        self.config = config
        self.counts = PublisherCounts()
        self.next_sequence = 0
        self._block_tokens = block_tokens
        self._topic = config.topic.encode()
        self._faults = faults
        self._closing = False
        self._queue: deque[_Batch] = deque()
        self._copies: list[BlockName] = []
        """Told as stored twice; the second copy is not told as removed yet."""
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        self._context.linger = 0
        self._waker = self._context.socket(zmq.PAIR)
        self._waker.bind(WAKE_ADDRESS)
        self._woken = self._context.socket(zmq.PAIR)
        self._woken.connect(WAKE_ADDRESS)
        self._live = self._context.socket(zmq.PUB)
        self._live.set_hwm(config.hwm)
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._open()
        except PublishingError:
            self._context.destroy()
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Send what waits, unless paused, and close the sockets."""
        self._closing = True
        self._wake()
        self._thread.join(CLOSE_S_MAX)
        self._context.destroy()

    def on_step(self, step: StepResult) -> None:
        """A step is over: publish what it did to the cache, if anything."""
        if not (step.stored or step.removed or step.cleared):
            return
        sequence, self.next_sequence = self.next_sequence, self.next_sequence + 1
        if len(self._queue) >= self.config.max_queue_size:
            self.counts.lost += 1
            return
        batch = _Batch(
            *(sequence, time.time(), step.cleared, step.removed, step.stored, self._faults)
        )
        self._queue.append(batch)
        self._wake()

    def set_faults(self, faults: Faults) -> None:
        """From the next batch on; a pause begins and ends at once."""
        self._faults = faults
        self._wake()

    def sources(self) -> dict[str, dict[str, Any]]:
        """What `/kv_event_sources` tells: by data-parallel rank, with the ports in use."""
        source = msgspec.structs.asdict(self.config)
        del source["bind"]
        return {str(RANK): source}

    def _open(self) -> None:
        config = self.config
        attach = self._live.bind if config.binds else self._live.connect
        endpoint = _attach(self._live, attach, config.endpoint)
        replay_endpoint = config.replay_endpoint
        if replay_endpoint is not None:
            self._replay = self._context.socket(zmq.ROUTER)
            replay_endpoint = _attach(self._replay, self._replay.bind, replay_endpoint)
        self.config = msgspec.structs.replace(
            config, publisher="zmq", endpoint=endpoint, replay_endpoint=replay_endpoint
        )

    def _wake(self) -> None:
        # Full means that it will wake up anyway.
        with suppress(zmq.Again):
            self._waker.send(b"", zmq.NOBLOCK)

    # What follows runs in the thread.

    def _run(self) -> None:
        woken = zmq.Poller()
        woken.register(self._woken, zmq.POLLIN)
        asked = zmq.Poller()
        asked.register(self._woken, zmq.POLLIN)
        if self._replay is not None:
            asked.register(self._replay, zmq.POLLIN)
        closing = False
        while not closing:
            (woken if self._faults.kv_events_pause else asked).poll()
            closing = self._closing
            self._turn()

    def _turn(self) -> None:
        with suppress(zmq.Again):
            while True:
                self._woken.recv(zmq.NOBLOCK)
        if self._faults.kv_events_pause:
            return
        while self._queue:
            self._publish(self._queue.popleft())
        if self._replay is not None and self._replay.poll(0):
            self._answer(self._replay)

    def _publish(self, batch: _Batch) -> None:
        number, faults, counts = batch.sequence + 1, batch.faults, self.counts
        payload = self._encode(batch)
        self._kept.append((batch.sequence, payload))
        if faults.kv_events_drop_every and not number % faults.kv_events_drop_every:
            counts.dropped += 1
            return
        frames = (self._topic, _bytes_of(batch.sequence), payload)
        counts.sent += 1
        self._live.send_multipart(frames)
        if faults.kv_events_repeat_every and not number % faults.kv_events_repeat_every:
            counts.repeated += 1
            self._live.send_multipart(frames)

    def _encode(self, batch: _Batch) -> bytes:
        arrays = batch.faults.kv_events_arrays
        sessions = not (arrays or batch.faults.kv_events_no_session)
        events: list[Event] = [cleared_event()] if batch.cleared else []
        copies, self._copies = self._copies, []
        if batch.cleared:
            copies = []
        events += [removed_event(name) for name in (*copies, *batch.removed)]
        for stored in batch.stored:
            event = stored_event(stored, block_tokens=self._block_tokens, sessions=sessions)
            events.append(event)
            if batch.faults.kv_events_copies:
                events.append(event)
                self._copies += event["block_hashes"]
        return encode_batch(events, at_unix_s=batch.at_unix_s, rank=RANK, arrays=arrays)

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        frames = replay.recv_multipart()
        if len(frames) != 3 or frames[1]:
            return
        client, _, first = frames
        first_sequence = int.from_bytes(first, "big")
        old = self._faults.kv_events_arrays
        opening = (client, b"") if old else (client, b"", self._topic)
        for sequence, payload in self._kept:
            if sequence >= first_sequence:
                replay.send_multipart((*opening, _bytes_of(sequence), payload))
                self.counts.replayed += 1
        opening = (client, b"") if old else (client, b"", b"")
        replay.send_multipart((*opening, END, b""))
        self.counts.replays += 1


def _attach(socket: zmq.Socket[bytes], attach: Callable[[str], object], endpoint: str) -> str:
    """Bind or connect; returns the endpoint with the port that a free one became."""
    try:
        attach(endpoint)
    except zmq.ZMQError as error:
        raise PublishingError(f"KV events cannot use the address {endpoint!r}: {error}") from error
    host, _, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://") and port in ("*", "0"):
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return f"{host}:{bound.rpartition(':')[2]}"
    return endpoint


def _bytes_of(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")
