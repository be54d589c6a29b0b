"""The codec against recorded bytes, generated code, a second implementation, and known failures."""

from __future__ import annotations

import itertools
import types
import warnings

import pytest

from epp.core.messages import (
    NO_MUTATION,
    BodyMode,
    BodyReply,
    HeadersReply,
    ImmediateReply,
    Mutation,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    StreamedBodyReply,
    TrailersReply,
    Unsupported,
)
from epp.wire.extproc import decode_request, encode_reply
from epp.wire.pb import epp_extproc_pb2 as pb
from tests.wire.extproc_oracle import (
    DESTINATION,
    RECORDED,
    event_of,
    headers_message,
    metadata_message,
    recorded_messages,
    response_of,
)

PICK = Mutation(
    set_headers=(("x-model", "tiny"), ("content-length", "12")),
    remove_headers=("x-gateway-destination-endpoint-subset", "x-prefiller-host-port"),
    destination="10.0.0.1:8000,[fd00::10]:8000",
    clear_route_cache=True,
)
REPLIES = [
    *(HeadersReply(request=side) for side in (True, False)),
    *(HeadersReply(request=side, mutation=PICK) for side in (True, False)),
    HeadersReply(request=True, mutation=Mutation(remove_headers=("a",))),
    HeadersReply(request=True, mutation=Mutation(clear_route_cache=True)),
    HeadersReply(request=True, mutation=Mutation(destination="h:1", scores={"h:1": 0.25})),
    HeadersReply(request=True, mutation=Mutation(scores={"h:1": 0.25, "g:2": -3.0})),
    HeadersReply(request=True, mutation=Mutation(scores={})),
    *(BodyReply(request=side) for side in (True, False)),
    *(BodyReply(request=side, mutation=PICK) for side in (True, False)),
    *(
        BodyReply(side, mutation, body)
        for side in (True, False)
        for mutation in (NO_MUTATION, PICK)
        for body in (b"", b"{}", b"x" * 70_000)
    ),
    *(
        StreamedBodyReply(request=side, body=body, end_of_stream=end)
        for side in (True, False)
        for body in (b"", b"x", b"x" * 113, b"x" * 127, b"x" * 128, b"x" * 62_000, b"x" * 3_000_000)
        for end in (True, False)
    ),
    *(TrailersReply(request=side) for side in (True, False)),
    TrailersReply(request=True, destination="10.0.0.1:8000"),
    ImmediateReply(status=503),
    ImmediateReply(
        status=429,
        body=b'{"error": "\xc3\xa9"}',
        headers=(("retry-after", "1"), ("content-type", "application/json")),
        details="rejected-saturated",
    ),
]


@pytest.fixture(scope="module")
def edp():
    """The envoy-data-plane package; slow to import, and its import warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import envoy_data_plane.envoy.config.core.v3 as core
        import envoy_data_plane.envoy.service.ext_proc.v3 as ext_proc
        import envoy_data_plane.google.protobuf as google
    return types.SimpleNamespace(core=core, ext_proc=ext_proc, google=google)


# Recorded bytes


def test_all_recorded_connections_are_here() -> None:
    assert len(RECORDED) == 14


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.split(".")[0])
def test_recorded_messages_of_envoy_read_as_protobuf_reads_them(path) -> None:
    messages = list(recorded_messages(path))
    assert messages
    for data in messages:
        assert decode_request(data) == event_of(pb.ProcessingRequest.FromString(data))


def kinds_of(name: str) -> list[str]:
    (path,) = (path for path in RECORDED if path.name == f"{name}.c2s.bin")
    return [type(decode_request(data)).__name__ for data in recorded_messages(path)]


def test_a_recorded_post_with_trailers_has_all_phases() -> None:
    assert kinds_of("post_1k_http2_trailers") == [
        "RequestHeaders",
        "RequestBody",
        "RequestTrailers",
        "ResponseHeaders",
        "ResponseBody",
        "ResponseBody",
    ]


def test_the_recorded_subset_and_modes_are_found() -> None:
    (path,) = (path for path in RECORDED if path.name == "subset_hint.c2s.bin")
    first, *_, last = [decode_request(data) for data in recorded_messages(path)]
    assert first.subset == ("127.0.0.1:22001", "127.0.0.1:22002")
    assert first.modes == (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED)
    assert first.served is None
    assert last.modes is None
    assert last.served == "127.0.0.1:22001"


# Both directions against generated code and envoy-data-plane


@pytest.mark.parametrize("reply", REPLIES, ids=range(len(REPLIES)))
def test_a_reply_means_what_it_says(reply, edp) -> None:
    data = encode_reply(reply)
    assert pb.ProcessingResponse.FromString(data) == response_of(reply)
    theirs = edp.ext_proc.ProcessingResponse.parse(data)
    assert pb.ProcessingResponse.FromString(bytes(theirs)) == response_of(reply)


def order_is_free(reply) -> bool:
    """Whether the metadata is a map of several keys, which protobuf writes in any order."""
    mutation = getattr(reply, "mutation", Mutation())
    return bool(mutation.scores) and (len(mutation.scores) + (mutation.destination is not None)) > 1


@pytest.mark.parametrize(
    "reply", [reply for reply in REPLIES if not order_is_free(reply)], ids=lambda _: None
)
def test_a_reply_has_protobufs_own_bytes(reply) -> None:
    assert encode_reply(reply) == response_of(reply).SerializeToString()


def test_what_envoy_data_plane_encodes_is_decoded_for_every_kind(edp) -> None:
    ext_proc, core, google = edp.ext_proc, edp.core, edp.google
    header_map = core.HeaderMap(
        headers=[
            core.HeaderValue(key=":path", raw_value=b"/v1/completions"),
            core.HeaderValue(key="x-long", raw_value=b"v" * 200),
        ]
    )
    struct = google.Struct(
        fields={f"{DESTINATION}-served": google.Value(string_value="10.0.0.1:8000")}
    )
    modes = ext_proc.ProtocolConfiguration(request_body_mode=2, response_body_mode=1)
    extra = {
        "metadata_context": core.Metadata(filter_metadata={"envoy.lb": struct}),
        "protocol_config": modes,
        "observability_mode": True,
        "attributes": {"envoy.filters.http.ext_proc": struct},
    }
    headers = ext_proc.HttpHeaders(headers=header_map, end_of_stream=True)
    body = ext_proc.HttpBody(body=b"b" * 300, end_of_stream=True)
    trailers = ext_proc.HttpTrailers(trailers=header_map)

    common = {"served": "10.0.0.1:8000", "modes": (BodyMode.BUFFERED, BodyMode.STREAMED)}
    text = {"headers": {":path": "/v1/completions", "x-long": "v" * 200}, "end_of_stream": True}
    piece = {"body": b"b" * 300, "end_of_stream": True}
    for member, expected in {
        "request_headers": (headers, RequestHeaders(**text, **common)),
        "response_headers": (headers, ResponseHeaders(**text, **common)),
        "request_body": (body, RequestBody(**piece, **common)),
        "response_body": (body, ResponseBody(**piece, **common)),
        "request_trailers": (trailers, RequestTrailers(**common)),
        "response_trailers": (trailers, ResponseTrailers(**common)),
    }.items():
        content, event = expected
        message = ext_proc.ProcessingRequest(**{member: content}, **extra)
        assert decode_request(bytes(message)) == event


# Known failures, as far as the codec decides them


def test_A02_pieces_of_a_body_join_to_the_body_and_only_the_last_ends_it() -> None:
    body = bytes(range(256)) * 800
    starts = range(0, len(body), 62_000)
    pieces = [body[start : start + 62_000] for start in starts]
    replies = [
        StreamedBodyReply(request=True, body=piece, end_of_stream=piece is pieces[-1])
        for piece in pieces
    ]
    sent = [
        pb.ProcessingResponse.FromString(
            encode_reply(reply)
        ).request_body.response.body_mutation.streamed_response
        for reply in replies
    ]
    assert b"".join(piece.body for piece in sent) == body
    assert [piece.end_of_stream for piece in sent] == [False, False, False, True]


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ({"value": "v"}, "v"),
        ({"raw_value": b"r"}, "r"),
        ({"value": "v", "raw_value": b"r"}, "r"),
        ({"value": "v", "raw_value": b""}, "v"),
        ({}, ""),
        ({"value": "v" * 200}, "v" * 200),
        ({"raw_value": b"r" * 20_000}, "r" * 20_000),
        ({"value": "é"}, "é".encode().decode("latin-1")),
        ({"raw_value": "é".encode()}, "é".encode().decode("latin-1")),
    ],
)
def test_A10_raw_value_is_preferred_when_it_is_not_empty(header, text) -> None:
    event = decode_request(headers_message({"key": "x-a", **header}, {"key": "x-b"}))
    assert event == RequestHeaders(headers={"x-a": text, "x-b": ""})


def test_A10_of_raw_value_and_value_in_any_order_raw_value_wins() -> None:
    parts = (b"\x0a\x01k", b"\x12\x01v", b"\x1a\x01r")
    for order in itertools.permutations(parts):
        header = b"\x0a\x09" + b"".join(order)
        data = b"\x12\x0d\x0a\x0b" + header
        assert decode_request(data).headers == {"k": "r"}


def test_a_long_header_is_not_taken_for_a_short_one() -> None:
    """Its length in two bytes and its value look like key and value of a header of 144 bytes."""
    value = b"vvv\x1a\x82".ljust(1288, b"v")
    data = headers_message({"key": "abc", "raw_value": value})
    assert b"\x0a\x90\x0a\x0a\x03abc\x1a\x88\x0a" in data
    assert decode_request(data).headers == {"abc": value.decode("latin-1")}


def set_headers_of(reply) -> list[pb.HeaderValueOption]:
    response = pb.ProcessingResponse.FromString(encode_reply(reply))
    content = getattr(response, response.WhichOneof("response"))
    if isinstance(content, pb.TrailersResponse):
        return list(content.header_mutation.set_headers)
    if isinstance(content, pb.ImmediateResponse):
        return list(content.headers.set_headers)
    return list(content.response.header_mutation.set_headers)


def test_A11_every_header_we_set_has_raw_value_and_no_value() -> None:
    options = [option for reply in REPLIES for option in set_headers_of(reply)]
    assert len(options) > 15
    assert all(option.header.raw_value and not option.header.value for option in options)


def test_A12_every_header_we_set_overwrites() -> None:
    overwrite = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    options = [option for reply in REPLIES for option in set_headers_of(reply)]
    assert {option.append_action for option in options} == {overwrite}


def test_A13_no_byte_in_a_header_can_fail() -> None:
    every_byte = bytes(range(256))
    event = decode_request(
        headers_message(
            {"key": "x-bytes", "raw_value": every_byte},
            {"key": "x-short", "raw_value": b"\xff\xfe"},
        )
    )
    assert event.headers == {"x-bytes": every_byte.decode("latin-1"), "x-short": "\xff\xfe"}


def test_A13_a_name_or_value_that_is_not_utf8_is_read_too() -> None:
    data = b"\x12\x0a\x0a\x08\x0a\x06\x0a\x01\xff\x12\x01\xfe"
    assert decode_request(data).headers == {"\xff": "\xfe"}


def test_A13_bytes_of_a_header_come_out_as_they_came_in() -> None:
    every_byte = bytes(range(256)).decode("latin-1")
    reply = ImmediateReply(status=200, headers=(("x", every_byte), ("y", "日本")))
    options = set_headers_of(reply)
    assert [option.header.raw_value for option in options] == [
        bytes(range(256)),
        "日本".encode(),
    ]


def test_A14_names_are_lower_cased_and_the_last_of_a_repeat_wins() -> None:
    event = decode_request(
        headers_message(
            {"key": "X-Gateway-Inference-Objective", "raw_value": b"First"},
            {"key": "x-gateway-inference-objective", "raw_value": b"Last"},
            {"key": "X-LONG", "raw_value": b"L" * 200},
        )
    )
    assert event.headers == {"x-gateway-inference-objective": "Last", "x-long": "L" * 200}


@pytest.mark.parametrize("destination", ["10.0.0.1:8000", "10.0.0.1:8000,10.0.0.2:8000", "[::1]:1"])
@pytest.mark.parametrize("kind", [HeadersReply, BodyReply])
@pytest.mark.parametrize("scores", [None, {"10.0.0.1:8000": 1.0}])
def test_A15_header_and_metadata_name_the_same_destination(destination, kind, scores) -> None:
    reply = kind(request=True, mutation=Mutation(destination=destination, scores=scores))
    response = pb.ProcessingResponse.FromString(encode_reply(reply))
    (option,) = set_headers_of(reply)
    lb = response.dynamic_metadata["envoy.lb"]
    assert option.header.key == DESTINATION
    assert option.header.raw_value.decode() == lb[DESTINATION] == destination


def test_A20_a_configuration_we_did_not_expect_is_taken_as_it_is() -> None:
    config = pb.ProtocolConfiguration(
        request_body_mode=4,
        response_body_mode=4,
        send_body_without_waiting_for_header_response=True,
    )
    event = decode_request(headers_message(protocol_config=config))
    assert event.modes == (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED)


# Modes and metadata


def test_an_empty_configuration_announces_no_bodies() -> None:
    empty = headers_message(protocol_config=pb.ProtocolConfiguration())
    assert decode_request(empty).modes == (BodyMode.NONE, BodyMode.NONE)
    assert decode_request(headers_message()).modes is None


def test_an_unknown_body_mode_reads_as_streamed() -> None:
    config = pb.ProtocolConfiguration(request_body_mode=77, response_body_mode=-1)
    event = decode_request(headers_message(protocol_config=config))
    assert event.modes == (BodyMode.STREAMED, BodyMode.STREAMED)


@pytest.mark.parametrize(
    ("value", "subset"),
    [
        (["10.0.0.1:8000", "10.0.0.2:8000"], ("10.0.0.1:8000", "10.0.0.2:8000")),
        ("10.0.0.1:8000,10.0.0.2:8000", ("10.0.0.1:8000", "10.0.0.2:8000")),
        (
            ["10.0.0.1:8000, 10.0.0.2", " [fd00::1]:1 "],
            ("10.0.0.1:8000", "10.0.0.2", "[fd00::1]:1"),
        ),
        (["", " , ", "a:1"], ("a:1",)),
        ("", ()),
        (" , ", ()),
        ([], ()),
        ([["a:1"], 3, None, True, {"a": "b:1"}], ()),
        (["a:1", 3], ("a:1",)),
        (8000, ()),
        (True, ()),
        (None, ()),
        ({"a": "b:1"}, ()),
    ],
)
def test_a_subset_is_read_in_every_shape(value, subset) -> None:
    data = metadata_message("envoy.lb.subset_hint", f"{DESTINATION}-subset", value)
    assert decode_request(data) == RequestBody(body=b"", subset=subset)


def test_a_subset_value_of_no_kind_at_all_allows_nothing() -> None:
    request = pb.ProcessingRequest()
    fields = request.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields
    fields[f"{DESTINATION}-subset"].SetInParent()
    assert decode_request(request.SerializeToString()) == Unsupported(subset=())


@pytest.mark.parametrize(
    ("namespace", "key"),
    [
        ("envoy.lb", f"{DESTINATION}-subset"),
        ("envoy.lb.subset_hint", f"{DESTINATION}-served"),
        ("envoy.lb.subset_hint", f"{DESTINATION}-subset-not"),
        ("other", f"{DESTINATION}-subset"),
    ],
)
def test_a_key_in_another_place_is_absent(namespace, key) -> None:
    assert decode_request(metadata_message(namespace, key, "a:1")) == RequestBody(body=b"")


@pytest.mark.parametrize(
    ("value", "served"), [("a:1", "a:1"), ("", None), (1, None), (["a:1"], None)]
)
def test_who_served_is_a_string_or_not_known(value, served) -> None:
    data = metadata_message("envoy.lb", f"{DESTINATION}-served", value)
    assert decode_request(data) == RequestBody(body=b"", served=served)


def test_scores_that_are_no_finite_number_are_left_out() -> None:
    scores = {"a:1": float("inf"), "b:1": 0.5, "c:1": float("nan")}
    reply = HeadersReply(request=True, mutation=Mutation(destination="b:1", scores=scores))
    response = pb.ProcessingResponse.FromString(encode_reply(reply))
    assert dict(response.dynamic_metadata["envoy.lb"][f"{DESTINATION}-scores"]) == {"b:1": 0.5}
