"""The messages are those of the protocol: every field of Lathe's files against NVIDIA's own descriptors."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto
from tritonclient.grpc import model_config_pb2, service_pb2

from lathe.server.api.grpc import proto_parser
from lathe.server.api.grpc.messages import HEALTH, INFERENCE, message_class

OURS = sorted(INFERENCE.message_types_by_name)


def theirs(name: str) -> Any:
    found = service_pb2.DESCRIPTOR.message_types_by_name.get(name)
    return found or model_config_pb2.DESCRIPTOR.message_types_by_name[name]


def facts(field: FieldDescriptor) -> tuple[Any, ...]:
    kind = field.message_type or field.enum_type
    oneof = field.containing_oneof and field.containing_oneof.name
    return field.number, field.type, field.is_repeated, kind and kind.full_name, oneof


def assert_same_numbers(ours: Any, other: Any) -> None:
    for name, field in ours.fields_by_name.items():
        assert facts(field) == facts(other.fields_by_name[name]), f"{ours.full_name}.{name}"
        if field.message_type and field.message_type.containing_type is ours:
            assert field.message_type.GetOptions().map_entry == (
                other.fields_by_name[name].message_type.GetOptions().map_entry
            )
    for name, nested in ours.nested_types_by_name.items():
        assert_same_numbers(nested, other.nested_types_by_name[name])


@pytest.mark.parametrize("name", OURS)
def test_a_message_has_the_published_fields(name: str) -> None:
    assert_same_numbers(INFERENCE.message_types_by_name[name], theirs(name))


def test_the_calls_have_the_published_types() -> None:
    def calls(file: Any) -> dict[str, tuple[Any, ...]]:
        methods = file.services_by_name["GRPCInferenceService"].methods
        return {
            m.name: (m.input_type.full_name, m.output_type.full_name, m.client_streaming, m.server_streaming)
            for m in methods
        }

    published = calls(service_pb2.DESCRIPTOR)
    assert calls(INFERENCE) == published


def test_the_datatypes_of_a_configuration_are_the_published_ones() -> None:
    def values(file: Any) -> dict[str, int]:
        return {value.name: value.number for value in file.enum_types_by_name["DataType"].values}

    assert values(INFERENCE) == values(model_config_pb2.DESCRIPTOR)


def test_both_sides_read_a_message_alike() -> None:
    request = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[b"\0\1"])
    request.parameters["timeout"].int64_param = -(2**40)
    request.inputs.add(name="x", datatype="INT8", shape=[-1, 2]).contents.int_contents.extend([1, -1])
    ours = message_class(INFERENCE.message_types_by_name["ModelInferRequest"]).FromString(request.SerializeToString())
    assert service_pb2.ModelInferRequest.FromString(ours.SerializeToString()) == request


def test_the_health_check_has_grpcs_numbers() -> None:
    """From gRPC's health checking protocol; its Python package is not needed for two fields."""
    response = message_class(HEALTH.message_types_by_name["HealthCheckResponse"])
    assert response(status=2).SerializeToString() == b"\x08\x02"
    assert [(v.name, v.number) for v in response.DESCRIPTOR.enum_types_by_name["ServingStatus"].values] == [
        ("UNKNOWN", 0),
        ("SERVING", 1),
        ("NOT_SERVING", 2),
        ("SERVICE_UNKNOWN", 3),
    ]
    assert HEALTH.services_by_name["Health"].full_name == "grpc.health.v1.Health"


def test_a_file_is_parsed_as_protoc_parses_it() -> None:
    file = proto_parser.parse(
        "a.proto",
        """
        syntax = "proto3";  // a comment
        package a.b;
        enum E { NONE = 0; SOME = 3; }
        message M { oneof choice { string s = 1; E e = 2; } repeated M more = 3; map<string, E> by_name = 4; }
        """,
    )
    assert file.package == "a.b"
    assert file.enum_type[0] == EnumDescriptorProto(
        name="E", value=[{"name": "NONE", "number": 0}, {"name": "SOME", "number": 3}]
    )
    message: DescriptorProto = file.message_type[0]
    assert [(field.name, field.number, field.type_name) for field in message.field] == [
        ("s", 1, ""),
        ("e", 2, "E"),
        ("more", 3, "M"),
        ("by_name", 4, "ByNameEntry"),
    ]
    assert [field.HasField("oneof_index") for field in message.field] == [True, True, False, False]
    assert message.nested_type[0].options.map_entry


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("extend M {}", "got 'extend'"), ("message M { int32 a 1; }", "expected '=', got '1'"), ("message M ?", "'?'")],
)
def test_unsupported_syntax_is_named(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint.replace("?", r"\?")):
        proto_parser.parse("a.proto", text)
