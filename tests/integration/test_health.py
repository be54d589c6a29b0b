"""grpc.health.v1: the bytes against protobuf, the state machine alone, and both behind grpc.aio."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc import aio
from hypothesis import given, strategies as st

from epp.edge.grpcio import GrpcioServer
from epp.edge.health import (
    CHECK_PATH,
    EXT_PROC_SERVICE,
    LIST_PATH,
    OUTLIVES_HALF_CLOSE,
    REQUEST_BYTES_MAX,
    SERVICES,
    WATCH_PATH,
    Health,
    ServingStatus,
    decode_check_request,
    encode_check_response,
    encode_list_response,
)

SERVING, NOT_SERVING = ServingStatus.SERVING, ServingStatus.NOT_SERVING
UNKNOWN = ServingStatus.SERVICE_UNKNOWN
READINESS = ("", "readiness", EXT_PROC_SERVICE, "inference-extension")


def _oracle() -> dict[str, type]:
    """The messages as protobuf makes them from the published field numbers."""
    file = descriptor_pb2.FileDescriptorProto(
        name="health_oracle.proto", package="oracle", syntax="proto3"
    )
    field = descriptor_pb2.FieldDescriptorProto
    request = file.message_type.add(name="HealthCheckRequest")
    request.field.add(name="service", number=1, type=field.TYPE_STRING, label=1)
    response = file.message_type.add(name="HealthCheckResponse")
    response.field.add(name="status", number=1, type=field.TYPE_INT32, label=1)
    statuses = file.message_type.add(name="HealthListResponse")
    entry = statuses.nested_type.add(name="StatusesEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=1)
    name = ".oracle.HealthCheckResponse"
    entry.field.add(name="value", number=2, type=field.TYPE_MESSAGE, type_name=name, label=1)
    name = ".oracle.HealthListResponse.StatusesEntry"
    statuses.field.add(name="statuses", number=1, type=field.TYPE_MESSAGE, type_name=name, label=3)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        message.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"oracle.{message.name}")
        )
        for message in file.message_type
    }


PB = _oracle()


class Sent:
    """A transport that keeps what it is told, as one list."""

    def __init__(self) -> None:
        self.log: list[object] = []

    def send(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            self.log.append(ServingStatus(PB["HealthCheckResponse"].FromString(message).status))

    def finish(self, status: int = 0, message: str = "") -> None:
        self.log.append((status, message))


def request(service: str) -> bytes:
    return PB["HealthCheckRequest"](service=service).SerializeToString()


def watched(health: Health, service: str) -> tuple[Sent, object]:
    sent = Sent()
    stream = health.methods[WATCH_PATH](sent)
    stream.on_message(request(service))
    return sent, stream


@given(st.text(max_size=300), st.binary(max_size=8))
def test_a_request_is_read_as_protobuf_reads_it(service: str, unknown: bytes) -> None:
    data = request(service)
    assert decode_check_request(data) == service
    extra = b"\x12" + bytes([len(unknown)]) + unknown + b"\x18\x80\x01\x25\0\0\0\0\x29" + bytes(8)
    assert decode_check_request(extra + data + extra) == service
    assert decode_check_request(request("former") + data) == (service or "former")


@given(st.binary(max_size=64))
def test_any_bytes_are_answered_once_and_never_read_as_another_name(data: bytes) -> None:
    sent = Sent()
    Health().methods[CHECK_PATH](sent).on_message(data)
    statuses = [entry[0] for entry in sent.log if isinstance(entry, tuple)]
    assert len(statuses) == 1
    assert statuses[0] in (0, 3, 5)
    try:
        service = PB["HealthCheckRequest"].FromString(data).service
    except Exception:
        return  # protobuf refuses some numbers that we skip
    if statuses != [3]:  # and we refuse groups, which it skips
        assert statuses == [0 if service in SERVICES else 5]


def test_answers_are_what_protobuf_reads() -> None:
    for status in ServingStatus:
        assert PB["HealthCheckResponse"].FromString(encode_check_response(status)).status == status
    statuses = dict(zip(SERVICES, (SERVING, NOT_SERVING, UNKNOWN, SERVING, SERVING), strict=True))
    listed = PB["HealthListResponse"].FromString(encode_list_response(statuses)).statuses
    assert {name: value.status for name, value in listed.items()} == statuses


@pytest.mark.parametrize(
    "data", [b"\x0a", b"\x0a\x05ab", b"\x0a\x01\xff", b"\x0a" + b"\x80" * 10 + b"\0", b"\x0b"]
)
def test_a_malformed_request_is_refused(data: bytes) -> None:
    for path in (CHECK_PATH, WATCH_PATH):
        sent = Sent()
        Health().methods[path](sent).on_message(data)
        assert [entry[0] for entry in sent.log] == [3]


def test_a_long_request_is_refused_unread() -> None:
    sent = Sent()
    Health().methods[CHECK_PATH](sent).on_message(request("x" * REQUEST_BYTES_MAX))
    assert sent.log == [(3, f"health request longer than {REQUEST_BYTES_MAX} bytes")]


def test_M01_M09_liveness_never_depends_on_the_pool_and_readiness_does() -> None:
    health = Health()
    assert {name: health.status(name) for name in SERVICES if name != "liveness"} == dict.fromkeys(
        READINESS, NOT_SERVING
    )
    assert health.status("liveness") is SERVING
    health.set_ready(True)
    assert [health.status(name) for name in SERVICES] == [SERVING] * 5
    health.set_ready(False)
    assert [health.status(name) for name in READINESS] == [NOT_SERVING] * 4
    assert health.status("liveness") is SERVING


def test_M04_a_draining_process_is_alive_unready_and_stays_so() -> None:
    health = Health()
    health.set_ready(True)
    health.start_draining()
    health.set_ready(True)
    assert not health.ready
    assert [health.status(name) for name in READINESS] == [NOT_SERVING] * 4
    assert health.status("liveness") is SERVING


def test_a_watch_is_told_each_change_of_its_own_status_once() -> None:
    health = Health()
    readiness, _ = watched(health, "readiness")
    liveness, _ = watched(health, "liveness")
    for ready in (False, True, True, False, True):
        health.set_ready(ready)
    health.start_draining()
    health.set_ready(True)
    assert readiness.log == [NOT_SERVING, SERVING, NOT_SERVING, SERVING, NOT_SERVING]
    assert liveness.log == [SERVING]


def test_M02_a_watch_of_an_unknown_name_says_so_and_stays_open() -> None:
    health = Health()
    sent, stream = watched(health, "foo")
    health.set_ready(True)
    assert sent.log == [UNKNOWN]
    assert health.watchers == 1
    stream.on_message(request("readiness"))  # a second request means nothing
    assert sent.log == [UNKNOWN]
    stream.on_close()
    assert health.watchers == 0


def test_M05_watches_end_at_the_stop_and_later_ones_are_refused() -> None:
    health = Health()
    health.set_ready(True)
    sent, stream = watched(health, "")
    health.stop()
    health.stop()
    assert sent.log == [SERVING, NOT_SERVING, (14, "shutting down")]
    stream.on_close()
    late, _ = watched(health, "")
    assert late.log == [(14, "shutting down")]


def test_watchers_are_bounded_and_a_closed_one_makes_room() -> None:
    health = Health(watchers_max=2)
    (_, first), _ = watched(health, ""), watched(health, "")
    refused, stream = watched(health, "")
    assert [entry[0] for entry in refused.log] == [8]
    stream.on_close()
    assert health.watchers == 2
    first.on_close()
    admitted, _ = watched(health, "")
    assert admitted.log == [NOT_SERVING]


def test_only_a_watch_outlives_the_half_close() -> None:
    assert set(Health().methods) == {CHECK_PATH, LIST_PATH, WATCH_PATH}
    assert set(OUTLIVES_HALF_CLOSE) == {WATCH_PATH}


@pytest.mark.asyncio(loop_scope="session")
async def test_M02_check_list_and_watch_behind_grpc_aio() -> None:
    health = Health()
    server = GrpcioServer(new_stream=_no_stream, health=health, host="127.0.0.1", port=0)
    port, _ = await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = channel.unary_unary(
            CHECK_PATH,
            request_serializer=request,
            response_deserializer=PB["HealthCheckResponse"].FromString,
        )
        listing = channel.unary_unary(
            LIST_PATH, response_deserializer=PB["HealthListResponse"].FromString
        )
        watch = channel.unary_stream(WATCH_PATH, request_serializer=request)("foo")
        assert await watch.read() == encode_check_response(UNKNOWN)
        assert (await check(EXT_PROC_SERVICE)).status == NOT_SERVING
        health.set_ready(True)
        assert (await check(EXT_PROC_SERVICE)).status == SERVING
        statuses = (await listing(b"")).statuses
        assert {name: value.status for name, value in statuses.items()} == dict.fromkeys(
            SERVICES, SERVING
        )
        with pytest.raises(aio.AioRpcError) as caught:
            await check("foo")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert "readiness" in caught.value.details()
        assert not watch.done()
        watch.cancel()
    await server.drain(5)
    assert health.watchers == 0


def _no_stream(_transport: object) -> object:
    raise AssertionError("no ext_proc stream was opened")
