"""The protobuf message classes of the services.

They have their own descriptor pool. A client library in the same process may declare the same full names in protobuf's
default pool, which accepts each name only once.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any, TypeAlias

from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from lathe.server.api.grpc import proto_parser

Message: TypeAlias = Any  # created at run time, so type checkers do not know its fields


def _load(name: str) -> FileDescriptor:
    text = files(__package__).joinpath(name).read_text("utf-8")
    _POOL.AddSerializedFile(proto_parser.parse(name, text).SerializeToString())
    return _POOL.FindFileByName(name)


_POOL = DescriptorPool()
INFERENCE: FileDescriptor = _load("inference.proto")
HEALTH: FileDescriptor = _load("health.proto")


def message_class(descriptor: Any) -> Any:
    """The message class of a descriptor."""
    return GetMessageClass(descriptor)


def service(file: FileDescriptor, name: str) -> ServiceDescriptor:
    """The descriptor of a service."""
    return file.services_by_name[name]
