"""What a model accepts, checked by name, datatype and shape, and which requests may share a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from server.datatypes import wire_name
from server.errors import BadRequest
from server.types import Fits, RequestedOutput, Tensors, TensorSpec

Shape = tuple[int, ...]
_SHOWN = 20  # names in a text; models may have hundreds of optional inputs


class Group(NamedTuple):
    """How a request batches: requests with an equal ``key`` may be stacked along their rows.

    ``work`` is what the time of its execution is taken to grow with: its elements along the dimensions that may vary,
    of the input that has most. That is the rows, and where other dimensions vary, rows times lengths, or pixels.
    """

    rows: int  # 0: never stacked with others
    key: tuple[Shape, ...]
    work: int
    optional: bool = False  # it gives other inputs than those that batch, for which code may have to be compiled


class Signature:
    """The inputs and outputs of one version, and whether its rows are independent.

    ``ragged``: requests batch whatever their lengths are. ``optional``: inputs that a request may leave out. One that
    gives them shares its execution with no other: they have no rows, and belong to it alone. ``fits``: so does
    one whose shapes it says are not like those of a batch, as where an input has more rows than another.
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
        self.labels: Mapping[str, Sequence[bytes]] = {}  # by output: what its classes are called, for who asks for them
        self.everything = tuple(RequestedOutput(name) for name in self.outputs)
        self._varying = {
            spec.name: [axis for axis, size in enumerate(spec.shape) if size == -1] for spec in (*inputs, *optional)
        }

    def group(self, shapes: Mapping[str, tuple[str, Shape]]) -> Group:
        """Check (datatype, shape) per input name against the model; raises BadRequest naming what differs."""
        given = shapes.keys() & self.optional.keys() if self.optional else None
        if (shapes.keys() - given if given else shapes.keys()) != self.inputs.keys():
            raise BadRequest(f"inputs: expected {self.expected}, got {sorted(shapes)}")
        for name, (datatype, shape) in shapes.items():
            self._check(self.spec(name), datatype, shape)
        work = max((self._extent(self.spec(name), shape) for name, (_, shape) in shapes.items()), default=1)
        if not self.batchable or given:
            return Group(0, (), work, bool(given))
        if self.fits is not None and not self.fits({name: shape for name, (_, shape) in shapes.items()}):
            return Group(0, (), work, True)
        rows = {name: shapes[name][1][0] for name in self.inputs}
        if len(set(rows.values())) != 1:
            raise BadRequest(f"inputs: expected the same number of rows in every input, got {rows}")
        key = () if self.ragged else tuple(shapes[name][1][1:] for name in self.inputs)
        return Group(next(iter(rows.values())), key, work)

    def spec(self, name: str) -> TensorSpec:
        """Return what an input has to be like; KeyError for a name that is none."""
        return self.inputs.get(name) or self.optional[name]

    @property
    def expected(self) -> str:
        """The inputs' names, for errors."""
        optional = f", and if wanted {few(sorted(self.optional))}" if self.optional else ""
        return f"{sorted(self.inputs)}{optional}"

    def group_of(self, tensors: Tensors) -> Group:
        """Check arrays in place of declared shapes."""
        return self.group({name: (wire_name(array), array.shape) for name, array in tensors.items()})

    def _extent(self, spec: TensorSpec, shape: Shape) -> int:
        """How large an input is along what may vary."""
        return prod(shape if spec.any_rank else (shape[axis] for axis in self._varying[spec.name]))

    def unbatched(self) -> Signature:
        """Return the same without batches: the leading dimension belongs to one request."""
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

    def requested(self, names: Sequence[RequestedOutput]) -> tuple[RequestedOutput, ...]:
        """Return the outputs to answer: all when none is named; raises BadRequest on unknown or repeated ones."""
        seen: set[str] = set()
        for output in names:
            if output.name not in self.outputs:
                raise BadRequest(f"outputs: expected some of {list(self.outputs)}, got {output.name!r}")
            if output.name in seen:
                raise BadRequest(f"outputs: {output.name!r} is asked for twice")
            seen.add(output.name)
        return tuple(names) or self.everything


def few(names: Sequence[str]) -> str:
    """Return the first of some names, for people, and how many there are beside them."""
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def element_count(shape: Shape) -> int:
    """Return the number of elements; exact, since Python's integers do not overflow."""
    return prod(shape)
