"""Padding: fills requests of different lengths up to equal shapes with a mask, and cuts their outputs back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from lathe.server.batching.entry import Entry, Outcome
from lathe.server.batching.signature import Signature
from lathe.server.datatypes import NUMPY_OF, wire_name
from lathe.server.errors import BadRequest
from lathe.server.types import Array, Shape, Tensors, TensorSpec


@dataclass(frozen=True, slots=True)
class PaddingRule:
    """The padding rule of a model, from its configuration. The model must ignore the positions where the mask is 0.

    Along `axis` the `inputs` are filled up with `value`, and `mask` with 0, to the next multiple of `multiple`, but not
    beyond `longest`. The `outputs` are cut back to the length of the request.
    """

    mask: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    axis: int = 1
    multiple: int = 16
    longest: int | None = None
    value: float = 0

    def mismatch(self, signature: Signature) -> str | None:
        """The first reason why this rule does not fit a model; None if it fits."""
        return next(self._problems(signature), None)

    def apply(self, entry: Entry, signature: Signature) -> None:
        """Schedule the padding, if any, of a request before it is queued; BadRequest if its inputs differ in length.

        The thread that executes the request pads it: the time for that grows with the inputs.
        """
        length = self._length(entry.inputs)
        padded = self._padded(length)
        if padded == length:
            return
        shapes = {name: array.shape for name, array in entry.inputs.items()}
        for name in (self.mask, *self.inputs):
            shapes[name] = _with_length(shapes[name], self.axis, padded)
        group = signature.group({name: (wire_name(entry.inputs[name]), shape) for name, shape in shapes.items()})
        grown = sum(
            (prod(shapes[name]) - entry.inputs[name].size) * entry.inputs[name].itemsize
            for name in (self.mask, *self.inputs)
        )
        entry.pad(RequestPadding(self, length, padded), group, grown)

    def _length(self, inputs: Tensors) -> int:
        lengths = {name: inputs[name].shape[self.axis] for name in (self.mask, *self.inputs)}
        if len(set(lengths.values())) != 1:
            raise BadRequest(f"inputs: expected the same length along axis {self.axis}, got {lengths}")
        return int(lengths[self.mask])

    def _padded(self, length: int) -> int:
        padded = -(-length // self.multiple) * self.multiple
        return padded if self.longest is None else max(length, min(padded, self.longest))

    def _problems(self, signature: Signature) -> Iterator[str]:
        sides = ((signature.inputs, (self.mask, *self.inputs)), (signature.outputs, self.outputs))
        for specs, names in sides:
            for name in names:
                if name not in specs:
                    yield f"expected one of {sorted(specs)}, got {name!r}"
                elif (reason := self._unfit(specs[name])) is not None:
                    yield reason
        for name in self.inputs:
            if (spec := signature.inputs.get(name)) and not _can_hold(NUMPY_OF[spec.datatype], self.value):
                yield f"{name!r}: {spec.datatype} cannot hold value {self.value:g}"

    def _unfit(self, spec: TensorSpec) -> str | None:
        if spec.datatype == "BYTES" or spec.any_rank or len(spec.shape) <= self.axis or spec.shape[self.axis] != -1:
            return f"{spec.name!r}: expected numbers, of any length along axis {self.axis}, it is {spec.text}"
        return None


@dataclass(frozen=True, slots=True)
class RequestPadding:
    """The padding of one request: along the axis of the rule, from `length` to `padded`."""

    rule: PaddingRule
    length: int
    padded: int

    def fill(self, inputs: Tensors) -> Tensors:
        """The inputs with the padding."""
        rule, filled = self.rule, dict(inputs)
        for name in (rule.mask, *rule.inputs):
            filled[name] = _pad_array(inputs[name], rule.axis, self.padded, 0 if name == rule.mask else rule.value)
        return filled

    def cut(self, outcome: Outcome) -> Outcome:
        """The outputs cut back to the length of the request; an error as it is.

        An output that does not have the padded length along the axis stays as it is.
        """
        if isinstance(outcome, Exception):
            return outcome
        rule, cut = self.rule, dict(outcome)
        for name in rule.outputs:
            if outcome[name].shape[rule.axis] == self.padded:
                cut[name] = np.ascontiguousarray(outcome[name][_prefix(rule.axis, self.length)])
        return cut


def _can_hold(dtype: np.dtype[Any], value: float) -> bool:
    if dtype.kind == "b":
        return value in (0, 1)
    if dtype.kind not in "iu":
        return True
    bounds = np.iinfo(dtype)
    return bounds.min <= value <= bounds.max and value == int(value)


def _pad_array(array: Array, axis: int, length: int, value: float) -> Array:
    made = np.full(_with_length(array.shape, axis, length), value, array.dtype)
    made[_prefix(axis, array.shape[axis])] = array
    return made


def _with_length(shape: Shape, axis: int, length: int) -> Shape:
    return (*shape[:axis], length, *shape[axis + 1 :])


def _prefix(axis: int, length: int) -> tuple[slice, ...]:
    """An index of the first `length` positions along an axis."""
    return (*(slice(None),) * axis, slice(length))
