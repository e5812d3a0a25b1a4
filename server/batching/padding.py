"""Requests of different lengths made equal, so that they share batches: padded with a mask, answers cut back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from server.batching.entry import Entry, Outcome
from server.batching.signature import Signature
from server.datatypes import NUMPY_OF
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
        """Pad a request that is about to be queued; raises BadRequest when its inputs are not equally long."""
        length = self._length(entry.inputs)
        padded = self._padded(length)
        if padded == length:
            return
        inputs = dict(entry.inputs)
        for name in (self.mask, *self.inputs):
            inputs[name] = _filled(inputs[name], self.axis, padded, 0 if name == self.mask else self.value)
        entry.replace(inputs, signature.group_of(inputs))
        self._cut_back(entry, length, padded)

    def _cut_back(self, entry: Entry, length: int, padded: int) -> None:
        tell = entry.done

        def done(outcome: Outcome) -> None:
            tell(outcome if isinstance(outcome, Exception) else self._cut(outcome, length, padded))

        entry.done = done

    def _cut(self, outputs: Tensors, length: int, padded: int) -> Tensors:
        cut = dict(outputs)
        for name in self.outputs:
            if outputs[name].shape[self.axis] == padded:
                cut[name] = np.ascontiguousarray(outputs[name][_first(self.axis, length)])
        return cut

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


def _holds(dtype: np.dtype[Any], value: float) -> bool:
    if dtype.kind == "b":
        return value in (0, 1)
    if dtype.kind not in "iu":
        return True
    bounds = np.iinfo(dtype)
    return bounds.min <= value <= bounds.max and value == int(value)


def _filled(array: Array, axis: int, length: int, value: float) -> Array:
    shape = (*array.shape[:axis], length, *array.shape[axis + 1 :])
    made = np.full(shape, value, array.dtype)
    made[_first(axis, array.shape[axis])] = array
    return made


def _first(axis: int, length: int) -> tuple[slice, ...]:
    """An index of the first ``length`` places along an axis."""
    return (*(slice(None),) * axis, slice(length))
