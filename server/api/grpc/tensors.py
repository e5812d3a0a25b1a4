"""One inference request as a message: into the codec's document and raw tensors, and its answer back."""

from __future__ import annotations

from typing import Any

import numpy as np

from server.api.codec import Codec, Head, payload, refuse_shared_memory
from server.api.grpc.messages import INFERENCE, Message, message_class
from server.datatypes import BINARY_ONLY, NUMPY_OF, object_array, pack_strings
from server.errors import BadRequest
from server.types import Tensors

ModelInferResponse = message_class(INFERENCE.message_types_by_name["ModelInferResponse"])

_LISTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def decode(codec: Codec, request: Message) -> tuple[Head, Tensors]:
    """Return the checked head and its tensors, views into the message's raw contents."""
    raws = list(request.raw_input_contents)
    if raws:
        request.ClearField("raw_input_contents")
        shell = request.SerializeToString(), tuple(map(len, raws))
        head = codec.shell(shell, lambda: _document(request, _checked(request, raws)))
    else:
        raws = _typed_contents(request)
        head = codec.read(_document(request, raws))
    named = {item.name: raw for item, raw in zip(request.inputs, raws, strict=True)}
    return head, {slot.name: slot.tensor(named[slot.name], -slot.start) for slot in head.slots}


def _document(request: Message, raws: list[bytes]) -> dict[str, Any]:
    return {
        "id": request.id,
        "parameters": {**parameters(request.parameters, "parameters"), "binary_data_output": True},
        "inputs": [_input(item, len(raw)) for item, raw in zip(request.inputs, raws, strict=True)],
        "outputs": [_output(item) for item in request.outputs],
    }


def encode(codec: Codec, head: Head, outputs: Tensors) -> Message:
    """Return the answer; every output is raw, since clients read no other."""
    response = ModelInferResponse(model_name=codec.ref.name, model_version=str(codec.ref.version), id=head.id)
    for wanted in head.outputs:
        datatype, array = codec.output(wanted, outputs)
        response.outputs.add(name=wanted.name, datatype=datatype, shape=array.shape)
        response.raw_output_contents.append(bytes(payload(datatype, array)))
    return response


def parameters(entries: Message, place: str) -> dict[str, Any]:
    """Return a map of one-of parameters as plain values; raises BadRequest for one without a value."""
    found: dict[str, Any] = {}
    for name, entry in entries.items():
        choice = entry.WhichOneof("parameter_choice")
        if choice is None:
            raise BadRequest(f"{place}.{name}: expected a value, got none")
        found[name] = getattr(entry, choice)
    return found


def _typed_contents(request: Message) -> list[bytes]:
    """Return the bytes of each input, in order, that came as lists of values."""
    _refuse_shared_memory(request)
    return [_packed(item) for item in request.inputs]


def _checked(request: Message, raws: list[bytes]) -> list[bytes]:
    """Return the bytes that came beside the inputs, one for each of them."""
    _refuse_shared_memory(request)
    typed = [item.name for item in request.inputs if item.HasField("contents")]
    if typed:
        raise BadRequest(f"raw_input_contents: expected none beside the typed contents of {typed}, got {len(raws)}")
    if len(raws) != len(request.inputs):
        raise BadRequest(f"raw_input_contents: expected {len(request.inputs)}, one per input, got {len(raws)}")
    return raws


def _refuse_shared_memory(request: Message) -> None:
    for item in request.inputs:
        refuse_shared_memory(item.parameters, f"input {item.name!r}")


def _packed(item: Message) -> bytes:
    """Turn typed contents into raw ones; raises BadRequest for a list of another datatype or values out of range."""
    place, datatype = f"input {item.name!r}", item.datatype
    if datatype in BINARY_ONLY:
        raise BadRequest(f"{place}: {datatype} is sent in raw_input_contents only")
    wanted = _LISTS.get(datatype)
    if wanted is None:
        return b""  # the codec refuses the datatype
    others = [field.name for field, _ in item.contents.ListFields() if field.name != wanted]
    if others:
        raise BadRequest(f"{place}.contents: expected {wanted} for {datatype}, got {', '.join(others)}")
    values = getattr(item.contents, wanted)
    if datatype == "BYTES":
        return pack_strings(object_array(values, (len(values),)))
    try:
        return np.array(list(values), NUMPY_OF[datatype]).tobytes()  # a list: only its integers are checked
    except OverflowError:
        raise BadRequest(f"{place}.contents: a value is out of the range of {datatype}") from None


def _input(item: Message, size: int) -> dict[str, Any]:
    return {
        "name": item.name,
        "datatype": item.datatype,
        "shape": list(item.shape),
        "parameters": {**parameters(item.parameters, f"input {item.name!r}"), "binary_data_size": size},
    }


def _output(item: Message) -> dict[str, Any]:
    given = parameters(item.parameters, f"output {item.name!r}")
    return {"name": item.name, "parameters": {**given, "binary_data": True}}
