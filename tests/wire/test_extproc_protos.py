"""Our `.proto` subset against Envoy's, and the generated code against our `.proto` files."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor

from epp.wire.pb import epp_extproc_pb2 as pb, epp_health_pb2

ROOT = Path(__file__).parents[2]

TYPE_NAMES = {
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_ENUM: "enum",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_MESSAGE: "message",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_UINT32: "uint32",
}


@pytest.fixture(scope="module")
def ext_proc():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import envoy_data_plane.envoy.service.ext_proc.v3 as ext_proc
    return ext_proc


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def differences(ours, theirs, seen: set[str]) -> list[str]:
    """How our message differs from the class of envoy-data-plane, with all messages below it."""
    if ours.full_name in seen:
        return []
    seen.add(ours.full_name)
    found, about = [], theirs._betterproto
    for field in ours.fields:
        name = f"{ours.name}.{field.name}"
        meta = about.meta_by_field_name.get(field.name)
        if meta is None or meta.number != field.number:
            found.append(f"{name} = {field.number} is not there")
            continue
        kind = "map" if is_map(field) else TYPE_NAMES[field.type]
        if kind != meta.proto_type and name != "HttpStatus.code":
            found.append(f"{name} is {meta.proto_type} there")
        if (field.containing_oneof.name if field.containing_oneof else None) != meta.group:
            found.append(f"{name} belongs to oneof {meta.group} there")
        if field.is_repeated and not is_map(field) and not meta.repeated:
            found.append(f"{name} is not repeated there")
        if field.enum_type:
            enum = about.cls_by_field[field.name]
            values = {value.number for value in field.enum_type.values}
            if values != {member.value for member in enum}:
                found.append(f"{name} has other numbers there")
        if field.message_type and not is_map(field) and ours.file == field.message_type.file:
            theirs_below = about.cls_by_field[field.name]
            found += differences(field.message_type, theirs_below, seen)
    return found


def test_every_field_of_ours_is_envoys_by_number_name_and_type(ext_proc) -> None:
    seen: set[str] = set()
    for name in ("ProcessingRequest", "ProcessingResponse"):
        ours = pb.DESCRIPTOR.message_types_by_name[name]
        assert differences(ours, getattr(ext_proc, name), seen) == []
    assert seen == {message.full_name for message in pb.DESCRIPTOR.message_types_by_name.values()}


def test_the_audit_notices_a_wrong_number(ext_proc) -> None:
    assert differences(pb.HttpBody.DESCRIPTOR, ext_proc.HttpHeaders, set()) == [
        "HttpBody.body = 1 is not there",
        "HttpBody.end_of_stream = 2 is not there",
    ]


def test_our_descriptors_cannot_clash_with_envoys_or_grpcs() -> None:
    for module in (pb, epp_health_pb2):
        assert module.DESCRIPTOR.package.startswith("epp.")
        assert module.DESCRIPTOR.name.startswith("epp_")


def test_the_health_messages_have_the_bytes_of_grpc_health_v1() -> None:
    response = epp_health_pb2.HealthCheckResponse(status="SERVING")
    assert response.SerializeToString() == b"\x08\x01"
    request = epp_health_pb2.HealthCheckRequest(service="readiness")
    assert request.SerializeToString() == b"\x0a\x09readiness"


def test_the_generated_code_is_up_to_date() -> None:
    script = ROOT / "protos" / "generate.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_request_path_does_not_load_protobuf() -> None:
    code = (
        "import sys, epp.wire.extproc\n"
        "sys.exit(any(name.startswith(('google.protobuf', 'epp.wire.pb')) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
