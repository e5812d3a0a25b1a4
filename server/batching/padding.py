"""Requests of different lengths made equal, so that they share batches: padded with a mask, answers cut back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from server.batching.entry import Entry, Outcome
from server.batching.signature import Shape, Signature
from server.datatypes import NUMPY_OF, wire_name
from server.errors import BadRequest
from server.types import Array, Tensors, TensorSpec


@dataclass(frozen=True, slots=True)
class Padding:
    """How a model's requests may be padded, said by its owner: the model must heed the mask.

    Along ``axis`` all of ``inputs`` are filled up with ``value`` and ``mask`` with 0, to the next multiple of
    ``multiple``, though not beyond ``longest``; of the answers, ``outputs`` are cut back to the request's own length.
    """

    mask: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    axis: int = 1
    multiple: int = 16
    longest: int | None = None
    value: float = 0

    def problem(self, signature: Signature) -> str | None:
        """Return why a model cannot be padded so, None where it can."""
        return next(self._problems(signature), None)

    def apply(self, entry: Entry, signature: Signature) -> None:
        """Let a request that is about to be queued be padded; raises BadRequest when its inputs are not equally long.

        The thread that runs it fills its inputs up, as that takes the longer the larger they are.
        """
        length = self._length(entry.inputs)
        padded = self._padded(length)
        if padded == length:
            return
        shapes = {name: array.shape for name, array in entry.inputs.items()}
        for name in (self.mask, *self.inputs):
            shapes[name] = _lengthened(shapes[name], self.axis, padded)
        group = signature.group({name: (wire_name(entry.inputs[name]), shape) for name, shape in shapes.items()})
        grown = sum(
            (prod(shapes[name]) - entry.inputs[name].size) * entry.inputs[name].itemsize
            for name in (self.mask, *self.inputs)
        )
        entry.pad(Padded(self, length, padded), group, grown)

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
            if (spec := signature.inputs.get(name)) and not _holds(NUMPY_OF[spec.datatype], self.value):
                yield f"{name!r}: {spec.datatype} cannot hold value {self.value:g}"

    def _unfit(self, spec: TensorSpec) -> str | None:
        if spec.datatype == "BYTES" or spec.any_rank or len(spec.shape) <= self.axis or spec.shape[self.axis] != -1:
            return f"{spec.name!r}: expected numbers, of any length along axis {self.axis}, it is {spec.text}"
        return None


@dataclass(frozen=True, slots=True)
class Padded:
    """What padding does to one request: along the rule's axis its ``length`` becomes ``padded``."""

    rule: Padding
    length: int
    padded: int

    def fill(self, inputs: Tensors) -> Tensors:
        """Return the inputs filled up."""
        rule, filled = self.rule, dict(inputs)
        for name in (rule.mask, *rule.inputs):
            filled[name] = _filled(inputs[name], rule.axis, self.padded, 0 if name == rule.mask else rule.value)
        return filled

    def cut(self, outcome: Outcome) -> Outcome:
        """Return the outputs cut back to the request's own length; a failure as it is."""
        if isinstance(outcome, Exception):
            return outcome
        rule, cut = self.rule, dict(outcome)
        for name in rule.outputs:
            if outcome[name].shape[rule.axis] == self.padded:
                cut[name] = np.ascontiguousarray(outcome[name][_first(rule.axis, self.length)])
        return cut


def _holds(dtype: np.dtype[Any], value: float) -> bool:
    if dtype.kind == "b":
        return value in (0, 1)
    if dtype.kind not in "iu":
        return True
    bounds = np.iinfo(dtype)
    return bounds.min <= value <= bounds.max and value == int(value)


def _filled(array: Array, axis: int, length: int, value: float) -> Array:
    made = np.full(_lengthened(array.shape, axis, length), value, array.dtype)
    made[_first(axis, array.shape[axis])] = array
    return made


def _lengthened(shape: Shape, axis: int, length: int) -> Shape:
    return (*shape[:axis], length, *shape[axis + 1 :])


def _first(axis: int, length: int) -> tuple[slice, ...]:
    """An index of the first ``length`` places along an axis."""
    return (*(slice(None),) * axis, slice(length))
