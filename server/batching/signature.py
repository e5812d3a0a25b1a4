"""The signature of a model: validates inputs, and groups the requests that may share a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from lathe.server.datatypes import wire_name
from lathe.server.errors import BadRequest
from lathe.server.types import Fits, RequestedOutput, Shape, Tensors, TensorSpec

_SHOWN = 20  # the most names in an error message; models may have hundreds of optional inputs


class BatchGroup(NamedTuple):
    """Which requests may share a batch with a request: those with an equal `key` are stacked along their rows.

    `work` is the size that the cost model uses: the product of the extents along dynamic dimensions, of the input where
    it is largest. That is the rows, or rows times lengths, or rows times pixels.
    """

    rows: int  # 0: never stacked with other requests
    key: tuple[Shape, ...]  # inner shapes
    work: int
    optional: bool = False  # has optional inputs or unusual shapes: runs alone, and may need a compilation


class Signature:
    """The inputs and outputs of one version, and whether its rows are independent (`batchable`).

    `ragged`: requests of different lengths may share a batch. `optional`: inputs that a request may omit. A request
    with optional inputs runs alone, because they have no rows. `fits`: a predicate on the shapes; a request for which
    it is false runs alone as well, for example if one input has more rows than another.
    """

    def __init__(
        self,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        batchable: bool,
        ragged: bool = False,
        optional: Sequence[TensorSpec] = (),
        fits: Fits | None = None,
    ) -> None:
        self.inputs = {spec.name: spec for spec in inputs}
        self.optional = {spec.name: spec for spec in optional}
        self.outputs = {spec.name: spec for spec in outputs}
        self.batchable = batchable
        self.ragged = ragged
        self.fits = fits
        self.labels: Mapping[str, Sequence[bytes]] = {}  # by output: class names, for the classification extension
        self.all_outputs = tuple(RequestedOutput(name) for name in self.outputs)
        self._dynamic_axes = {
            spec.name: [axis for axis, size in enumerate(spec.shape) if size == -1] for spec in (*inputs, *optional)
        }

    def group(self, shapes: Mapping[str, tuple[str, Shape]]) -> BatchGroup:
        """The group of a request with these inputs: (datatype, shape) by name.

        BadRequest if names, datatypes, shapes or numbers of rows do not match the model; it names the input.
        """
        given = shapes.keys() & self.optional.keys() if self.optional else None
        if (shapes.keys() - given if given else shapes.keys()) != self.inputs.keys():
            raise self.wrong_names(shapes)
        for name, (datatype, shape) in shapes.items():
            self._check(self.spec(name), datatype, shape)
        work = max((self._dynamic_size(self.spec(name), shape) for name, (_, shape) in shapes.items()), default=1)
        if not self.batchable or given:
            return BatchGroup(0, (), work, bool(given))
        if self.fits is not None and not self.fits({name: shape for name, (_, shape) in shapes.items()}):
            return BatchGroup(0, (), work, True)
        rows = {name: shapes[name][1][0] for name in self.inputs}
        if len(set(rows.values())) != 1:
            raise BadRequest(f"inputs: expected the same number of rows in every input, got {rows}")
        key = () if self.ragged else tuple(shapes[name][1][1:] for name in self.inputs)
        return BatchGroup(next(iter(rows.values())), key, work)

    def wrong_names(self, given: Iterable[object]) -> BadRequest:
        """The error for inputs whose names are not the model's: the expected names, and at most 20 given names."""
        names = sorted(map(str, given))
        rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return BadRequest(f"inputs: expected {self.expected}, got {names[:_SHOWN]}{rest}")

    def spec(self, name: str) -> TensorSpec:
        """The specification of an input; KeyError for an unknown name."""
        return self.inputs.get(name) or self.optional[name]

    @property
    def expected(self) -> str:
        """The names of the model's inputs as text, for errors."""
        optional = f", and if wanted {first_names(sorted(self.optional))}" if self.optional else ""
        return f"{sorted(self.inputs)}{optional}"

    def group_of(self, tensors: Tensors) -> BatchGroup:
        """Like `group`, for arrays."""
        return self.group({name: (wire_name(array), array.shape) for name, array in tensors.items()})

    def _dynamic_size(self, spec: TensorSpec, shape: Shape) -> int:
        """The product of an input's extents along its dynamic dimensions."""
        return prod(shape if spec.any_rank else (shape[axis] for axis in self._dynamic_axes[spec.name]))

    def without_batching(self) -> Signature:
        """The signature of the same inputs and outputs, without batching, `ragged`, `fits` and labels.

        Its leading dimension is not a batch dimension.
        """
        inputs, outputs, optional = self.inputs.values(), self.outputs.values(), self.optional.values()
        return Signature(list(inputs), list(outputs), batchable=False, optional=list(optional))

    @staticmethod
    def _check(spec: TensorSpec, datatype: str, shape: Shape) -> None:
        if datatype != spec.datatype:
            raise BadRequest(f"input {spec.name!r}: expected datatype {spec.datatype}, got {datatype}")
        if spec.any_rank:
            return
        if len(shape) != len(spec.shape) or any(w not in (-1, g) for w, g in zip(spec.shape, shape, strict=True)):
            raise BadRequest(f"input {spec.name!r}: expected shape {list(spec.shape)}, got {list(shape)}")

    def requested_outputs(self, names: Sequence[RequestedOutput]) -> tuple[RequestedOutput, ...]:
        """The outputs to return: all if none is named. BadRequest for unknown or repeated names."""
        seen: set[str] = set()
        for output in names:
            if output.name not in self.outputs:
                raise BadRequest(f"outputs: expected some of {list(self.outputs)}, got {output.name!r}")
            if output.name in seen:
                raise BadRequest(f"outputs: {output.name!r} is requested twice")
            seen.add(output.name)
        return tuple(names) or self.all_outputs


def first_names(names: Sequence[str]) -> str:
    """The first 20 names, and the number of the rest, for error messages."""
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def element_count(shape: Shape) -> int:
    """The number of elements; exact, as Python's integers do not overflow."""
    return prod(shape)
