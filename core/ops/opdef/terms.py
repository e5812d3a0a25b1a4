"""Graph construction in Python syntax: `Writer` appends nodes, and a `Term` is a value with Python's operators.

Gradients and definitions of operators, losses and optimizers are written with them. Shapes may be symbolic: parameters
such as Reshape's shape are attributes, which may hold dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeGuard, Union

import numpy as np

from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Array, Attr, Graph, Node, Value, node_reads
from lathe.core.ir.types import Dim, DType, TensorType
from lathe.core.ops.opdef.inference import infer_graph, infer_node

Number: TypeAlias = int | float
Operand: TypeAlias = Union["Term", Number]

_UNTYPED = TensorType(DType.FLOAT32, None)


class Writer:
    """Appends nodes to `graph` and infers their types. Names are unique, across nested graphs as well."""

    def __init__(self, graph: Graph, known: Mapping[Value, Array] | None = None, names: set[str] | None = None) -> None:
        """`known`: elements of values that inference has found. `names`: taken names; by default those in the graph."""
        self.graph = graph
        self._names = _all_names(graph) if names is None else names
        self.known = {**graph.constants, **(known or {})}
        self._numbers: dict[tuple[Number, DType], Value] = {}
        self._counts: dict[str, int] = {}
        self.scope = ""  # a prefix of the names of new nodes
        self.device = ""  # the device annotation of new nodes
        self.after: tuple[Value, ...] = ()  # control edges of new nodes that read a value that is no constant

    def nested(self, graph: Graph) -> Writer:
        """A writer for `graph`, a body in this writer's graph: it shares the set of taken names."""
        inner = Writer(graph, self.known, self._names)
        inner.scope = self.scope  # the body runs where its node does, so its nodes have no annotations
        return inner

    def fresh(self, base: str) -> str:
        """An unused name, which is then taken: `base`, or `base_2`, `base_3`, ..."""
        name = base
        while name in self._names:
            self._counts[base] = self._counts.get(base, 1) + 1
            name = f"{base}_{self._counts[base]}"
        self._names.add(name)
        return name

    def input(self, name: str, type_: TensorType) -> Term:
        """Adds an input to the graph; its name is `name`, or a variant of it that is unused."""
        value = Value(self.fresh(name), type_)
        self.graph.inputs.append(value)
        return Term(self, value)

    def emit(
        self, op: str, inputs: Sequence[Value | None], attrs: dict[str, Attr] | None = None, outputs: int = 1
    ) -> list[Value]:
        """Appends a node; returns its `outputs` outputs. ModelError, without a new node, as in `infer_node`."""
        present = list(inputs)
        while present and present[-1] is None:
            present.pop()
        name = self.fresh(self.scope + op.lower())
        can_wait = any(value is not None and value not in self.graph.constants for value in present)
        node = Node(op, present, [], dict(attrs or {}), name, self.device, self.after if can_wait else ())
        node.outputs = [Value(name if i == 0 else self.fresh(f"{name}.{i}"), _UNTYPED, node) for i in range(outputs)]
        infer_node(node, self.known)
        self.graph.nodes.append(node)
        return node.outputs

    def inline(self, body: Graph, arguments: Sequence[Value]) -> list[Value]:
        """Appends a copy of a nested graph's nodes, on `arguments` as inputs; returns the outputs of the copy.

        Infers the types of the whole graph again. ModelError if the types of `arguments` do not fit: the nodes stay in
        the graph. ValueError, without new nodes, if their number does not fit.
        """
        copy = body.clone()
        for value in copy.values():
            value.name = self.fresh(value.name)
        copy.replace_uses(dict(zip(copy.inputs, arguments, strict=True)))
        self.graph.constants.update(copy.constants)
        self.graph.nodes += copy.nodes
        self.known.update(infer_graph(self.graph, dict(self.known)))
        return copy.outputs

    def array(self, array: object, dtype: DType | None = None, name: str = "c") -> Term:
        """Adds a constant with the elements of `array`, anything that `np.array` accepts, and returns its term.

        `dtype` is that of `np.array(array)` by default. The elements are copied, unless `array` is a read-only
        contiguous array of this dtype: the weights of a large model exist once.
        """
        data = array if _is_constant(array, dtype) else np.array(array, dtype.numpy if dtype else None)
        data.setflags(write=False)
        value = Value(self.fresh(name), TensorType(DType.from_numpy(data.dtype), data.shape))
        self.graph.constants[value] = self.known[value] = data
        return Term(self, value)

    def number(self, number: Number, dtype: DType) -> Term:
        """A constant of rank 0; equal ones are shared."""
        key = (number, dtype)
        if key not in self._numbers:
            self._numbers[key] = self.array(number, dtype).value
        return Term(self, self._numbers[key])

    def fill(self, number: Number, dtype: DType, shape: Sequence[Dim]) -> Term:
        """A tensor of this shape with the same number everywhere."""
        return self.number(number, dtype).expand(shape)

    def iota(self, shape: Sequence[Dim], steps: Sequence[int], start: Dim = 0, dtype: DType = DType.INT64) -> Term:
        """A tensor of integers: the element at [i, j, ...] is start + steps[0] * i + steps[1] * j + ..."""
        attrs: dict[str, Attr] = {"dtype": dtype, "shape": tuple(shape), "start": start, "steps": tuple(steps)}
        return Term(self, self.emit("Iota", [], attrs)[0])

    def places(self, shape: Sequence[Dim], axis: int, rank: int, dtype: DType = DType.INT64) -> Term:
        """The indices 0, 1, ... along `axis` of `shape`, as a tensor of rank `rank` with extent 1 along other axes."""
        extents = tuple(shape[axis] if i == axis else 1 for i in range(rank))
        return self.iota(extents, tuple(int(i == axis) for i in range(rank)), dtype=dtype)

    def extent(self, dim: Dim) -> Term:
        """A dimension as a value: int64 of rank 0."""
        return self.number(dim, DType.INT64) if isinstance(dim, int) else self.iota((), (), dim)

    def zeros_like(self, value: Value) -> Term:
        return self.fill(0, value.dtype, value.shape)

    def term(self, value: Value) -> Term:
        return Term(self, value)


class Term:
    """A tensor of a graph under construction. Python numbers combined with it become constants of its element type."""

    __slots__ = ("value", "writer")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, writer: Writer, value: Value) -> None:
        self.writer = writer
        self.value = value

    @property
    def dtype(self) -> DType:
        return self.value.dtype

    @property
    def shape(self) -> tuple[Dim, ...]:
        """The extents. UnsupportedError if the rank is not known."""
        if self.value.tensor.shape is None:
            raise UnsupportedError("its rank is not known, but differentiation needs it", where=f"%{self.value.name}")
        return self.value.shape

    @property
    def rank(self) -> int:
        return len(self.shape)

    def op(self, name: str, *others: Operand | None, **attrs: Attr) -> Term:
        """Emits the operator `name` on this term and `others`; returns the first output."""
        return self._emit(name, others, attrs, 1)[0]

    def ops(self, name: str, *others: Operand | None, outputs: int, **attrs: Attr) -> list[Term]:
        """Emits the operator `name` on this term and `others`; returns the first `outputs` outputs."""
        return self._emit(name, others, attrs, outputs)

    def _emit(self, name: str, others: Sequence[Operand | None], attrs: dict[str, Attr], outputs: int) -> list[Term]:
        inputs = [self.value, *(None if other is None else self._like(other).value for other in others)]
        return [Term(self.writer, value) for value in self.writer.emit(name, inputs, attrs, outputs)]

    def _like(self, other: Operand) -> Term:
        return other if isinstance(other, Term) else self.writer.number(other, self.dtype)

    # Arithmetic

    def __add__(self, other: Operand) -> Term:
        return self if _is(other, 0) else self.op("Add", other)

    __radd__ = __add__

    def __sub__(self, other: Operand) -> Term:
        return self if _is(other, 0) else self.op("Sub", other)

    def __rsub__(self, other: Operand) -> Term:
        return self._like(other).op("Sub", self)

    def __mul__(self, other: Operand) -> Term:
        return self if _is(other, 1) else self.op("Mul", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Operand) -> Term:
        return self if _is(other, 1) else self.op("Div", other)

    def __rtruediv__(self, other: Operand) -> Term:
        return self._like(other).op("Div", self)

    def __pow__(self, other: Operand) -> Term:
        return self if _is(other, 1) else self.op("Pow", other)

    def __neg__(self) -> Term:
        return self.op("Neg")

    def __matmul__(self, other: Term) -> Term:
        return self.op("MatMul", other)

    def __lt__(self, other: Operand) -> Term:
        return self.op("Less", other)

    def __le__(self, other: Operand) -> Term:
        return self.op("LessOrEqual", other)

    def __gt__(self, other: Operand) -> Term:
        return self.op("Greater", other)

    def __ge__(self, other: Operand) -> Term:
        return self.op("GreaterOrEqual", other)

    def equals(self, other: Operand) -> Term:
        return self.op("Equal", other)

    def exp(self) -> Term:
        return self.op("Exp")

    def log(self) -> Term:
        return self.op("Log")

    def sqrt(self) -> Term:
        return self.op("Sqrt")

    def abs(self) -> Term:
        return self.op("Abs")

    def sign(self) -> Term:
        return self.op("Sign")

    def square(self) -> Term:
        return self * self

    def where(self, yes: Operand, no: Operand) -> Term:
        """`yes` where this boolean term is true, otherwise `no`. TypeError unless one of them is a term."""
        like = yes if isinstance(yes, Term) else no
        if not isinstance(like, Term):
            raise TypeError("where: expected a term as one of the two choices, to know the element type; got numbers")
        return self.op("Where", like._like(yes), like._like(no))

    def cast(self, dtype: DType) -> Term:
        return self if self.dtype is dtype else self.op("Cast", to=dtype)

    # Shapes

    def reshape(self, shape: Sequence[Dim]) -> Term:
        return self if tuple(shape) == self.shape else self.op("Reshape", shape=tuple(shape), allowzero=1)

    def expand(self, shape: Sequence[Dim]) -> Term:
        return self if tuple(shape) == self.shape else self.op("Expand", shape=tuple(shape))

    def transpose(self, *perm: int) -> Term:
        return self if list(perm) == sorted(perm) else self.op("Transpose", perm=perm)

    def swap(self) -> Term:
        """The transpose of the last two axes."""
        rank = self.rank
        return self.transpose(*range(rank - 2), rank - 1, rank - 2)

    def unsqueeze(self, *axes: int) -> Term:
        return self.op("Unsqueeze", axes=axes)

    def squeeze(self, *axes: int) -> Term:
        return self.op("Squeeze", axes=axes)

    def slice(self, axis: int, start: Dim, end: Dim, step: int = 1) -> Term:
        return self.op("Slice", starts=(start,), ends=(end,), axes=(axis,), steps=(step,))

    def pad(self, widths: Sequence[tuple[Dim, Dim]]) -> Term:
        """Pads with zeros, (before, after) per axis; negative widths cut."""
        if all(width == (0, 0) for width in widths):
            return self
        return self.op("Pad", pads=(*(before for before, _ in widths), *(after for _, after in widths)))

    def gather(self, indices: Term, axis: int = 0) -> Term:
        return self.op("Gather", indices, axis=axis)

    def sum(self, axes: Sequence[int] | None = None, keepdims: bool = True) -> Term:
        """The sum over `axes`; over all axes by default."""
        return self._reduce("ReduceSum", axes, keepdims)

    def mean(self, axes: Sequence[int] | None = None, keepdims: bool = True) -> Term:
        return self._reduce("ReduceMean", axes, keepdims)

    def max(self, axes: Sequence[int] | None = None, keepdims: bool = True) -> Term:
        return self._reduce("ReduceMax", axes, keepdims)

    def _reduce(self, op: str, axes: Sequence[int] | None, keepdims: bool) -> Term:
        over = tuple(range(self.rank)) if axes is None else tuple(axes)
        return self if not over else self.op(op, axes=over, keepdims=int(keepdims))

    def count(self, axes: Sequence[int]) -> Operand:
        """The number of elements that a reduction over `axes` combines.

        A float, or if extents are symbolic, a term of rank 0 of this term's element type.
        """
        extents = [self.shape[axis] for axis in axes]
        numbers = [extent for extent in extents if isinstance(extent, int)]
        if len(numbers) == len(extents):
            return float(np.prod(numbers, dtype=np.float64))
        return self.writer.fill(1, self.dtype, extents).sum(keepdims=False)

    def fit(self, shape: Sequence[Dim]) -> Term:
        """Converts a gradient of a broadcast tensor to the gradient of its source of shape `shape`.

        Sums over axes along which the source was repeated, and expands along axes over which this term was summed.
        """
        own, wanted = self.shape, tuple(shape)
        if own == wanted:
            return self
        lead = max(len(own) - len(wanted), 0)
        pairs = list(zip(own[lead:], wanted[len(wanted) - len(own) + lead :], strict=True))
        repeated = [*range(lead), *(lead + i for i, (a, b) in enumerate(pairs) if b == 1 and a != 1)]
        result = self.sum(repeated, keepdims=repeated != list(range(lead)))
        if lead and result.rank > len(wanted):
            result = result.reshape(result.shape[lead:])
        return result if _agree(result.shape, wanted) else result.expand(wanted)


def _agree(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether two shapes have equal ranks, and extents that are equal or both other than 1 (assumed to be equal)."""
    if len(a) != len(b):
        return False
    return all(x == y or (x != 1 and y != 1) for x, y in zip(a, b, strict=True))


def _is(operand: Operand, number: Number) -> bool:
    return not isinstance(operand, Term) and operand == number


def _is_constant(array: object, dtype: DType | None) -> TypeGuard[Array]:
    """Whether `array` is a read-only contiguous array of `dtype` (None: any)."""
    if not isinstance(array, np.ndarray) or array.flags.writeable or not array.flags.c_contiguous:
        return False
    return dtype is None or array.dtype == dtype.numpy


def _all_names(graph: Graph) -> set[str]:
    names = {value.name for value in graph.values()} | {node.name for node in graph.nodes}
    for node in graph.nodes:
        names.update(value.name for value in node_reads(node))
        for body in node.subgraphs:
            names |= _all_names(body)
    return names
