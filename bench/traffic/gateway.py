"""The messages Envoy sends for one request, as bytes: for benches without a network.

Shape and order are those of recorded streams of Envoy 1.40 with full-duplex bodies (the tests'
`data/envoy`): body pieces of at most 32 KiB, an empty message at the end of each body, and with
each message of the response the metadata by which the endpoint was picked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from epp.wire.pb import epp_extproc_pb2 as pb

PIECE_BYTES_MAX = 32_768
_DUPLEX = 4
_DESTINATION = "x-gateway-destination-endpoint"

REQUEST_HEADERS: Mapping[str, str] = {
    ":authority": "llm.example.com",
    ":path": "/v1/chat/completions",
    ":method": "POST",
    ":scheme": "http",
    "accept": "application/json",
    "content-type": "application/json",
    "user-agent": "OpenAI/Python 2.8.0",
    "authorization": "Bearer sk-none",
    "x-stainless-lang": "python",
    "x-stainless-runtime": "CPython",
    "x-stainless-async": "async:asyncio",
    "x-stainless-retry-count": "0",
    "x-forwarded-proto": "http",
}


def request_messages(body: bytes, number: int) -> list[bytes]:
    """Headers, body, end; `number` makes the request id."""
    headers = {
        **REQUEST_HEADERS,
        "content-length": str(len(body)),
        "x-request-id": f"986c03a3-db63-450e-ab80-{number:012x}",
    }
    first = pb.ProcessingRequest(
        request_headers=_headers(headers),
        metadata_context=pb.Metadata(),
        protocol_config=pb.ProtocolConfiguration(
            request_body_mode=_DUPLEX, response_body_mode=_DUPLEX
        ),
    )
    pieces = [body[at : at + PIECE_BYTES_MAX] for at in range(0, len(body), PIECE_BYTES_MAX)]
    bodies = [pb.HttpBody(body=piece) for piece in pieces] + [pb.HttpBody(end_of_stream=True)]
    messages = [
        pb.ProcessingRequest(request_body=b, metadata_context=pb.Metadata()) for b in bodies
    ]
    return [message.SerializeToString() for message in (first, *messages)]


def response_messages(address: str, chunks: Sequence[bytes], content_type: str) -> list[bytes]:
    """Headers, one message per chunk, end.

    Args:
        address: of the endpoint that was picked and served.
    """
    headers = {
        ":status": "200",
        "content-type": content_type,
        "x-envoy-upstream-service-time": "1",
    }
    metadata = pb.Metadata()
    served = {_DESTINATION: address, f"{_DESTINATION}-served": address}
    metadata.filter_metadata["envoy.lb"].update(served)
    bodies = [pb.HttpBody(body=chunk) for chunk in chunks] + [pb.HttpBody(end_of_stream=True)]
    messages = [
        pb.ProcessingRequest(response_headers=_headers(headers), metadata_context=metadata),
        *(pb.ProcessingRequest(response_body=b, metadata_context=metadata) for b in bodies),
    ]
    return [message.SerializeToString() for message in messages]


def _headers(headers: Mapping[str, str]) -> pb.HttpHeaders:
    made = pb.HttpHeaders()
    for name, value in headers.items():
        made.headers.headers.add(key=name, raw_value=value.encode())
    return made
