"""Any conversation with a client made of the `h2` package, which checks every frame of ours.

The model keeps, per stream, what the server's stream has sent and what the client has got. Bytes
travel in pieces when a rule says so, so that everything crosses on the wire. At the end all windows
are opened, and each stream must have got exactly what was sent, and its status.
"""

from __future__ import annotations

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epp.wire.http2.connection import Http2Limits, ServerConnection
from tests.wire.http2_peer import REQUEST, WATCH, message, replaced

LIMITS = Http2Limits(
    stream_window_bytes=40_000,
    connection_window_bytes=100_000,
    outbox_bytes_high=30_000,
    output_bytes_high=20_000,
)
pieces = st.lists(st.sampled_from([1, 8, 9, 10, 50, 700, 20_000]), min_size=1, max_size=4)
sizes = st.sampled_from([0, 1, 5, 100, 3_000, 16_379, 16_380, 25_000])


class Served:
    """The server's side of one stream: answers as the first byte of a message says."""

    def __init__(self, transport) -> None:
        self.transport = transport
        self.received: list[bytes] = []
        self.sent: list[bytes] = []
        self.status: int | None = None
        self.closes = 0

    def on_message(self, content: bytes) -> None:
        assert not self.closes
        self.received.append(content)
        if content[:1] in (b"e", b"t"):
            self.send(*[content] * (2 if content[:1] == b"t" else 1))
        elif content[:1] == b"f":
            self.send(content)
            self.finish(7)

    def on_close(self) -> None:
        self.closes += 1

    def send(self, *contents: bytes) -> None:
        if not self.over:
            self.sent.extend(contents)
        self.transport.send(contents)

    def finish(self, status: int) -> None:
        if not self.over:
            self.status = status
        self.transport.finish(status, "done")

    @property
    def over(self) -> bool:
        return self.status is not None or self.closes > 0


class Asked:
    """The client's side of one stream."""

    def __init__(self, *, watch: bool) -> None:
        self.watch = watch
        self.served: Served | None = None
        self.sent = b""
        """gRPC messages as bytes, sent so far."""
        self.contents: list[bytes] = []
        self.got = b""
        self.status: str | None = None
        self.half_closed = self.reset = self.reset_by_server = False

    @property
    def writable(self) -> bool:
        return not (self.half_closed or self.reset or self.reset_by_server)


class Conversation(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.waiting_for: list[Asked] = []
        self.asked: dict[int, Asked] = {}
        self.faults: list[object] = []
        self.to_server = b""
        self.to_client = b""
        self.pings = 0
        self.server = ServerConnection(
            handlers={"/test.Service/Call": self._serve, WATCH: self._serve},
            limits=LIMITS,
            now_s=0.0,
            wake=lambda: None,
            outlives_half_close={WATCH},
            on_error=self.faults.append,
        )
        configuration = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self.client = h2.connection.H2Connection(configuration)
        self.client.initiate_connection()
        self.exchange()

    def _serve(self, transport) -> Served:
        served = Served(transport)
        self.waiting_for.pop(0).served = served
        return served

    # The wire

    def exchange(self) -> None:
        """Carry everything both ways until nothing is left."""
        for _ in range(1_000):
            self.to_server += self.client.data_to_send()
            self.server.written(0)
            while buffers := self.server.take_output():
                self.to_client += b"".join(buffers)
                self.server.written(0)
            if not self.to_server and not self.to_client:
                return
            self.carry_to_server([len(self.to_server) or 1])
            self.carry_to_client([len(self.to_client) or 1])
        raise AssertionError("they never stop talking")

    @rule(pieces=pieces)
    def carry_to_server(self, pieces: list[int]) -> None:
        self.to_server += self.client.data_to_send()
        for size in pieces:
            self.server.receive(self.to_server[:size], 0.0)
            self.to_server = self.to_server[size:]

    @rule(pieces=pieces)
    def carry_to_client(self, pieces: list[int]) -> None:
        self.to_client += b"".join(self.server.take_output())
        self.server.written(len(self.to_client) // 2)
        # Frame by frame: the client takes its own new settings into account between reads only.
        for _ in range(sum(pieces)):
            size = 9 + int.from_bytes(self.to_client[:3], "big")
            if len(self.to_client) < size:
                break
            for event in self.client.receive_data(self.to_client[:size]):
                self.on_event(event)
            self.to_client = self.to_client[size:]

    def on_event(self, event) -> None:
        assert not isinstance(event, h2.events.ConnectionTerminated), event
        if isinstance(event, h2.events.PingAckReceived):
            self.pings -= 1
        asked = self.asked.get(getattr(event, "stream_id", None) or 0)
        if asked is None:
            return
        if isinstance(event, h2.events.DataReceived):
            asked.got += event.data
        elif isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            asked.status = dict(event.headers).get("grpc-status", asked.status)
        elif isinstance(event, h2.events.StreamReset) and event.remote_reset:
            asked.reset_by_server = True
            assert event.error_code == 0, "only to say that the rest need not be sent"

    # The client

    @rule(
        watch=st.booleans(), end=st.sampled_from([False, False, False, True]), number=st.integers()
    )
    def ask(self, watch: bool, end: bool, number: int) -> None:
        fields = [*(replaced(path=WATCH) if watch else REQUEST), ("x-id", str(number))]
        stream_id = self.client.get_next_available_stream_id()
        self.client.send_headers(stream_id, fields[: None if number % 2 else -1], end_stream=end)
        asked = self.asked[stream_id] = Asked(watch=watch)
        asked.half_closed = end
        self.waiting_for.append(asked)

    def writable(self) -> list[int]:
        return [stream_id for stream_id, asked in self.asked.items() if asked.writable]

    @precondition(lambda self: self.writable())
    @rule(
        data=st.data(),
        kind=st.sampled_from([b"e", b"e", b"t", b"k", b"f"]),
        size=sizes,
        cut=st.sampled_from([3, 1_000, 16_384]),
        padding=st.sampled_from([None, None, 0, 30]),
    )
    def say(self, data, kind: bytes, size: int, cut: int, padding: int | None) -> None:
        stream_id = data.draw(st.sampled_from(self.writable()))
        content = (kind * size)[:size]
        raw = message(content)
        cut = max(cut, size // 20)
        pad = 0 if padding is None else padding + 1
        frames = -(-len(raw) // cut)
        if len(raw) + pad * frames > self.client.local_flow_control_window(stream_id):
            return
        limit = self.client.max_outbound_frame_size - pad
        for at in range(0, len(raw), cut):
            piece = raw[at : at + min(cut, limit)] if cut <= limit else raw[at : at + cut]
            if len(piece) + pad > self.client.max_outbound_frame_size:
                half = len(piece) // 2
                if len(raw) + 2 * pad * frames > self.client.local_flow_control_window(stream_id):
                    pad, padding = 0, None
                self.client.send_data(stream_id, piece[:half], pad_length=padding)
                piece = piece[half:]
            self.client.send_data(stream_id, piece, pad_length=padding)
        self.asked[stream_id].contents.append(content)

    @precondition(lambda self: self.writable())
    @rule(data=st.data(), trailers=st.booleans())
    def half_close(self, data, trailers: bool) -> None:
        stream_id = data.draw(st.sampled_from(self.writable()))
        if trailers:
            self.client.send_headers(stream_id, [("x-trailer", "1")], end_stream=True)
        else:
            self.client.end_stream(stream_id)
        self.asked[stream_id].half_closed = True

    @precondition(lambda self: self.writable())
    @rule(data=st.data())
    def reset(self, data) -> None:
        stream_id = data.draw(st.sampled_from(self.writable()))
        self.client.reset_stream(stream_id, 2)
        self.asked[stream_id].reset = True

    @rule(data=st.data(), increment=st.sampled_from([1, 100, 20_000]), whole=st.booleans())
    def open_window(self, data, increment: int, whole: bool) -> None:
        stream_ids = [
            i for i, asked in self.asked.items() if asked.status is None and not asked.reset
        ]
        if whole or not stream_ids:
            self.client.increment_flow_control_window(increment)
            return
        self._increment(increment, data.draw(st.sampled_from(stream_ids)))

    def _increment(self, increment: int, stream_id: int) -> None:
        try:
            self.client.increment_flow_control_window(increment, stream_id)
        except h2.exceptions.StreamClosedError:
            assert self.asked[stream_id].status is not None or self.asked[stream_id].reset_by_server

    @rule(
        window=st.sampled_from([0, 1, 1_000, 65_535, 1 << 20]),
        table=st.sampled_from([0, 100, 4_096, 8_192]),
        frame_bytes=st.sampled_from([16_384, 20_000, 1 << 20]),
    )
    def change_settings(self, window: int, table: int, frame_bytes: int) -> None:
        codes = h2.settings.SettingCodes
        self.client.update_settings(
            {
                codes.INITIAL_WINDOW_SIZE: window,
                codes.HEADER_TABLE_SIZE: table,
                codes.MAX_FRAME_SIZE: frame_bytes,
            }
        )

    @rule()
    def ping(self) -> None:
        self.client.ping(b"12345678")
        self.pings += 1

    # The server

    def served(self) -> list[Served]:
        return [asked.served for asked in self.asked.values() if asked.served]

    @precondition(lambda self: self.served())
    @rule(data=st.data(), size=sizes, number=st.integers(1, 3))
    def answer_later(self, data, size: int, number: int) -> None:
        data.draw(st.sampled_from(self.served())).send(*[bytes(size)] * number)

    @precondition(lambda self: self.served())
    @rule(data=st.data())
    def finish_later(self, data) -> None:
        data.draw(st.sampled_from(self.served())).finish(9)

    # The model

    @invariant()
    def nothing_is_wrong(self) -> None:
        assert not self.faults
        assert not self.server.closed
        for asked in self.asked.values():
            if asked.served is not None:
                assert asked.contents[: len(asked.served.received)] == asked.served.received
                sent = b"".join(map(message, asked.served.sent))
                assert sent.startswith(asked.got)
                assert asked.served.closes <= 1

    def teardown(self) -> None:
        self.exchange()
        codes = h2.settings.SettingCodes
        self.client.update_settings({codes.INITIAL_WINDOW_SIZE: 1 << 22})
        self.client.increment_flow_control_window(1 << 24)
        self.exchange()
        assert self.pings == 0
        for asked in self.asked.values():
            served = asked.served
            assert served is not None, "a request was not served"
            if asked.reset:
                assert served.closes == 1
                continue
            assert asked.got == b"".join(map(message, served.sent))
            if served.status is not None:
                assert asked.status == str(served.status)
            elif asked.half_closed and not asked.watch:
                assert asked.status == "0"
            else:
                assert asked.status is None
                assert served.received == asked.contents
            assert served.closes == (0 if asked.status is None else 1)
        self.server.lost()
        assert all(served.closes == 1 for served in self.served())
        self.nothing_is_wrong_at_the_end()

    def nothing_is_wrong_at_the_end(self) -> None:
        assert not self.faults
        assert self.server._output.queued_bytes == 0
        assert self.server._streams.partial_bytes == 0


TestConversation = Conversation.TestCase
TestConversation.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
