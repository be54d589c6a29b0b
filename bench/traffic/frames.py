"""Streams as a gateway sends them, encoded before they are needed, and what must come back.

Frames get their stream id when they are sent (`Frames.bytes_for`), which is one join. Replies are
decoded by the generated classes; those to response messages are few and all alike, so a right one
is decoded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from bench.traffic.gateway import request_messages, response_messages
from bench.traffic.prompts import Prompts
from bench.traffic.upstream import EVENT
from epp.wire.pb import epp_extproc_pb2 as pb

FRAME_BYTES_MAX = 16_384
BODIES = {1: 512, 16: 256, 128: 96}
"""Prompt KiB (as far as it goes) -> bodies made before measuring; they repeat after that."""
PATH = b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DESTINATION = "x-gateway-destination-endpoint"

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_RESPONSE_BODY = pb.ProcessingResponse.DESCRIPTOR.fields_by_name["response_body"].name


def frame(kind: int, flags: int, payload: bytes, stream: bytes = bytes(4)) -> bytes:
    """One HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream + payload


def grpc_message(data: bytes) -> bytes:
    """With gRPC's five bytes in front."""
    return b"\0" + len(data).to_bytes(4, "big") + data


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value


HEADER_BLOCK = (
    b"\x83\x86\x04"  # POST, http, and :path by its index
    + bytes((len(PATH),))
    + PATH
    + b"".join(
        (
            _literal(b":authority", b"epp"),
            _literal(b"te", b"trailers"),
            _literal(b"content-type", b"application/grpc"),
        )
    )
)


class Frames:
    """Frames of one stream, but for its id; `payload` is their data."""

    def __init__(self, payload: bytes, *, opening: bool = False) -> None:
        self.payload = payload
        self._parts = [b""]
        if opening:
            self._add(HEADERS, END_HEADERS, HEADER_BLOCK)
        for at in range(0, len(payload), FRAME_BYTES_MAX):
            self._add(DATA, 0, payload[at : at + FRAME_BYTES_MAX])

    def _add(self, kind: int, flags: int, payload: bytes) -> None:
        encoded = frame(kind, flags, payload)
        self._parts[-1] += encoded[:5]
        self._parts.append(encoded[9:])

    def bytes_for(self, stream: bytes) -> bytes:
        """Encoded, with this stream id."""
        return stream.join(self._parts)


class Request:
    """One request as Envoy shows it to us."""

    def __init__(self, body: bytes, number: int, *, duplex: bool) -> None:
        self.body = body
        messages = request_messages(body, number)
        if not duplex:
            first = pb.ProcessingRequest.FromString(messages[0])
            first.protocol_config.response_body_mode = 0
            messages[0] = first.SerializeToString()
        self.frames = Frames(b"".join(map(grpc_message, messages)), opening=True)


@lru_cache(maxsize=12)
def requests(prompt_bytes: int, duplex: bool) -> list[Request]:
    """Requests to cycle through, made once per process."""
    prompts = Prompts(prompt_bytes, stream=duplex)
    wanted = [count for kib, count in BODIES.items() if prompt_bytes <= kib * 1024]
    many = wanted[0] if wanted else min(BODIES.values())
    return [Request(prompts.next(), number, duplex=duplex) for number in range(many)]


@lru_cache(maxsize=1024)
def response(address: str, chunks: int) -> Sequence[Frames]:
    """What follows the answered request: one message each, its answer awaited."""
    messages = response_messages(address, [EVENT] * chunks, "text/event-stream")
    return [Frames(grpc_message(data)) for data in (messages if chunks else messages[:1])]


class WrongAnswer(Exception):  # noqa: N818 - what it is
    """A reply is not what it should be; the message says how."""


def picked(reply: bytes) -> str:
    """The address in the answer to request headers."""
    message = pb.ProcessingResponse.FromString(reply)
    if message.WhichOneof("response") != "request_headers":
        raise WrongAnswer(f"{message.WhichOneof('response')} before the pick")
    for option in message.request_headers.response.header_mutation.set_headers:
        if option.header.key == DESTINATION:
            return bytes(option.header.raw_value).decode()
    raise WrongAnswer("no pick")


def forwarded(reply: bytes) -> tuple[bytes, bool]:
    """A piece of request body sent on, and whether it is the last."""
    streamed = pb.ProcessingResponse.FromString(reply).request_body.response
    piece = streamed.body_mutation.streamed_response
    return piece.body, piece.end_of_stream


@lru_cache(maxsize=64)
def check_response_reply(reply: bytes, number: int, chunks: int) -> None:
    """Raise WrongAnswer unless it answers message `number` of the response; right ones, which are
    few and all alike, are remembered."""
    message = pb.ProcessingResponse.FromString(reply)
    which = message.WhichOneof("response")
    if number == 0:
        if which != "response_headers":
            raise WrongAnswer(f"{which} for response headers")
        return
    if which != _RESPONSE_BODY:
        raise WrongAnswer(f"{which} for a response chunk")
    piece = message.response_body.response.body_mutation.streamed_response
    last = number > chunks
    if (piece.body, piece.end_of_stream) != (b"" if last else EVENT, last):
        raise WrongAnswer("a response chunk did not come back as it was")
