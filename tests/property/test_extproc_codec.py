"""The codec on random messages, random bytes and everything between, with protobuf as oracle."""

from __future__ import annotations

from random import Random

from google.protobuf import struct_pb2
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from hypothesis import given, settings, strategies as st

from epp.core.messages import (
    BodyReply,
    HeadersReply,
    ImmediateReply,
    Mutation,
    StreamedBodyReply,
    TrailersReply,
)
from epp.wire.extproc import WireError, decode_request, encode_reply
from epp.wire.pb import epp_extproc_pb2 as pb
from epp.wire.protobuf import delimited, read_varint, varint
from tests.wire.extproc_oracle import DESTINATION, LENIENT, event_of, response_of

# Messages as protobuf builds them

texts = st.one_of(st.text(max_size=12), st.text("aB:-1é", min_size=100, max_size=300))
header_values = st.builds(
    pb.HeaderValue,
    key=st.one_of(st.sampled_from([":path", "X-Twice", "x-twice", ""]), texts),
    value=st.one_of(st.just(""), texts),
    raw_value=st.one_of(
        st.just(b""), st.binary(max_size=10), st.binary(min_size=110, max_size=300)
    ),
)
header_maps = st.builds(pb.HeaderMap, headers=st.lists(header_values, max_size=6))
http_headers = st.builds(pb.HttpHeaders, headers=header_maps, end_of_stream=st.booleans())
http_bodies = st.builds(
    pb.HttpBody,
    body=st.one_of(st.binary(max_size=20), st.binary(min_size=120, max_size=400)),
    end_of_stream=st.booleans(),
)
http_trailers = st.builds(pb.HttpTrailers, trailers=header_maps)
members = st.one_of(
    *(
        st.fixed_dictionaries({name: content})
        for name, content in {
            "request_headers": http_headers,
            "response_headers": http_headers,
            "request_body": http_bodies,
            "response_body": http_bodies,
            "request_trailers": http_trailers,
            "response_trailers": http_trailers,
        }.items()
    ),
    st.just({}),
)
addresses = st.one_of(
    st.sampled_from(["10.0.0.1:8000", "a:1, b:2", " ", "", ",,", "[::1]:1\t", "é:1"]),
    st.text(max_size=5),
)
json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(allow_nan=False), addresses),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=5,
)
values = st.one_of(addresses, st.lists(addresses, max_size=3), json)
keys = st.sampled_from(
    [f"{DESTINATION}{end}" for end in ("", "-subset", "-served", "-s")]
    + ["x-gateway-inference-pool"]
)
namespaces = st.sampled_from(["envoy.lb", "envoy.lb.subset_hint", "other"])


@st.composite
def structs(draw) -> struct_pb2.Struct:
    struct = struct_pb2.Struct()
    struct.update(draw(st.dictionaries(keys, values, max_size=3)))
    return struct


metadata = st.builds(
    pb.Metadata, filter_metadata=st.dictionaries(namespaces, structs(), max_size=3)
)
modes = st.integers(min_value=-(2**31), max_value=2**31 - 1) | st.integers(0, 6)
configs = st.builds(
    pb.ProtocolConfiguration,
    request_body_mode=modes,
    response_body_mode=modes,
    send_body_without_waiting_for_header_response=st.booleans(),
)


@st.composite
def requests(draw) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(
        **draw(members),
        metadata_context=draw(st.none() | metadata),
        protocol_config=draw(st.none() | configs),
        observability_mode=draw(st.booleans()),
        attributes=draw(st.dictionaries(st.text(max_size=3), structs(), max_size=1)),
    )


# The same bytes with something done to them


@st.composite
def edited(draw) -> bytes:
    """A valid message after a few byte edits: changed, cut, doubled, put in."""
    data = draw(requests()).SerializeToString()
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        to = min(len(data), at + draw(st.integers(0, 8)))
        piece = draw(st.sampled_from([b"", data[at:to] * 2, bytes([0x80]), bytes([0x0A])]))
        data = data[:at] + draw(st.just(piece) | st.binary(max_size=3)) + data[to:]
    return data


FILLING = {0: b"\x80\x01", 1: bytes(8), 2: b"\x02\x0a\x00", 5: bytes(4)}


def unknown_fields(rng: Random, descriptor) -> bytes:
    """Up to two fields whose numbers the message does not use, of any wire type but the groups.

    None in the entry of a map: what it then means is where protobuf's implementations differ (upb
    drops the entry, others the field, as we do)."""
    if descriptor.GetOptions().map_entry:
        return b""
    fields = []
    for _ in range(rng.randrange(3)):
        number = rng.choice([rng.randrange(1, 2**29), rng.randrange(1, 20)])
        if number not in descriptor.fields_by_number:
            kind = rng.choice(sorted(FILLING))
            fields.append(varint(number << 3 | kind) + FILLING[kind])
    return b"".join(fields)


def spliced(rng: Random, data: bytes, descriptor) -> bytes:
    """`data` with unknown fields before, between and behind its fields, at every depth."""
    parts, at = [unknown_fields(rng, descriptor)], 0
    while at < len(data):
        start = at
        tag, at = read_varint(data, at)
        field = descriptor.fields_by_number[tag >> 3]
        if tag & 7 == 2:
            size, at = read_varint(data, at)
            content, at = data[at : at + size], at + size
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                content = spliced(rng, content, field.message_type)
            parts.append(delimited(tag, content))
        else:
            at = at + 8 if tag & 7 == 1 else read_varint(data, at)[1]
            parts.append(data[start:at])
        parts.append(unknown_fields(rng, descriptor))
    return b"".join(parts)


@given(requests())
def test_a_message_reads_as_protobuf_reads_it(request) -> None:
    assert decode_request(request.SerializeToString()) == event_of(request)


@given(st.lists(requests(), min_size=2, max_size=4))
def test_joined_messages_read_as_one_merged_message(several) -> None:
    data = b"".join(request.SerializeToString() for request in several)
    assert decode_request(data) == event_of(pb.ProcessingRequest.FromString(data))


@given(requests(), st.integers(0, 2**32))
def test_unknown_fields_anywhere_change_nothing(request, seed) -> None:
    data = spliced(Random(seed), request.SerializeToString(), request.DESCRIPTOR)
    assert decode_request(data) == event_of(request)
    assert event_of(pb.ProcessingRequest.FromString(data)) == event_of(request)


def metadata_is_certain(data: bytes) -> bool:
    """Whether protobuf reads all of `data`, and no unknown field is in its metadata (see above)."""
    try:
        metadata = pb.ProcessingRequest.FromString(data).metadata_context
    except DecodeError:
        return False
    size = metadata.ByteSize()
    metadata.DiscardUnknownFields()
    return metadata.ByteSize() == size


def check_like_the_oracle(data: bytes) -> bool:
    """Decode `data`; what we read, protobuf must read, and the same. Whether it was readable."""
    try:
        event = decode_request(data)
    except WireError:
        return False
    if metadata_is_certain(data):
        assert event == event_of(pb.ProcessingRequest.FromString(data))
    else:
        event.subset = event.served = None
        assert event == event_of(LENIENT.FromString(data), with_metadata=False)
    return True


@settings(max_examples=250)
@given(edited() | st.binary(max_size=40))
def test_whatever_comes_is_read_like_protobuf_or_refused(data) -> None:
    check_like_the_oracle(data)


@settings(max_examples=50)
@given(requests())
def test_a_message_cut_anywhere_is_read_like_protobuf_or_refused(request) -> None:
    data = request.SerializeToString()
    for end in range(len(data)):
        try:
            LENIENT.FromString(data[:end])
            readable = True
        except DecodeError:
            readable = False
        assert check_like_the_oracle(data[:end]) == readable, end


# Replies

names = st.text("abc-:", min_size=1, max_size=8)
latin1 = st.text(st.characters(max_codepoint=255), max_size=20) | st.just("v" * 300)
pairs = st.lists(st.tuples(names, latin1), max_size=3).map(tuple)
mutations = st.builds(
    Mutation,
    set_headers=pairs,
    remove_headers=st.lists(names, max_size=3).map(tuple),
    destination=st.none() | st.text(max_size=10),
    scores=st.none() | st.dictionaries(st.text(max_size=5), st.floats(), max_size=3),
    clear_route_cache=st.booleans(),
)
replies = st.one_of(
    st.builds(HeadersReply, request=st.booleans(), mutation=mutations),
    st.builds(
        BodyReply,
        request=st.booleans(),
        mutation=mutations,
        body=st.none() | st.binary(max_size=300),
    ),
    st.builds(
        StreamedBodyReply,
        request=st.booleans(),
        body=st.integers(0, 20_000).map(bytes),
        end_of_stream=st.booleans(),
    ),
    st.builds(TrailersReply, request=st.booleans(), destination=st.none() | st.text(max_size=10)),
    st.builds(
        ImmediateReply,
        status=st.integers(200, 599),
        body=st.binary(max_size=300),
        headers=pairs,
        details=st.text(max_size=10),
    ),
)


@given(replies)
def test_a_reply_reads_back_as_what_it_says(reply) -> None:
    data = encode_reply(reply)
    assert pb.ProcessingResponse.FromString(data) == response_of(reply)
    assert encode_reply(reply) == data
