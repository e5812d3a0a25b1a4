"""Where the elements of each input are in a request: parsed from the document and checked against the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from lathe.server.api.codec import json_tensors
from lathe.server.api.codec.fields import expect, parameters_of
from lathe.server.api.codec.json_split import NumberList
from lathe.server.api.codec.payloads import COPIED_PER_READ
from lathe.server.api.codec.shared_memory_spans import parse_span
from lathe.server.batching.signature import Signature, element_count
from lathe.server.datatypes import ELEMENT_OVERHEAD, NUMPY_OF, object_array, unpack_in_steps
from lathe.server.errors import BadRequest
from lathe.server.steps import Steps
from lathe.server.types import Array, Shape, Span, TensorSpec

_MAX_DIM = 1 << 40

Body: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class InputLocation:
    """Where the elements of one input are: after the JSON (`size` bytes at offset `start`), inside it, or in `span`.

    `start` counts from the end of the JSON. If the elements are inside the JSON, `data` is their index in the result of
    `json_tensors.take_data`, and `size` is 0.
    """

    name: str
    datatype: str
    shape: Shape
    dtype: np.dtype[Any]
    start: int
    size: int
    data: int | None = None
    is_single_string: bool = False  # the bytes are one string without a length before it
    span: Span | None = None  # the shared memory that holds the elements

    @property
    def is_view(self) -> bool:
        """Whether the array can be a view into the body: binary data of this request, not empty, not BYTES or BOOL."""
        in_the_body = self.data is None and self.span is None
        return in_the_body and self.datatype not in ("BYTES", "BOOL") and self.size > 0

    @property
    def read_cost(self) -> int:
        """The cost of reading its data outside the JSON, in the unit of reading one byte; 0 for a view."""
        if self.is_view:
            return 0
        # Numbers that are no view are in shared memory, and are only copied.
        return self.size if self.datatype in ("BYTES", "BOOL") else self.size // COPIED_PER_READ

    @property
    def element_bytes(self) -> int:
        """The bytes of memory that its elements take. Elements inside the JSON do not count; see `extra_memory`.

        The shape of a BYTES tensor is not trusted: each element has 4 bytes of length on the wire, so `size` bounds the
        number of elements.
        """
        return self.size + (ELEMENT_OVERHEAD * min(self.count, self.size // 4 + 1) if self.datatype == "BYTES" else 0)

    @property
    def count(self) -> int:
        """The number of elements, by its shape."""
        return element_count(self.shape)

    def extra_memory(self, json_bytes: int) -> int:
        """The bytes of memory that its array needs besides the body, which has `json_bytes` of JSON; 0 for a view."""
        if self.data is None:
            return 0 if self.is_view else self.element_bytes
        count = min(self.count, json_bytes // 2)  # each element has at least one character and a comma
        if self.datatype == "BYTES":
            return 2 * (count * ELEMENT_OVERHEAD + json_bytes)  # first as `str`, then as `bytes`
        return count * self.dtype.itemsize

    def reading(self, body: Body, base: int, taken: Sequence[object] = ()) -> Steps[Array]:
        """The array, from `body` (binary data at offset `base`) or from `taken`, the data removed from the JSON.

        For an input in shared memory, `body` is a copy of its bytes and `base` is 0. Numbers that are not empty are a
        view into `body`; other arrays are new. BadRequest if the data do not fit the datatype and the shape; TooLarge
        as `NumberList.tensor`.
        """
        if self.data is not None:
            data, field = taken[self.data], f"input {self.name!r}"
            if isinstance(data, NumberList):
                return data.tensor(self.datatype, self.shape, field)
            return json_tensors.to_array(data, self.datatype, self.shape, field)
        at = base + self.start
        if self.datatype == "BYTES":
            view = memoryview(body)[at : at + self.size]
            if self.is_single_string:
                return object_array([bytes(view)], self.shape)
            return (yield from unpack_in_steps(view, self.shape, element_count(self.shape), f"input {self.name!r}"))
        if self.size == 0:
            return np.empty(self.shape, self.dtype)
        array = np.ndarray(self.shape, self.dtype, body, at)
        # NumPy's bool allows only the bytes 0 and 1; a client may send others.
        return array.view(np.uint8) != 0 if self.datatype == "BOOL" else array


def parse_slots(inputs: list[object], signature: Signature) -> tuple[tuple[InputLocation, ...], int]:
    """The locations of a request's inputs, and the number of bytes of binary data that follow the JSON.

    Required inputs come first, in the order of the signature, then optional ones. BadRequest for an input that is
    malformed, unknown or given twice. Missing inputs, datatypes and shapes are not compared with the signature.
    """
    slots: dict[str, InputLocation] = {}
    at = 0
    for index, item in enumerate(inputs):
        slot = _slot(expect(item, dict, f"inputs[{index}]"), f"inputs[{index}]", at)
        if slot.name in slots:
            raise BadRequest(f"inputs: {slot.name!r} is given twice")
        if slot.name not in signature.inputs and slot.name not in signature.optional:
            raise signature.wrong_names(item.get("name") for item in inputs if isinstance(item, dict))
        slots[slot.name] = slot
        at += slot.size if slot.span is None else 0
    ordered = [slots.pop(name) for name in signature.inputs if name in slots]
    return (*ordered, *slots.values()), at


def _slot(item: dict[str, Any], place: str, start: int) -> InputLocation:
    name = expect(item.get("name"), str, f"{place}.name")
    place = f"input {name!r}"
    datatype = expect(item.get("datatype"), str, f"{place}.datatype")
    dtype = NUMPY_OF.get(datatype)
    if dtype is None:
        raise BadRequest(f"{place}.datatype: expected one of {', '.join(NUMPY_OF)}, got {datatype!r}")
    shape = _shape(expect(item.get("shape"), list, f"{place}.shape"), place)
    parameters = parameters_of(item.get("parameters"), f"{place}.parameters")
    span = parse_span(parameters, place)
    if span is not None:
        return _shared_slot(item, InputLocation(name, datatype, shape, dtype, 0, span.size, span=span))
    if "binary_data_size" not in parameters:
        if item.get("data") is None:
            raise BadRequest(f"{place}: expected data or parameters.binary_data_size, got neither")
        return InputLocation(name, datatype, shape, dtype, start, 0, item["data"])
    if "data" in item:
        raise BadRequest(f"{place}: expected data or parameters.binary_data_size, got both")
    size = expect(parameters["binary_data_size"], int, f"{place}.parameters.binary_data_size")
    return _check_size(InputLocation(name, datatype, shape, dtype, start, size))


def _shared_slot(item: dict[str, Any], slot: InputLocation) -> InputLocation:
    if "data" in item or "binary_data_size" in item["parameters"]:
        raise BadRequest(f"input {slot.name!r}: expected shared memory or data in the message, got both")
    return _check_size(slot)


def _check_size(slot: InputLocation) -> InputLocation:
    """The slot itself; BadRequest if `size` is negative or, except for BYTES, is not that of the shape."""
    expected = byte_size(slot.datatype, slot.shape)
    if slot.size < 0 or (slot.datatype != "BYTES" and slot.size != expected):
        what = f"expected {expected} for {slot.datatype} {list(slot.shape)}, got {slot.size}"
        raise BadRequest(f"input {slot.name!r}: bytes of binary data: {what}")
    return slot


def _shape(values: list[object], place: str) -> Shape:
    if len(values) > 32:
        raise BadRequest(f"{place}.shape: expected at most 32 dimensions, got {len(values)}")
    shape = tuple([expect(value, int, f"{place}.shape") for value in values])
    if not all(0 <= size <= _MAX_DIM for size in shape):
        raise BadRequest(f"{place}.shape: expected sizes from 0 to {_MAX_DIM}, got {list(shape)}")
    return shape


def byte_size(datatype: str, shape: Shape) -> int:
    """The bytes of binary data of a tensor; without meaning for BYTES, whose elements have no fixed size."""
    return NUMPY_OF[datatype].itemsize * element_count(shape)


def raw_shape(spec: Shape, elements: int) -> Shape:
    """The shape of a raw body of `elements` elements, for an input of shape `spec` (-1: a dynamic dimension).

    A dynamic first dimension is 1. Another one is `elements` over the product of the other sizes, rounded down.
    BadRequest if more than one other dimension is dynamic.
    """
    shape = [1, *spec[1:]] if spec and spec[0] == -1 else list(spec)
    if shape.count(-1) > 1:
        raise BadRequest(
            f"body: a raw body needs a model with at most one dynamic dimension, this one takes {list(spec)}"
        )
    if -1 in shape:
        rest = element_count(tuple(size for size in shape if size != -1))
        shape[shape.index(-1)] = elements // max(rest, 1)
    return tuple(shape)


def raw_string(spec: TensorSpec, size: int) -> InputLocation:
    """The location of a raw body that is one string of `size` bytes without a length before it.

    All dynamic dimensions are 1; BadRequest unless the shape then has exactly one element.
    """
    shape = tuple(1 if axis < 0 else axis for axis in spec.shape)
    if element_count(shape) != 1:
        raise BadRequest(
            f"body: a raw body is one string, and input {spec.name!r} takes {element_count(shape)} for {list(shape)}"
        )
    return InputLocation(spec.name, spec.datatype, shape, NUMPY_OF["BYTES"], 0, size, is_single_string=True)
