"""Encodes and decodes inference requests of clients: a JSON head, followed by the tensors' bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx
import numpy as np
import orjson

from lathe.server.client.errors import ClientError
from lathe.server.datatypes import NUMPY_OF, pack_strings, unpack_strings, wire_name
from lathe.server.errors import BadRequest
from lathe.server.types import Array, Parameter, Tensors

HEAD_LENGTH = "inference-header-content-length"

RequestedOutputs: TypeAlias = (
    Sequence[str] | Mapping[str, Mapping[str, Parameter]]
)  # output names, or names and parameters


@dataclass(frozen=True, slots=True)
class Answer:
    """The outputs of an inference request, and the version that computed them. `answer["y"]` is the output `y`."""

    model: str
    version: int
    outputs: Tensors
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    def __getitem__(self, output: str) -> Array:
        if output not in self.outputs:
            raise KeyError(f"{self.model}: the answer has no output {output!r}, only {', '.join(self.outputs)}")
        return self.outputs[output]


def encode(
    inputs: Mapping[str, Any], outputs: RequestedOutputs | None, parameters: Mapping[str, Parameter], id: str
) -> tuple[bytes, bytes]:
    """Return the JSON head of a request and the bytes of its inputs, in their order.

    Raises ClientError for values that the protocol cannot carry.
    """
    if not isinstance(inputs, Mapping):
        raise ClientError(f"inputs: expected a mapping of input names to arrays, got {type(inputs).__name__}")
    described, payloads = [], []
    for name, values in inputs.items():
        datatype, array, payload = _encode_input(name, values)
        size = {"binary_data_size": len(payload)}
        described.append({"name": name, "shape": array.shape, "datatype": datatype, "parameters": size})
        payloads.append(payload)
    document: dict[str, Any] = {"inputs": described, "parameters": {**parameters, "binary_data_output": True}}
    if outputs is not None:
        document["outputs"] = _requested_outputs(outputs)
    if id:
        document["id"] = id
    try:
        return orjson.dumps(document), b"".join(payloads)
    except TypeError as error:
        raise ClientError(f"parameters: {error}") from error


def decode(response: httpx.Response) -> Answer:
    """Decode a response; raises KeyError, ValueError or BadRequest if it is malformed.

    Numeric outputs are read-only views of the response's bytes.
    """
    length = int(response.headers.get(HEAD_LENGTH, len(response.content)))
    head = orjson.loads(response.content[:length])
    rest, outputs = memoryview(response.content)[length:], {}
    for tensor in head["outputs"]:
        size = tensor["parameters"]["binary_data_size"]
        outputs[tensor["name"]] = _array(tensor, rest[:size])
        rest = rest[size:]
    parameters = head.get("parameters", {})
    return Answer(head["model_name"], int(head["model_version"]), outputs, head.get("id", ""), parameters)


def _encode_input(name: str, values: Any) -> tuple[str, Array, bytes]:
    """Return an input's datatype in the protocol, its array, and its bytes."""
    array: Array = np.asarray(values)
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    try:
        datatype = wire_name(array)
    except BadRequest as error:
        raise ClientError(f"input {name!r}: {error.message}") from error
    if datatype == "BYTES":
        return datatype, array, pack_strings(array)
    return datatype, array, array.tobytes()  # row-major, whatever the strides


def _requested_outputs(outputs: RequestedOutputs) -> list[dict[str, Any]]:
    if isinstance(outputs, str):
        raise ClientError(f"outputs: expected a list of names, got the text {outputs!r}")
    if isinstance(outputs, Mapping):
        return [{"name": name, "parameters": dict(parameters)} for name, parameters in outputs.items()]
    return [{"name": name} for name in outputs]


def _array(tensor: Mapping[str, Any], data: memoryview) -> Array:
    shape, datatype = tuple(tensor["shape"]), tensor["datatype"]
    if datatype == "BYTES":
        return unpack_strings(data, shape, int(np.prod(shape)), tensor["name"])
    return np.frombuffer(data, NUMPY_OF[datatype]).reshape(shape)
