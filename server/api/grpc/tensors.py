"""One inference request as a message: into the codec's document and raw tensors, and its answer back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from server.api.codec import Codec, Head
from server.api.grpc.messages import INFERENCE, Message, message_class
from server.api.grpc.sent import SIZED, Sent
from server.api.payloads import Payload, payload
from server.datatypes import BINARY_ONLY, NUMPY_OF, object_array, pack_strings
from server.errors import BadRequest
from server.steps import Steps
from server.types import Span, Tensors

ModelInferResponse = message_class(INFERENCE.message_types_by_name["ModelInferResponse"])

_StreamResponse = INFERENCE.message_types_by_name["ModelStreamInferResponse"]
_RAW, _ANSWER = (  # tags of fields that have a length
    bytes([kind.fields_by_name[name].number << 3 | SIZED])
    for kind, name in (
        (ModelInferResponse.DESCRIPTOR, "raw_output_contents"),
        (_StreamResponse, "infer_response"),
    )
)
_COPIED = 16  # bytes that are copied twice while one is read
_PIECE = 1 << 20  # bytes of an output that are copied in one go
_SLICE = 1 << 16  # values that are turned into bytes in one go, which keeps the interpreter lock
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


def begin(codec: Codec, sent: Sent) -> tuple[Head, dict[str, bytes | memoryview]]:
    """Return the checked head of a request, and the bytes of each input that is not in shared memory."""
    request, raws = sent.message, sent.raws
    if raws:
        shell = sent.shell, tuple(map(len, raws))
        head = codec.shell(shell, lambda: _document(request, _checked(request, raws)))
    else:
        raws = _typed_contents(request)
        head = codec.read(_document(request, raws))
    return head, {item.name: raw for item, raw in zip(_sent(request), raws, strict=True)}


def reading(codec: Codec, head: Head, raws: dict[str, bytes | memoryview]) -> Steps[Tensors]:
    """Return the inputs, by their bytes or copied from shared memory."""
    found: Tensors = {}
    for slot in head.slots:
        if slot.span is None:
            found[slot.name] = yield from slot.reading(raws[slot.name], -slot.start)
    return {**found, **(yield from codec.shared(head))}


def _sent(request: Message) -> list[Message]:
    """Return the inputs whose elements are in the message: all but those in shared memory."""
    return [item for item in request.inputs if not _is_shared(item)]


def _is_shared(item: Message) -> bool:
    return "shared_memory_region" in item.parameters


def _document(request: Message, raws: Sequence[bytes | memoryview]) -> dict[str, Any]:
    sizes = map(len, raws)
    return {
        "id": request.id,
        "parameters": {**parameters(request.parameters, "parameters"), "binary_data_output": True},
        "inputs": [_shared_input(item) if _is_shared(item) else _input(item, next(sizes)) for item in request.inputs],
        "outputs": [_output(item) for item in request.outputs],
    }


def encoding(codec: Codec, head: Head, outputs: Tensors, in_stream: bool) -> Steps[bytes]:
    """Return the answer as it travels, ``in_stream``: as a stream's; every output is raw, since clients read no other,
    or in shared memory.

    protobuf would copy the outputs twice more, and would keep the interpreter lock meanwhile.
    """
    shared: list[tuple[Span, Payload]] = []
    response = ModelInferResponse(model_name=codec.ref.name, model_version=str(codec.ref.version), id=head.id)
    contents: list[bytes] = []
    for wanted in head.outputs:
        datatype, array = yield from codec.output(wanted, outputs)
        response.outputs.add(name=wanted.name, datatype=datatype, shape=array.shape)
        content = yield from payload(datatype, array)
        if wanted.span is not None:
            shared.append((wanted.span, content))
            content = b""  # clients count the outputs
        contents.append(_sized_field(_RAW, len(content)))
        contents += yield from _pieces(content)
    codec.regions.write_all(shared)
    parts = [response.SerializeToString(), *contents]
    if in_stream:
        parts = [_sized_field(_ANSWER, sum(map(len, parts))), *parts]
    return b"".join(parts)


def cost(codec: Codec, head: Head, outputs: Tensors) -> int:
    """Return what it costs to write an answer, in bytes that are read."""
    return codec.cost(head, outputs) + codec.size(head, outputs) // _COPIED


def _pieces(content: Payload) -> Steps[list[bytes]]:
    """Return a content as bytes; joining many bytes lets go of the interpreter lock, copying a view does not."""
    if isinstance(content, bytes):
        return [content]
    pieces: list[bytes] = []
    for at in range(0, len(content), _PIECE):
        pieces.append(bytes(content[at : at + _PIECE]))
        yield
    return pieces


def _sized_field(tag: bytes, size: int) -> bytes:
    """Return what is before so many bytes of a field."""
    varint = bytearray()
    while size > 127:
        varint.append(size & 127 | 128)
        size >>= 7
    varint.append(size)
    return tag + varint


def parameters(entries: Message, place: str) -> dict[str, Any]:
    """Return a map of one-of parameters as plain values; raises BadRequest for one without a value."""
    found: dict[str, Any] = {}
    for name, entry in entries.items():
        choice = entry.WhichOneof("parameter_choice")
        if choice is None:
            raise BadRequest(f"{place}.{name}: expected a value, got none")
        found[name] = getattr(entry, choice)
    return found


def _typed_contents(request: Message) -> list[bytes | memoryview]:
    """Return the bytes of each input, in order, that came as lists of values."""
    return [_packed(item) for item in _sent(request)]


def _checked(request: Message, raws: list[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return the bytes that came beside the inputs, one for each of them that is not in shared memory."""
    typed = [item.name for item in request.inputs if item.HasField("contents")]
    if typed:
        raise BadRequest(f"raw_input_contents: expected none beside the typed contents of {typed}, got {len(raws)}")
    expected = len(_sent(request))
    if len(raws) != expected:
        raise BadRequest(f"raw_input_contents: expected {expected}, one per input, got {len(raws)}")
    return raws


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
        return b"".join(_numbers(values[at : at + _SLICE], datatype) for at in range(0, len(values), _SLICE))
    except OverflowError:
        raise BadRequest(f"{place}.contents: a value is out of the range of {datatype}") from None


def _numbers(values: list[Any], datatype: str) -> bytes:
    return np.array(values, NUMPY_OF[datatype]).tobytes()  # of a list: only its integers are checked


def _input(item: Message, size: int) -> dict[str, Any]:
    return {
        "name": item.name,
        "datatype": item.datatype,
        "shape": list(item.shape),
        "parameters": {**parameters(item.parameters, f"input {item.name!r}"), "binary_data_size": size},
    }


def _shared_input(item: Message) -> dict[str, Any]:
    if item.HasField("contents"):
        raise BadRequest(f"input {item.name!r}: expected shared memory or data in the message, got both")
    given = parameters(item.parameters, f"input {item.name!r}")
    return {"name": item.name, "datatype": item.datatype, "shape": list(item.shape), "parameters": given}


def _output(item: Message) -> dict[str, Any]:
    given = parameters(item.parameters, f"output {item.name!r}")
    return {"name": item.name, "parameters": {**given, "binary_data": True}}
