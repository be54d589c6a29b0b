"""What the codec's tests compare it with: generated protobuf code, and plain readers built on it.

`event_of` and `response_of` say with protobuf's own objects what `decode_request` and
`encode_reply` say with bytes. `LENIENT` is `ProcessingRequest` with `bytes` in the place of
everything the codec does not check: UTF-8 text, metadata, attributes, trailers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from epp.core import messages as core
from epp.wire.pb import epp_extproc_pb2 as pb

RECORDED = sorted((Path(__file__).parent / "data" / "envoy").glob("*.c2s.bin"))

DESTINATION = "x-gateway-destination-endpoint"


def headers_message(*headers: dict, **fields) -> bytes:
    """A serialized `ProcessingRequest` with these request headers."""
    request = pb.ProcessingRequest(**fields)
    request.request_headers.headers.SetInParent()
    for header in headers:
        request.request_headers.headers.headers.add(**header)
    return request.SerializeToString()


def metadata_message(namespace: str, key: str, value) -> bytes:
    """A serialized `ProcessingRequest` with an empty body and this one value of metadata."""
    request = pb.ProcessingRequest(request_body=pb.HttpBody())
    request.metadata_context.filter_metadata[namespace].update({key: value})
    return request.SerializeToString()


def recorded_messages(path: Path) -> Iterator[bytes]:
    """The gRPC messages of one recorded HTTP/2 connection, in order of their last byte."""
    raw, at = path.read_bytes(), len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    pending: dict[int, bytes] = {}
    while at < len(raw):
        size, kind = int.from_bytes(raw[at : at + 3]), raw[at + 3]
        stream = int.from_bytes(raw[at + 5 : at + 9])
        payload, at = raw[at + 9 : at + 9 + size], at + 9 + size
        if kind != 0:  # DATA
            continue
        data = pending.pop(stream, b"") + payload
        while len(data) >= 5 and len(data) >= 5 + (length := int.from_bytes(data[1:5])):
            yield data[5 : 5 + length]
            data = data[5 + length :]
        pending[stream] = data
    assert not any(pending.values())


def _lenient_class():
    """`ProcessingRequest` in a pool of its own, with `bytes` for what the codec leaves unread."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    file.name = "lenient.proto"
    del file.dependency[:]
    kept = {
        "HeaderValue",
        "HeaderMap",
        "HttpHeaders",
        "HttpBody",
        "ProcessingMode",
        "ProtocolConfiguration",
        "ProcessingRequest",
    }
    messages = [message for message in file.message_type if message.name in kept]
    del file.message_type[:]
    file.message_type.extend(messages)
    unread = {"metadata_context", "attributes", "request_trailers", "response_trailers"}
    for message in file.message_type:
        del message.nested_type[:]
        for field in message.field:
            if field.name in unread or field.type == field.TYPE_STRING:
                field.type = field.TYPE_BYTES
                field.ClearField("type_name")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName("epp.extproc.v3.ProcessingRequest")
    )


LENIENT = _lenient_class()


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


def _headers(header_map) -> dict[str, str]:
    return {
        _bytes(header.key).lower().decode("latin-1"): (
            header.raw_value or _bytes(header.value)
        ).decode("latin-1")
        for header in header_map.headers
    }


def _metadata_value(message: pb.ProcessingRequest, namespace: str, key: str):
    spaces = message.metadata_context.filter_metadata
    if namespace not in spaces or key not in spaces[namespace].fields:
        return None
    return spaces[namespace].fields[key]


def _subset(message: pb.ProcessingRequest) -> tuple[str, ...] | None:
    value = _metadata_value(message, "envoy.lb.subset_hint", f"{DESTINATION}-subset")
    if value is None:
        return None
    strings = []
    if value.WhichOneof("kind") == "string_value":
        strings = [value.string_value]
    elif value.WhichOneof("kind") == "list_value":
        strings = [
            item.string_value
            for item in value.list_value.values
            if item.WhichOneof("kind") == "string_value"
        ]
    split = [part.strip() for string in strings for part in string.split(",")]
    return tuple(part for part in split if part)


def event_of(message, *, with_metadata: bool = True) -> core.Event:
    """The event that a parsed `ProcessingRequest` (or `LENIENT`, without metadata) means."""
    member = message.WhichOneof("request")
    content = getattr(message, member) if member else None
    if member in ("request_headers", "response_headers"):
        kind = core.RequestHeaders if member == "request_headers" else core.ResponseHeaders
        event = kind(headers=_headers(content.headers), end_of_stream=content.end_of_stream)
    elif member in ("request_body", "response_body"):
        kind = core.RequestBody if member == "request_body" else core.ResponseBody
        event = kind(body=content.body, end_of_stream=content.end_of_stream)
    elif member == "request_trailers":
        event = core.RequestTrailers()
    elif member == "response_trailers":
        event = core.ResponseTrailers()
    else:
        event = core.Unsupported()
    if message.HasField("protocol_config"):
        config = message.protocol_config
        event.modes = tuple(
            core.BodyMode(mode) if 0 <= mode <= 5 else core.BodyMode.STREAMED
            for mode in (config.request_body_mode, config.response_body_mode)
        )
    if with_metadata:
        event.subset = _subset(message)
        value = _metadata_value(message, "envoy.lb", f"{DESTINATION}-served")
        event.served = (value.string_value or None) if value is not None else None
        value = _metadata_value(message, "envoy.lb", "x-gateway-inference-pool")
        event.pool = (value.string_value or None) if value is not None else None
    return event


def _add_headers(mutation: pb.HeaderMutation, headers) -> None:
    for name, value in headers:
        raw = value if isinstance(value, bytes) else value.encode("latin-1")
        mutation.set_headers.add(
            header=pb.HeaderValue(key=name, raw_value=raw),
            append_action=pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
        )


def _mutate(response: pb.ProcessingResponse, common: pb.CommonResponse, mutation) -> None:
    common.SetInParent()
    headers = [*mutation.set_headers]
    lb = {}
    if mutation.destination is not None:
        headers.append((DESTINATION, mutation.destination.encode()))
        lb[DESTINATION] = mutation.destination
    if mutation.scores is not None:
        lb[f"{DESTINATION}-scores"] = {
            address: score for address, score in mutation.scores.items() if math.isfinite(score)
        }
    if headers or mutation.remove_headers:
        _add_headers(common.header_mutation, headers)
        common.header_mutation.remove_headers.extend(mutation.remove_headers)
    if mutation.clear_route_cache:
        common.clear_route_cache = True
    if lb:
        response.dynamic_metadata.update({"envoy.lb": lb})


def response_of(reply: core.Reply) -> pb.ProcessingResponse:
    """The `ProcessingResponse` that a reply means."""
    response = pb.ProcessingResponse()
    side = "request" if getattr(reply, "request", False) else "response"
    if isinstance(reply, core.HeadersReply):
        _mutate(response, getattr(response, f"{side}_headers").response, reply.mutation)
    elif isinstance(reply, core.BodyReply):
        common = getattr(response, f"{side}_body").response
        _mutate(response, common, reply.mutation)
        if reply.body is not None:
            common.body_mutation.body = reply.body
    elif isinstance(reply, core.StreamedBodyReply):
        mutation = getattr(response, f"{side}_body").response.body_mutation
        mutation.streamed_response.SetInParent()
        mutation.streamed_response.body = reply.body
        mutation.streamed_response.end_of_stream = reply.end_of_stream
    elif isinstance(reply, core.TrailersReply):
        getattr(response, f"{side}_trailers").SetInParent()
        if reply.destination is not None:
            response.dynamic_metadata.update({"envoy.lb": {DESTINATION: reply.destination}})
    else:
        immediate = response.immediate_response
        immediate.status.code = reply.status
        immediate.body, immediate.details = reply.body, reply.details
        if reply.headers:
            _add_headers(immediate.headers, reply.headers)
    return response
