"""Converts inference messages to the codec's document and raw tensors, and outputs to serialized answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lathe.server.api.codec.codec import Codec, ParsedRequest
from lathe.server.api.codec.payloads import Payload, payload_steps
from lathe.server.api.grpc.messages import INFERENCE, Message, message_class
from lathe.server.api.grpc.split_message import LENGTH_DELIMITED, SplitMessage
from lathe.server.datatypes import BINARY_ONLY, NUMPY_OF, object_array, pack_strings
from lathe.server.errors import BadRequest
from lathe.server.steps import Steps
from lathe.server.types import Span, Tensors

ModelInferResponse = message_class(INFERENCE.message_types_by_name["ModelInferResponse"])

_StreamResponse = INFERENCE.message_types_by_name["ModelStreamInferResponse"]
_RAW, _ANSWER = (  # tags of length-delimited fields
    bytes([kind.fields_by_name[name].number << 3 | LENGTH_DELIMITED])
    for kind, name in (
        (ModelInferResponse.DESCRIPTOR, "raw_output_contents"),
        (_StreamResponse, "infer_response"),
    )
)
_COPIED = 16  # bytes that can be copied twice in the time of reading one (the unit of `write_cost`)
_PIECE = 1 << 20  # bytes of an output copied per step
_SLICE = 1 << 16  # values converted to bytes per call of NumPy, which holds the interpreter lock
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


def parse(codec: Codec, sent: SplitMessage) -> tuple[ParsedRequest, dict[str, bytes | memoryview]]:
    """The parsed request, and by name the bytes of each input that is not in shared memory; may raise a ServerError.

    The bytes are the raw contents of the message or, without any, the typed contents as raw bytes.
    """
    request, raws = sent.message, sent.raw_contents
    if raws:
        shell = sent.shell, tuple(map(len, raws))
        head = codec.shell(shell, lambda: _document(request, _check_raws(request, raws)))
    else:
        raws = _typed_contents(request)
        head = codec.read(_document(request, raws))
    return head, {item.name: raw for item, raw in zip(_inputs_in_message(request), raws, strict=True)}


def read_steps(codec: Codec, head: ParsedRequest, raws: dict[str, bytes | memoryview]) -> Steps[Tensors]:
    """The input arrays by name: views into their bytes (`raws`, by name), or copies of those in shared memory.

    BOOL, BYTES and empty tensors are new arrays. Errors are those of `InputLocation.reading` and `Codec.shared`.
    """
    found: Tensors = {}
    for slot in head.slots:
        if slot.span is None:
            found[slot.name] = yield from slot.reading(raws[slot.name], -slot.start)
    return {**found, **(yield from codec.shared(head))}


def _inputs_in_message(request: Message) -> list[Message]:
    """The input messages whose elements are in the request: all except those in shared memory."""
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


def encode_steps(codec: Codec, head: ParsedRequest, outputs: Tensors, in_stream: bool) -> Steps[bytes]:
    """The serialized answer; `in_stream`: as the message of a stream.

    Every output is in shared memory or in raw contents, because clients read no typed contents. The raw contents are
    written here: protobuf would copy them twice more while holding the interpreter lock. Errors are those of
    `Codec.output` and `Regions.write_all`.
    """
    shared: list[tuple[Span, Payload]] = []
    response = ModelInferResponse(model_name=codec.ref.name, model_version=str(codec.ref.version), id=head.id)
    contents: list[bytes] = []
    for wanted in head.outputs:
        datatype, array = yield from codec.output(wanted, outputs)
        response.outputs.add(name=wanted.name, datatype=datatype, shape=array.shape)
        content = yield from payload_steps(datatype, array)
        if wanted.span is not None:
            shared.append((wanted.span, content))
            content = b""  # clients match outputs and raw contents by position
        contents.append(_sized_field(_RAW, len(content)))
        contents += yield from _copy_pieces(content)
    codec.regions.write_all(shared)
    parts = [response.SerializeToString(), *contents]
    if in_stream:
        parts = [_sized_field(_ANSWER, sum(map(len, parts))), *parts]
    return b"".join(parts)


def write_cost(codec: Codec, head: ParsedRequest, outputs: Tensors) -> int:
    """The estimated cost of writing an answer, in the unit of reading one byte."""
    return codec.cost(head, outputs) + codec.size(head, outputs) // _COPIED


def _copy_pieces(content: Payload) -> Steps[list[bytes]]:
    """A payload as a list of bytes objects, copied in steps.

    Copying a view holds the interpreter lock, while joining bytes objects later releases it.
    """
    if isinstance(content, bytes):
        return [content]
    pieces: list[bytes] = []
    for at in range(0, len(content), _PIECE):
        pieces.append(bytes(content[at : at + _PIECE]))
        yield
    return pieces


def _sized_field(tag: bytes, size: int) -> bytes:
    """The tag and length that precede `size` bytes of a field."""
    varint = bytearray()
    while size > 127:
        varint.append(size & 127 | 128)
        size >>= 7
    varint.append(size)
    return tag + varint


def parameters(entries: Message, place: str) -> dict[str, Any]:
    """The Python values of a protobuf map of parameters, by name; BadRequest for a parameter without a value.

    `place` is the name of the map in errors.
    """
    found: dict[str, Any] = {}
    for name, entry in entries.items():
        choice = entry.WhichOneof("parameter_choice")
        if choice is None:
            raise BadRequest(f"{place}.{name}: expected a value, got none")
        found[name] = getattr(entry, choice)
    return found


def _typed_contents(request: Message) -> list[bytes | memoryview]:
    """The typed contents of each input that is not in shared memory, as raw bytes, in order; BadRequest as `_pack`."""
    return [_pack(item) for item in _inputs_in_message(request)]


def _check_raws(request: Message, raws: list[bytes | memoryview]) -> list[bytes | memoryview]:
    """The raw contents; BadRequest unless there is one for each input that is not in shared memory.

    Also BadRequest if an input has typed contents as well.
    """
    typed = [item.name for item in request.inputs if item.HasField("contents")]
    if typed:
        raise BadRequest(f"raw_input_contents: expected none with the typed contents of {typed}, got {len(raws)}")
    expected = len(_inputs_in_message(request))
    if len(raws) != expected:
        raise BadRequest(f"raw_input_contents: expected {expected}, one per input, got {len(raws)}")
    return raws


def _pack(item: Message) -> bytes:
    """The typed contents of an input as raw bytes; BadRequest for a wrong list or values out of range."""
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
    return np.array(
        values, NUMPY_OF[datatype]
    ).tobytes()  # a list of Python numbers: NumPy checks its integers for overflow


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
