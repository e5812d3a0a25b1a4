"""The messages of the services, as classes of protobuf.

They live in a descriptor pool of their own: a client library in the same process may declare the same full names in
protobuf's common pool, which takes each name once.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any, TypeAlias

from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from server.api.grpc import protofile

Message: TypeAlias = Any  # made at run time, so its fields have no types to check


def _load(name: str) -> FileDescriptor:
    text = files(__package__).joinpath(name).read_text("utf-8")
    _POOL.AddSerializedFile(protofile.read(name, text).SerializeToString())
    return _POOL.FindFileByName(name)


_POOL = DescriptorPool()
INFERENCE: FileDescriptor = _load("inference.proto")
HEALTH: FileDescriptor = _load("health.proto")


def message_class(descriptor: Any) -> Any:
    """Return the class of a message's descriptor."""
    return GetMessageClass(descriptor)


def service(file: FileDescriptor, name: str) -> ServiceDescriptor:
    """Return a service's descriptor."""
    return file.services_by_name[name]
