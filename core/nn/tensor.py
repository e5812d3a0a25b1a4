"""`Tensor`: the operands of a layer's `forward`, with PyTorch's names and arguments.

While a graph is traced, shapes may contain symbols: `x.shape[0]` may be the symbolic batch size, which supports
arithmetic like a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import Any, NoReturn, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import ModelError, TraceError
from lathe.core.ir.dim import SymDim, product
from lathe.core.ir.graph import Array, Attr, Value
from lathe.core.ir.types import Dim, DType
from lathe.core.nn.mode import EagerValue, current_mode
from lathe.core.ops.opdef.terms import Number, Term

Operand: TypeAlias = Union["Tensor", Number, NDArray[Any]]
Axes: TypeAlias = int | Sequence[int] | None
Index: TypeAlias = Union[int, slice, EllipsisType, "Tensor", NDArray[Any], None]


class Tensor:
    """A tensor: an array in eager mode, a value of the graph while a graph is traced."""

    __array_priority__ = 100  # `array * tensor` is a tensor
    __array_ufunc__ = None

    def __init__(self, value: Value) -> None:
        self._value, self._mode = value, current_mode()

    @property
    def value(self) -> Value:
        """The tensor's value in the current mode: a value of the graph that is traced, or one with elements."""
        return current_mode().take(self._value, self._mode)

    @property
    def term(self) -> Term:
        """The tensor as a `Term` (a value with operators) of the current mode's writer."""
        return Term(current_mode().writer, self.value)

    def op(self, name: str, *others: Operand | None, **attrs: Attr) -> Tensor:
        """The first output of the ONNX operator `name` (one of core/ops) with this tensor and `others` as inputs.

        None stands for an optional input that is left out. ModelError if the types of the inputs do not fit the
        operator; in eager mode FeedError if their elements do not.
        """
        return self.ops(name, *others, outputs=1, **attrs)[0]

    def ops(self, name: str, *others: Operand | None, outputs: int, **attrs: Attr) -> list[Tensor]:
        """The first `outputs` outputs of the ONNX operator `name`; inputs and errors as for `op`."""
        operands = [None if other is None else self._operand(other) for other in others]
        return [Tensor(term.value) for term in self.term.ops(name, *operands, outputs=outputs, **attrs)]

    def _operand(self, other: Operand) -> Term | Number:
        if isinstance(other, np.ndarray):
            return tensor(other.astype(self.dtype.numpy) if other.dtype.kind == "f" else other).term
        return other.term if isinstance(other, Tensor) else other

    # Type and elements

    @property
    def dtype(self) -> DType:
        return self.value.dtype

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.term.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int) -> Dim:
        return self.shape[dim]

    def extent(self, dim: int) -> int:
        """The extent of axis `dim`, which must be a number. ModelError if it is symbolic."""
        size = self.shape[dim]
        if isinstance(size, SymDim):
            raise ModelError(f"dimension {dim} of {self.value.type} is not known, expected a number", where="tensor")
        return size

    @property
    def is_computed(self) -> bool:
        """Whether the tensor has elements, as in eager mode."""
        return isinstance(self.value, EagerValue)

    def numpy(self) -> Array:
        """The elements, not a copy. TraceError while a graph is traced."""
        value = self.value
        return value.array if isinstance(value, EagerValue) else self._raise_unknown("the elements")

    def item(self) -> Any:
        """The element of a tensor with one element, as a Python number. TraceError while a graph is traced."""
        return self.numpy().item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.numpy(), dtype, copy=copy)

    def __bool__(self) -> bool:
        value = self.value
        return bool(value.array) if isinstance(value, EagerValue) else self._raise_unknown("a truth value")

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __len__(self) -> int:
        return self.extent(0)

    def __iter__(self) -> Iterator[Tensor]:
        """Iterate over the first axis, whose extent must be a number."""
        return (self[i] for i in range(len(self)))

    def _raise_unknown(self, what: str) -> NoReturn:
        message = (
            f"Python code needs {what}, but elements are unknown while a graph is traced; "
            "use nn.where, nn.cond or nn.while_loop, or run eagerly"
        )
        raise TraceError(message, where=f"tensor %{self.value.name}: {self.value.type}")

    def __repr__(self) -> str:
        value = self.value
        if not isinstance(value, EagerValue):
            return f"Tensor(%{value.name}: {value.type})"
        return f"Tensor({np.array2string(value.array, precision=4, separator=', ', prefix='Tensor(')}, {value.type})"

    # Arithmetic

    def __add__(self, other: Operand) -> Tensor:
        return self.op("Add", other)

    __radd__ = __add__

    def __sub__(self, other: Operand) -> Tensor:
        return self.op("Sub", other)

    def __rsub__(self, other: Operand) -> Tensor:
        return self._as_tensor(other).op("Sub", self)

    def __mul__(self, other: Operand) -> Tensor:
        return self.op("Mul", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Operand) -> Tensor:
        return self.op("Div", other)

    def __rtruediv__(self, other: Operand) -> Tensor:
        return self._as_tensor(other).op("Div", self)

    def __pow__(self, other: Operand) -> Tensor:
        return self.op("Pow", other)

    def __matmul__(self, other: Operand) -> Tensor:
        if not isinstance(other, Tensor | np.ndarray | int | float):
            return NotImplemented  # a sparse matrix multiplies itself
        return self.op("MatMul", other)

    def __neg__(self) -> Tensor:
        return self.op("Neg")

    def __lt__(self, other: Tensor | Number) -> Tensor:
        return self.op("Less", other)

    def __le__(self, other: Tensor | Number) -> Tensor:
        return self.op("LessOrEqual", other)

    def __gt__(self, other: Tensor | Number) -> Tensor:
        return self.op("Greater", other)

    def __ge__(self, other: Tensor | Number) -> Tensor:
        return self.op("GreaterOrEqual", other)

    def __invert__(self) -> Tensor:
        return self.op("Not")

    def __and__(self, other: Operand) -> Tensor:
        return self.op("And", other)

    def __or__(self, other: Operand) -> Tensor:
        return self.op("Or", other)

    def __eq__(self, other: Operand) -> Tensor:  # type: ignore[override]
        return self.op("Equal", other)

    def __ne__(self, other: Operand) -> Tensor:  # type: ignore[override]
        return ~(self == other)

    __hash__ = object.__hash__  # a tensor is equal to itself only when used as a key

    def _as_tensor(self, other: Operand) -> Tensor:
        """The operand as a tensor; a number gets this tensor's element type."""
        return other if isinstance(other, Tensor) else tensor(np.asarray(other, self.dtype.numpy))

    def matmul(self, other: Operand) -> Tensor:
        return self @ other

    def pow(self, exponent: Operand) -> Tensor:
        return self**exponent

    def exp(self) -> Tensor:
        return self.op("Exp")

    def log(self) -> Tensor:
        return self.op("Log")

    def sqrt(self) -> Tensor:
        return self.op("Sqrt")

    def abs(self) -> Tensor:
        return self.op("Abs")

    def relu(self) -> Tensor:
        return self.op("Relu")

    def sigmoid(self) -> Tensor:
        return self.op("Sigmoid")

    def tanh(self) -> Tensor:
        return self.op("Tanh")

    def softmax(self, dim: int) -> Tensor:
        return self.op("Softmax", axis=dim)

    def clamp(self, min: float | None = None, max: float | None = None) -> Tensor:
        low = self if min is None else self.op("Max", min)
        return low if max is None else low.op("Min", max)

    def masked_fill(self, mask: Operand, number: float) -> Tensor:
        """The tensor with `number` where the boolean mask is true."""
        return where(mask if isinstance(mask, Tensor) else tensor(mask), number, self)

    def to(self, dtype: DType | str) -> Tensor:
        """The tensor cast to another element type, such as `float32`."""
        return Tensor(self.term.cast(DType.parse(dtype) if isinstance(dtype, str) else dtype).value)

    def detach(self) -> Tensor:
        """The same elements without a gradient (StopGradient)."""
        return self.op("StopGradient")

    # Reductions

    def sum(self, dim: Axes = None, keepdim: bool = False) -> Tensor:
        return self._reduce("ReduceSum", dim, keepdim)

    def mean(self, dim: Axes = None, keepdim: bool = False) -> Tensor:
        return self._reduce("ReduceMean", dim, keepdim)

    def amax(self, dim: Axes = None, keepdim: bool = False) -> Tensor:
        return self._reduce("ReduceMax", dim, keepdim)

    def amin(self, dim: Axes = None, keepdim: bool = False) -> Tensor:
        return self._reduce("ReduceMin", dim, keepdim)

    def argmax(self, dim: int, keepdim: bool = False) -> Tensor:
        return self.op("ArgMax", axis=dim, keepdims=int(keepdim))

    def _reduce(self, op: str, dim: Axes, keepdim: bool) -> Tensor:
        axes = range(self.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
        return self.op(op, axes=tuple(axes), keepdims=int(keepdim))

    # Shapes

    def reshape(self, *shape: Dim | Sequence[Dim]) -> Tensor:
        """The same elements in another shape. One extent may be -1, which is then inferred."""
        extents = list(_flat_arguments(shape))
        if -1 in extents:
            extents[extents.index(-1)] = product(self.shape) // product(dim for dim in extents if dim != -1)
        return Tensor(self.term.reshape(extents).value)

    view = reshape

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        first, last = start_dim % self.ndim, end_dim % self.ndim
        shape = self.shape
        return self.reshape(*shape[:first], product(shape[first : last + 1]), *shape[last + 1 :])

    def permute(self, *dims: int | Sequence[int]) -> Tensor:
        axes = [dim % self.ndim for dim in _flat_arguments(dims) if isinstance(dim, int)]
        return Tensor(self.term.transpose(*axes).value)

    def transpose(self, dim0: int, dim1: int) -> Tensor:
        """The tensor with axes `dim0` and `dim1` exchanged."""
        axes = list(range(self.ndim))
        axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
        return self.permute(*axes)

    @property
    def T(self) -> Tensor:
        return self.permute(*reversed(range(self.ndim)))

    def unsqueeze(self, dim: int) -> Tensor:
        return Tensor(self.term.unsqueeze(dim % (self.ndim + 1)).value)

    def squeeze(self, dim: int) -> Tensor:
        return Tensor(self.term.squeeze(dim % self.ndim).value)

    def expand(self, *shape: Dim | Sequence[Dim]) -> Tensor:
        """The tensor broadcast to `shape`, which may have more leading axes; -1 leaves an axis unchanged."""
        extents = _flat_arguments(shape)
        own = (1,) * (len(extents) - self.ndim) + self.shape
        return Tensor(self.term.expand([a if b == -1 else b for a, b in zip(own, extents, strict=True)]).value)

    def split(self, size: int, dim: int = 0) -> list[Tensor]:
        """Chunks of `size` along axis `dim`, whose extent must be a number; the last one may be smaller."""
        extent = self.extent(dim)
        return [self._slice(dim % self.ndim, i, min(i + size, extent)) for i in range(0, extent, size)]

    def chunk(self, chunks: int, dim: int = 0) -> list[Tensor]:
        return self.split(-(-self.extent(dim) // chunks), dim)

    def _slice(self, axis: int, start: Dim, end: Dim, step: int = 1) -> Tensor:
        return Tensor(self.term.slice(axis, start, end, step).value)

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Tensor:
        """Basic indexing with integers, slices, `None` and `...`, or a tensor of integers as the index of an axis.

        IndexError for an integer out of range, ValueError for a step below 1, TypeError for an index of another type.
        """
        items = _without_ellipsis(index if isinstance(index, tuple) else (index,), self.ndim)
        result, axis = self, 0
        for item in items:
            result, axis = _apply_index(result, axis, item)
        return result


def tensor(data: object) -> Tensor:
    """A tensor from an array-like object; float64 becomes float32. A tensor is returned as it is.

    An array of another dtype is not copied. While a graph is traced the tensor is a constant.
    """
    if isinstance(data, Tensor):
        return data
    array = np.asarray(data)
    return Tensor(EagerValue("c", array.astype(np.float32) if array.dtype == np.float64 else array))


def where(condition: Tensor, yes: Operand, no: Operand) -> Tensor:
    """`yes` where the condition is true, otherwise `no`, element by element.

    At least one of `yes` and `no` is a tensor, otherwise TypeError; a number or array gets the tensor's element type.
    """
    like = yes if isinstance(yes, Tensor) else no
    if not isinstance(like, Tensor):
        raise TypeError("where: expected at least one of `yes` and `no` to be a tensor, got two numbers")
    return condition.op("Where", like._as_tensor(yes), like._as_tensor(no))


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The concatenation of tensors along an axis."""
    return tensors[0].op("Concat", *tensors[1:], axis=dim)


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The concatenation of tensors of the same shape along a new axis."""
    return cat([each.unsqueeze(dim) for each in tensors], dim)


def _flat_arguments(items: Sequence[Any]) -> Sequence[Any]:
    """The items of a call's arguments, which are given as `f(1, 2)` or as one sequence, `f((1, 2))`."""
    return items[0] if len(items) == 1 and isinstance(items[0], Sequence) else items


def _without_ellipsis(items: tuple[Index, ...], rank: int) -> list[Index]:
    """The index with `...` replaced by full slices, for a tensor of rank `rank`."""
    places = [i for i, item in enumerate(items) if item is Ellipsis]
    if not places:
        return list(items)
    rest = rank - sum(item is not None and item is not Ellipsis for item in items)
    return [*items[: places[0]], *[slice(None)] * rest, *items[places[0] + 1 :]]


def _apply_index(x: Tensor, axis: int, item: Index) -> tuple[Tensor, int]:
    """Apply one index to an axis; returns the result and the axis for the next index."""
    match item:
        case None:
            return x.unsqueeze(axis), axis + 1
        case slice():
            return _apply_slice(x, axis, item), axis + 1
        case int() if not isinstance(item, bool):
            return x._slice(axis, *_single_index(x.shape[axis], item)).squeeze(axis), axis
        case Tensor() | np.ndarray():
            indices = tensor(item)
            return x.op("Gather", indices, axis=axis), axis + indices.ndim
    raise TypeError(f"index: expected an integer, slice, None, ... or tensor of integers, got {item!r}")


def _single_index(extent: Dim, index: int) -> tuple[Dim, Dim]:
    """Start and end of the slice that is the element `index`, which may be negative. IndexError if out of range."""
    if isinstance(extent, int) and not -extent <= index < extent:
        raise IndexError(f"index {index} is out of range for an axis of {extent}")
    start = index if index >= 0 else extent + index
    return start, start + 1


def _apply_slice(x: Tensor, axis: int, item: slice) -> Tensor:
    if item == slice(None):
        return x
    extent, step = x.shape[axis], 1 if item.step is None else int(item.step)
    if step < 1:
        raise ValueError(f"step of a slice: expected at least 1, got {step}")
    start, end = item.start or 0, extent if item.stop is None else item.stop
    start, end = (extent + each if isinstance(each, int) and each < 0 else each for each in (start, end))
    return x._slice(axis, start, end, step)
