"""The codec on bytes that no gateway sends: repeats, unknown fields, malformed messages; and its
bounds."""

from __future__ import annotations

import itertools

import pytest

from epp.core.messages import BodyMode, ImmediateReply, RequestBody, Unsupported
from epp.wire import extproc, metadata
from epp.wire.extproc import WireError, decode_request, encode_reply
from epp.wire.pb import epp_extproc_pb2 as pb
from tests.wire.extproc_oracle import DESTINATION, event_of, headers_message, metadata_message

# What repeats in one message


def join(*requests: pb.ProcessingRequest) -> bytes:
    """For protobuf, joined bytes are one merged message."""
    return b"".join(request.SerializeToString() for request in requests)


def request_of(**fields) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(**fields)


LB = {"envoy.lb": {f"{DESTINATION}-served": "a:1"}}
HINT = {"envoy.lb.subset_hint": {f"{DESTINATION}-subset": ["b:1"]}}
MORE = {"envoy.lb.subset_hint": {f"{DESTINATION}-subset": ["c:1"], "else": 1}}


def with_metadata(spaces) -> pb.ProcessingRequest:
    request = pb.ProcessingRequest()
    for namespace, values in spaces.items():
        request.metadata_context.filter_metadata[namespace].update(values)
    return request


@pytest.mark.parametrize(
    "requests",
    [
        (request_of(request_body=pb.HttpBody(body=b"a")),) * 2,
        (
            request_of(request_body=pb.HttpBody(body=b"a", end_of_stream=True)),
            request_of(request_body=pb.HttpBody()),
        ),
        (
            request_of(request_body=pb.HttpBody(body=b"a", end_of_stream=True)),
            request_of(response_body=pb.HttpBody(body=b"b")),
            request_of(request_body=pb.HttpBody(body=b"c")),
        ),
        (
            request_of(request_headers=pb.HttpHeaders(end_of_stream=True)),
            pb.ProcessingRequest.FromString(headers_message({"key": "a", "raw_value": b"1"})),
            pb.ProcessingRequest.FromString(headers_message({"key": "b", "raw_value": b"2"})),
        ),
        (with_metadata(LB), with_metadata(HINT)),
        (with_metadata(HINT), with_metadata(LB), with_metadata(MORE)),
        (
            request_of(protocol_config=pb.ProtocolConfiguration(request_body_mode=2)),
            request_of(protocol_config=pb.ProtocolConfiguration(response_body_mode=4)),
        ),
        (request_of(protocol_config=pb.ProtocolConfiguration(request_body_mode=2)),) * 2,
    ],
)
def test_what_repeats_is_merged_as_protobuf_merges_it(requests) -> None:
    data = join(*requests)
    assert decode_request(data) == event_of(pb.ProcessingRequest.FromString(data))


def delimited(tag: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    assert len(content) < 128
    return bytes((tag, len(content))) + content


def hinting(value: bytes) -> bytes:
    """A message whose subset hint is this serialized `google.protobuf.Value`."""
    key = f"{DESTINATION}-subset".encode()
    entry = delimited(0x0A, delimited(0x0A, key), delimited(0x12, value))
    space = delimited(0x0A, delimited(0x0A, b"envoy.lb.subset_hint"), delimited(0x12, entry))
    return delimited(0x42, space)


STRING, LIST = delimited(0x1A, b"a:1"), delimited(0x32, delimited(0x0A, delimited(0x1A, b"b:1")))


def test_a_value_that_comes_twice_in_one_entry_is_merged() -> None:
    key = f"{DESTINATION}-subset".encode()
    values = delimited(0x12, LIST), delimited(0x12, LIST)
    entry = delimited(0x0A, delimited(0x0A, key), *values)
    space = delimited(0x0A, delimited(0x0A, b"envoy.lb.subset_hint"), delimited(0x12, entry))
    data = delimited(0x42, space)
    assert decode_request(data) == event_of(pb.ProcessingRequest.FromString(data))
    assert decode_request(data).subset == ("b:1", "b:1")


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_metadata_value_that_repeats_is_read_as_protobuf_reads_it(length) -> None:
    number, struct = b"\x11" + bytes(8), b"\x2a\x00"
    for parts in itertools.product((STRING, LIST, number, b"\x20\x01", struct), repeat=length):
        if sum(map(len, parts)) > 30:
            continue
        data = hinting(b"".join(parts))
        assert decode_request(data) == event_of(pb.ProcessingRequest.FromString(data))


# Malformed bytes


@pytest.mark.parametrize(
    ("data", "meaning"),
    [
        (b"\x22", "a tag and nothing"),
        (b"\x22\x05", "a body that does not come"),
        (b"\x22\x80", "half a length"),
        (b"\x22\xff\xff\xff\xff\x0f", "a length of 4 GiB"),
        (b"\x22" + b"\xff" * 9 + b"\x01", "a length of 2**64 - 1"),
        (b"\x22" + b"\x80" * 10 + b"\x00", "a length in eleven bytes"),
        (b"\x22\x0b\x10" + b"\xff" * 9 + b"\x02", "a flag over 64 bits"),
        (b"\x22\x04\x0a\x05ab", "a body longer than its message"),
        (b"\x22\x04\x0a\x05abcde", "a body longer than its message, in bytes of the next field"),
        (b"\x22\x02\x08\x01", "a body that is a number"),
        (b"\x22\x02\x12\x00", "an end of stream that is bytes"),
        (b"\x20\x01", "a request body that is a number"),
        (b"\x40\x01", "metadata that is a number"),
        (b"\x12\x02\x08\x01", "a header map that is a number"),
        (b"\x12\x04\x0a\x02\x08\x01", "a header that is a number"),
        (b"\x12\x06\x0a\x04\x0a\x02\x08\x01", "a header name that is a number"),
        (b"\x12\x06\x0a\x04\x0a\x02\x0a\x05", "a header name longer than its header"),
        (b"\x12\x04\x0a\x02\x0a\x05", "a header longer than its list"),
        (b"\x12\x02\x0a\x05", "a header map longer than its message"),
        (b"\x12\x02\x0a\x02\x42\x00", "a header map longer than its message, before a field"),
        (b"\x12\x04\x0a\x02\x0a\x02\x42\x00", "a header longer than its list, before a field"),
        (b"\x5a\x02\x0a\x00", "a body mode that is bytes"),
        (b"\x5a\x01\x08", "half a body mode"),
        (b"\x00\x00", "field 0"),
        (b"\x02\x00", "field 0 with bytes"),
        (b"\x7b\x7c", "a group"),
        (b"\x7c", "the end of a group"),
        (b"\x7e\x00", "wire type 6"),
        (b"\x7f\x00", "wire type 7"),
        (b"\x79\x00", "half a fixed64"),
        (b"\x7d\x00", "half a fixed32"),
        (b"\x7a\x01", "half an unknown field"),
        (b"\xf8\x80\x80\x80\x80\x00\x00", "a tag in six bytes"),
        (b"\xf8\xff\xff\xff\x1f\x00", "a tag over 32 bits"),
        (b"\xa2\x00\x00", "a known tag in two bytes"),
        (b"\x22\x01\xff\x2a\x00", "a malformed member that is superseded"),
        (hinting(b"\x18\x01"), "a string that is a number"),
        (hinting(b"\x32\x02\x0a\x05"), "a list item longer than its list"),
    ],
)
def test_malformed_bytes_are_refused(data, meaning) -> None:
    with pytest.raises(WireError):
        decode_request(data)


def test_the_refusal_is_a_value_error_that_quotes_no_content() -> None:
    data = b"\x22\x0f\x0a\x20secret-prompt"
    with pytest.raises(ValueError, match="longer than the message") as caught:
        decode_request(data)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "unknown",
    [
        b"\x78\x01",
        b"\x79" + bytes(8),
        b"\x7a\x03abc",
        b"\x7d" + bytes(4),
        b"\xf8\x07\x80\x80\x01",
        b"\xfa\xff\xff\xff\x0f\x00",
        b"\x4a\x00",
        b"\x50\x01",
        b"\x50\x80\x00",
    ],
)
def test_unknown_fields_of_every_wire_type_are_skipped(unknown) -> None:
    body = b"\x22\x03\x0a\x01x"
    assert decode_request(unknown + body + unknown) == RequestBody(body=b"x")


def test_a_member_we_do_not_know_is_unsupported() -> None:
    assert decode_request(b"\x7a\x00") == Unsupported()
    assert decode_request(b"") == Unsupported()


def test_a_body_of_megabytes_comes_out_as_it_went_in() -> None:
    body = bytes(range(256)) * 12_000
    request = pb.ProcessingRequest(request_body=pb.HttpBody(body=body))
    assert decode_request(request.SerializeToString()) == RequestBody(body=body)


@pytest.mark.parametrize(
    "data",
    [
        b"\x22\x02\x10\x02",
        b"\x22\x03\x10\x80\x01",
        b"\x12\x02\x18\x02",
        b"\x5a\x06\x08\x84\x80\x80\x80\x10",
    ],
)
def test_numbers_out_of_their_range_are_read_as_protobuf_reads_them(data) -> None:
    event = decode_request(data)
    assert event == event_of(pb.ProcessingRequest.FromString(data))
    assert getattr(event, "end_of_stream", True)
    assert event.modes in (None, (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE))


def test_lengths_longer_than_they_need_be_are_read() -> None:
    assert decode_request(b"\x22\x86\x80\x00\x0a\x82\x80\x00ab") == RequestBody(body=b"ab")


# Bounds


def caches():
    things = [*vars(extproc).values(), *vars(metadata).values()]
    return {thing for thing in things if hasattr(thing, "cache_info")}


def test_every_cache_has_a_size() -> None:
    assert len(caches()) == 8
    assert all(cache.cache_info().maxsize <= 4096 for cache in caches())


def test_long_metadata_and_long_headers_are_not_kept() -> None:
    def entries() -> int:
        return sum(cache.cache_info().currsize for cache in caches())

    long = metadata_message("envoy.lb", f"{DESTINATION}-served", "long" * 300)
    short = metadata_message("envoy.lb", f"{DESTINATION}-served", "short")
    before = entries()
    assert decode_request(long).served == "long" * 300
    encode_reply(ImmediateReply(status=200, headers=(("x-long-one", "v" * 300),)))
    assert entries() == before
    decode_request(short)
    assert entries() == before + 1


def test_an_immediate_reply_must_be_able_to_end_a_request() -> None:
    with pytest.raises(AssertionError):
        encode_reply(ImmediateReply(status=100))
