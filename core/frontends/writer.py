"""Appends ONNX operators to a graph, with parameters as inputs, including parameters that depend on symbols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lathe.core.errors import UnsupportedError
from lathe.core.frontends.scope import Emitter, ImportSession
from lathe.core.ir.dim import Atom, Dim, FloorDiv, Maximum, SymDim, is_data_dependent
from lathe.core.ir.graph import Attr, Graph, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef import registry

# Operators and parameters that ONNX has as tensors of rank 0, and parameters with the element type of the data.
_SCALAR_OPS = frozenset({"Clip", "CumProd", "CumSum", "DFT", "Dropout", "MelWeightMatrix", "OneHot", "STFT", "Trilu"})
_SCALARS = frozenset({("Pad", "constant_value")})
_LIKE_DATA = frozenset({("Clip", "min"), ("Clip", "max"), ("Pad", "constant_value")})


class Writer:
    """Appends nodes in ONNX form to a graph and infers their types. `emitter.label` is the prefix of new names.

    `sources` maps each symbol to a value and the axis that has it as its extent, so that `Shape` can compute it.
    """

    def __init__(self, graph: Graph, session: ImportSession, sources: Mapping[str, tuple[Value, int]]) -> None:
        self.session = session
        self.emitter = Emitter(graph, session)
        self.sources = dict(sources)
        self.sizes: dict[str, Value] = {}  # the symbols that the graph already computes

    def add_sources(self, value: Value) -> None:
        """Record `value` in `sources` for each symbol that is the extent of one of its axes and has no source yet."""
        shape = value.type.shape if isinstance(value.type, TensorType) else None
        for axis, dim in enumerate(shape or ()):
            if isinstance(dim, SymDim) and str(dim).isidentifier():
                self.sources.setdefault(str(dim), (value, axis))

    def emit(self, op: str, *inputs: Value | None, **attrs: Attr) -> Value:
        """Add a node and return its only output.

        The operator's parameters (such as shapes and axes) may be passed as keyword attributes, also with symbols;
        those that ONNX takes as inputs become constant or computed inputs.
        """
        onnx_inputs, onnx_attrs = self.in_onnx_form(op, inputs, attrs)
        return self.emitter(op, *onnx_inputs, **onnx_attrs)

    def emit_many(self, op: str, inputs: Sequence[Value | None], count: int, **attrs: Attr) -> list[Value]:
        """Like `emit`, for a node with `count` outputs, which it returns."""
        onnx_inputs, onnx_attrs = self.in_onnx_form(op, inputs, attrs)
        names = [self.session.fresh(f"{self.emitter.label}.{op.lower()}") for _ in range(count)]
        return list(self.emitter.emit(op, onnx_inputs, onnx_attrs, names, names[0]))

    def transposed(self, value: Value, perm: Attr) -> Value:
        """`value` transposed by `perm`; `value` itself if that is None or the identity."""
        if not isinstance(perm, tuple) or perm == tuple(range(len(perm))):
            return value
        return self.emit("Transpose", value, perm=perm)

    def inlined(self, body: Graph, inputs: Sequence[Value]) -> list[Value]:
        """Add the nodes of a fused body (over single elements), applied to whole tensors; returns their results."""
        values = dict(zip(body.inputs, inputs, strict=True))
        values.update({value: self.emitter.constant(array) for value, array in body.constants.items()})
        for node in body.nodes:
            arguments = [values[value] if value is not None else None for value in node.inputs]
            if node.op == "Cast" and arguments[0] is not None:
                arguments[0] = self._saturate(arguments[0], node.output.dtype)
            values[node.output] = self.emit(node.op, *arguments, **node.attrs)
        return [values[value] for value in body.outputs]

    def _saturate(self, value: Value, dtype: DType) -> Value:
        """`value` clipped to the range of `dtype`, before a cast from float to an integer of 8 or 16 bits.

        Other values are returned as they are. Lathe's casts in fused bodies saturate; ONNX does not define casts of
        values out of range.
        """
        if not value.dtype.is_float or not dtype.is_integer or dtype.bits not in (8, 16):
            return value
        limits = np.iinfo(dtype.label)
        return self.emit("Clip", value, min=(float(limits.min),), max=(float(limits.max),))

    def expand(self, value: Value, like: Value, given: Sequence[Value | None]) -> Value:
        """`value` broadcast to the shape of `like`, which is the broadcast of the shapes of all `given` values."""
        if value.type == like.type:
            return value
        if not any(map(is_data_dependent, like.shape)):
            return self.emit("Expand", value, shape=like.shape)
        for each in given:
            if each is not None and each.type != value.type:
                value = self.emit("Expand", value, self.emit("Shape", each))
        return value

    # Parameters

    def in_onnx_form(
        self, op: str, inputs: Sequence[Value | None], attrs: Mapping[str, Attr]
    ) -> tuple[list[Value | None], dict[str, Attr]]:
        """A node's inputs and attributes as ONNX has them.

        Parameters among the attributes that ONNX takes as inputs become inputs. Attributes that are None, and the
        layout "NCHW", are dropped.
        """
        onnx_inputs: list[Value | None] = list(inputs)
        onnx_attrs: dict[str, Attr] = {name: value for name, value in attrs.items() if value is not None}
        if onnx_attrs.get("layout") == "NCHW":
            del onnx_attrs["layout"]
        for name, index in registry.get(op).params.items():
            if name in onnx_attrs:
                onnx_inputs += [None] * (index + 1 - len(onnx_inputs))
                onnx_inputs[index] = self._parameter(op, name, onnx_attrs.pop(name), onnx_inputs[0])
        return onnx_inputs, onnx_attrs

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
        """Emit nodes that compute `dims` in a run from the shapes in `sources`; returns a vector of int64.

        UnsupportedError for a symbol that is not in `sources`.
        """
        parts = [self._dim(dim) for dim in dims]
        return parts[0] if len(parts) == 1 else self.emitter("Concat", *parts, axis=0)

    def _dim(self, dim: Dim) -> Value:
        """One dimension as int64[1]: a constant, or computed in the run."""
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
            # floor division: ONNX's Div rounds towards zero, but its Mod has the sign of the divisor
            return self.emitter("Div", self.emitter("Sub", above, self.emitter("Mod", above, below)), below)
        if isinstance(atom, Maximum):
            return self.emitter("Max", self._dim(atom.one), self._dim(atom.other))
        if atom not in self.sizes:
            if atom not in self.sources:
                message = f"has a parameter that depends on '{atom}', which is no dimension of any value"
                raise UnsupportedError(message, where=f"node '{self.emitter.label}'")
            value, axis = self.sources[atom]
            self.sizes[atom] = self.emitter("Shape", value, start=axis, end=axis + 1)
        return self.sizes[atom]
