"""Appends ONNX operators to a graph: parameters are inputs, also those that depend on symbols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from core.errors import UnsupportedError
from core.frontends.scope import Emitter, Session
from core.ir.dim import Atom, Dim, FloorDiv, Larger, SymDim, is_open
from core.ir.graph import Attr, Graph, Value
from core.ir.types import DType, TensorType
from core.ops import registry

# Parameters that ONNX gives as a tensor of rank 0, and those that have the element type of the data.
_SCALAR_OPS = frozenset({"Clip", "CumProd", "CumSum", "DFT", "Dropout", "MelWeightMatrix", "OneHot", "STFT", "Trilu"})
_SCALARS = frozenset({("Pad", "constant_value")})
_LIKE_DATA = frozenset({("Clip", "min"), ("Clip", "max"), ("Pad", "constant_value")})


class Writer:
    """Writes one node after the other, with types inferred, under the name `label`."""

    def __init__(self, graph: Graph, session: Session, sources: Mapping[str, tuple[Value, int]]) -> None:
        self.session = session
        self.emitter = Emitter(graph, session)
        self.sources = dict(sources)  # where a symbol can be read off: a value and its axis
        self.sizes: dict[str, Value] = {}  # the symbols whose values the graph has computed

    def learn(self, value: Value) -> None:
        """Note the symbols that the value's shape shows."""
        shape = value.type.shape if isinstance(value.type, TensorType) else None
        for axis, dim in enumerate(shape or ()):
            if isinstance(dim, SymDim) and str(dim).isidentifier():
                self.sources.setdefault(str(dim), (value, axis))

    def emit(self, op: str, *inputs: Value | None, **attrs: Attr) -> Value:
        """A new node of one output, its parameters given as attributes or inputs."""
        given, kept = self.as_in_onnx(op, inputs, attrs)
        return self.emitter(op, *given, **kept)

    def emit_many(self, op: str, inputs: Sequence[Value | None], count: int, **attrs: Attr) -> list[Value]:
        """A new node of several outputs."""
        given, kept = self.as_in_onnx(op, inputs, attrs)
        names = [self.session.fresh(f"{self.emitter.label}.{op.lower()}") for _ in range(count)]
        return list(self.emitter.emit(op, given, kept, names, names[0]))

    def transposed(self, value: Value, perm: Attr) -> Value:
        """A transpose; None stands for the identity."""
        if not isinstance(perm, tuple) or perm == tuple(range(len(perm))):
            return value
        return self.emit("Transpose", value, perm=perm)

    def inlined(self, body: Graph, inputs: Sequence[Value]) -> list[Value]:
        """The results of a fused body, applied to whole tensors."""
        values = dict(zip(body.inputs, inputs, strict=True))
        values.update({value: self.emitter.constant(array) for value, array in body.constants.items()})
        for node in body.nodes:
            arguments = [values[value] if value is not None else None for value in node.inputs]
            if node.op == "Cast" and arguments[0] is not None:
                arguments[0] = self._within(arguments[0], node.output.dtype)
            values[node.output] = self.emit(node.op, *arguments, **node.attrs)
        return [values[value] for value in body.outputs]

    def _within(self, value: Value, dtype: DType) -> Value:
        """What is about to become a small integer: Lathe's casts saturate, which ONNX leaves open."""
        if not value.dtype.is_float or not dtype.is_integer or dtype.bits not in (8, 16):
            return value
        limits = np.iinfo(dtype.label)
        return self.emit("Clip", value, min=(float(limits.min),), max=(float(limits.max),))

    def expanded(self, value: Value, like: Value, given: Sequence[Value | None]) -> Value:
        """`value` broadcast to the shape of `like`, which is that of all the `given` values together."""
        if value.type == like.type:
            return value
        if not any(map(is_open, like.shape)):
            return self.emit("Expand", value, shape=like.shape)
        for each in given:
            if each is not None and each.type != value.type:
                value = self.emit("Expand", value, self.emit("Shape", each))
        return value

    # Parameters

    def as_in_onnx(
        self, op: str, inputs: Sequence[Value | None], attrs: Mapping[str, Attr]
    ) -> tuple[list[Value | None], dict[str, Attr]]:
        """Inputs and attributes of a node as ONNX has them: parameters are inputs."""
        given: list[Value | None] = list(inputs)
        kept: dict[str, Attr] = {name: value for name, value in attrs.items() if value is not None}
        if kept.get("layout") == "NCHW":
            del kept["layout"]
        for name, index in registry.get(op).params.items():
            if name in kept:
                given += [None] * (index + 1 - len(given))
                given[index] = self._parameter(op, name, kept.pop(name), given[0])
        return given, kept

    def _parameter(self, op: str, name: str, value: Attr, data: Value | None) -> Value:
        items = value if isinstance(value, tuple) else (value,)
        if any(isinstance(item, SymDim) for item in items):
            dims = self.dims(items)  # type: ignore[arg-type]
            return self.emitter("Squeeze", dims) if op in _SCALAR_OPS else dims
        array = np.asarray(items, np.int64 if not items else None)
        if data is not None and (op, name) in _LIKE_DATA:
            array = array.astype(data.dtype.numpy)
        elif array.dtype == np.float64:
            array = array.astype(np.float32)
        if op in _SCALAR_OPS or (op, name) in _SCALARS:
            array = array.reshape(())
        return self.emitter.constant(array, self.session.fresh(f"{self.emitter.label}/{name}"))

    # Dimensions

    def dims(self, dims: Sequence[Dim]) -> Value:
        """A vector of dimensions."""
        parts = [self._dim(dim) for dim in dims]
        return parts[0] if len(parts) == 1 else self.emitter("Concat", *parts, axis=0)

    def _dim(self, dim: Dim) -> Value:
        """One dimension as a vector of one element: a sum of products."""
        if not isinstance(dim, SymDim):
            return self.emitter.constant([dim], dtype=DType.INT64)
        terms = [self._product(atoms, factor) for atoms, factor in dim.terms]
        total = terms[0]
        for term in terms[1:]:
            total = self.emitter("Add", total, term)
        return total

    def _product(self, atoms: Sequence[Atom], factor: int) -> Value:
        factors = [self._atom(atom) for atom in atoms]
        if factor != 1 or not factors:
            factors.append(self._dim(factor))
        result = factors[0]
        for each in factors[1:]:
            result = self.emitter("Mul", result, each)
        return result

    def _atom(self, atom: Atom) -> Value:
        if isinstance(atom, FloorDiv):
            above, below = self._dim(atom.numerator), self._dim(atom.denominator)
            # ONNX's Div rounds towards zero, its Mod has the divisor's sign
            return self.emitter("Div", self.emitter("Sub", above, self.emitter("Mod", above, below)), below)
        if isinstance(atom, Larger):
            return self.emitter("Max", self._dim(atom.one), self._dim(atom.other))
        if atom not in self.sizes:
            if atom not in self.sources:
                message = f"has a parameter that depends on '{atom}', which no value shows"
                raise UnsupportedError(message, where=f"node '{self.emitter.label}'")
            value, axis = self.sources[atom]
            self.sizes[atom] = self.emitter("Shape", value, start=axis, end=axis + 1)
        return self.sizes[atom]
