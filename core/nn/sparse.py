"""Sparse and ragged tensors: values of the API and of graphs, made of dense components.

A graph gets the components as inputs of its own: `Csr.types("a", "float32", 4)` are their types for `nn.trace`, the
traced function makes `Csr(splits, columns, values, shape)` of its arguments, and `a.feeds("a")` are the arrays for a
run. Components are arrays or tensors; operators make tensors of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from lathe.core.errors import FeedError
from lathe.core.frontends.tensors import sparse_array
from lathe.core.ir.graph import Array
from lathe.core.nn import segments
from lathe.core.nn.tensor import Operand, Tensor, tensor


@dataclass(frozen=True, eq=False)
class Coo:
    """A matrix of `shape` by coordinates: `indices` int64[nnz, 2] (row, column), `values` [nnz]. Duplicates add up."""

    indices: Operand
    values: Operand
    shape: tuple[int, int]
    __array_ufunc__ = None  # `array @ matrix` is a tensor

    def __post_init__(self) -> None:
        if isinstance(self.indices, np.ndarray) and isinstance(self.values, np.ndarray):
            _check_indices(self.indices, self.values, self.shape)

    @classmethod
    def from_dense(cls, dense: Any) -> Coo:
        """The elements that are not zero, row by row. FeedError unless `dense` is a matrix."""
        array = _matrix(dense)
        places = np.argwhere(array)
        return cls(places, array[tuple(places.T)], (array.shape[0], array.shape[1]))

    @classmethod
    def from_onnx(cls, proto: onnx.SparseTensorProto) -> Coo:
        """ModelError for indices or values that do not fit; FeedError unless it is a matrix."""
        return cls.from_dense(sparse_array(proto, "sparse tensor"))

    def to_onnx(self, name: str) -> onnx.SparseTensorProto:
        """An initializer of this name. TraceError while a graph is traced. Its places are unique and sorted."""
        own = Coo.from_dense(self.to_dense().numpy())
        values, indices = (numpy_helper.from_array(np.asarray(each)) for each in (own.values, own.indices))
        values.name = name
        return onnx.helper.make_sparse_tensor(values, indices, list(self.shape))

    def to_dense(self) -> Tensor:
        """The matrix, [rows, columns]."""
        values = tensor(self.values)
        start = tensor(0).to(values.dtype).expand(*self.shape)
        return start.op("ScatterND", tensor(self.indices), values, reduction="add")

    @staticmethod
    def types(name: str, dtype: str) -> dict[str, str]:
        """The types of the components `NAME.indices` and `NAME.values`, for `nn.trace`."""
        return {f"{name}.indices": f"int64[{name}_nnz,2]", f"{name}.values": f"{dtype}[{name}_nnz]"}

    def feeds(self, name: str) -> dict[str, Array]:
        """The components for a run. TraceError while a graph is traced."""
        return {f"{name}.indices": tensor(self.indices).numpy(), f"{name}.values": tensor(self.values).numpy()}

    def __matmul__(self, dense: Operand) -> Tensor:
        """The product with a dense matrix [columns, m]."""
        indices = tensor(self.indices)
        return _product(indices[:, 0], indices[:, 1], tensor(self.values), tensor(dense), self.shape[0])

    def __rmatmul__(self, dense: Operand) -> Tensor:
        """The product of a dense matrix [m, rows] with this one."""
        indices = tensor(self.indices)
        return _product(indices[:, 1], indices[:, 0], tensor(self.values), tensor(dense).T, self.shape[1]).T


@dataclass(frozen=True, eq=False)
class Csr:
    """A matrix of `shape` by rows: row i has the elements `row_splits[i]` to `row_splits[i + 1]`.

    `row_splits` int64[rows + 1], `columns` int64[nnz], `values` [nnz].
    """

    row_splits: Operand
    columns: Operand
    values: Operand
    shape: tuple[int, int]
    __array_ufunc__ = None  # `array @ matrix` is a tensor

    def __post_init__(self) -> None:
        splits, columns = self.row_splits, self.columns
        if isinstance(splits, np.ndarray) and isinstance(columns, np.ndarray) and isinstance(self.values, np.ndarray):
            _check_splits(splits, len(self.values), self.shape[0])
            rows = np.repeat(np.arange(self.shape[0]), np.diff(splits))
            if columns.shape != rows.shape:
                raise FeedError(f"columns: expected int64[{len(rows)}], got {columns.dtype}{list(columns.shape)}")
            _check_indices(np.stack([rows, columns], 1), self.values, self.shape)

    @classmethod
    def from_dense(cls, dense: Any) -> Csr:
        """The elements that are not zero. FeedError unless `dense` is a matrix."""
        array = _matrix(dense)
        rows, columns = np.nonzero(array)
        splits = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(array)))]).astype(np.int64)
        return cls(splits, columns.astype(np.int64), array[rows, columns], (array.shape[0], array.shape[1]))

    def to_coo(self) -> Coo:
        """The same elements by coordinates."""
        columns = tensor(self.columns)
        rows = segments.ids_of_splits(tensor(self.row_splits), columns.shape[0])
        return Coo(rows.unsqueeze(1).op("Concat", columns.unsqueeze(1), axis=1), self.values, self.shape)

    def to_dense(self) -> Tensor:
        """The matrix, [rows, columns]."""
        return self.to_coo().to_dense()

    @staticmethod
    def types(name: str, dtype: str, rows: int) -> dict[str, str]:
        """The types of the components `NAME.row_splits`, `NAME.columns` and `NAME.values`, for `nn.trace`."""
        return {
            f"{name}.row_splits": f"int64[{rows + 1}]",
            f"{name}.columns": f"int64[{name}_nnz]",
            f"{name}.values": f"{dtype}[{name}_nnz]",
        }

    def feeds(self, name: str) -> dict[str, Array]:
        """The components for a run. TraceError while a graph is traced."""
        parts = {"row_splits": self.row_splits, "columns": self.columns, "values": self.values}
        return {f"{name}.{key}": tensor(part).numpy() for key, part in parts.items()}

    def __matmul__(self, dense: Operand) -> Tensor:
        """The product with a dense matrix [columns, m]."""
        return self.to_coo() @ dense

    def __rmatmul__(self, dense: Operand) -> Tensor:
        """The product of a dense matrix [m, rows] with this one."""
        return self.to_coo().__rmatmul__(dense)


@dataclass(frozen=True, eq=False)
class Ragged:
    """Sequences of different lengths, one after the other: sequence i is `values[row_splits[i] : row_splits[i + 1]]`.

    `values` [rows, ...], `row_splits` int64[sequences + 1].
    """

    values: Operand
    row_splits: Operand

    def __post_init__(self) -> None:
        if isinstance(self.row_splits, np.ndarray) and isinstance(self.values, np.ndarray):
            _check_splits(self.row_splits, len(self.values), None)

    @classmethod
    def from_rows(cls, rows: Any) -> Ragged:
        """The ragged tensor of a list of arrays whose axes after the first agree. FeedError for an empty list."""
        arrays = [np.asarray(row) for row in rows]
        if not arrays:
            raise FeedError("rows: expected at least one array, got none")
        return cls(np.concatenate(arrays), np.cumsum([0, *map(len, arrays)]).astype(np.int64))

    def to_rows(self) -> list[Array]:
        """The sequences. TraceError while a graph is traced."""
        return np.split(tensor(self.values).numpy(), tensor(self.row_splits).numpy()[1:-1])

    @property
    def ids(self) -> Tensor:
        """The sequence of each row, int64[rows]."""
        return segments.ids_of_splits(tensor(self.row_splits), tensor(self.values).shape[0])

    @staticmethod
    def types(name: str, dtype: str, sequences: int, *row: int) -> dict[str, str]:
        """The types of the components `NAME.values` and `NAME.row_splits`, for `nn.trace`. `row`: the axes of a row."""
        axes = ",".join(map(str, (f"{name}_rows", *row)))
        return {f"{name}.values": f"{dtype}[{axes}]", f"{name}.row_splits": f"int64[{sequences + 1}]"}

    def feeds(self, name: str) -> dict[str, Array]:
        """The components for a run. TraceError while a graph is traced."""
        return {f"{name}.values": tensor(self.values).numpy(), f"{name}.row_splits": tensor(self.row_splits).numpy()}

    def gather(self, sequences: Operand) -> Ragged:
        """The sequences with these indices, int64[k], in this order; an index may occur several times.

        Negative indices count from the end, as in ONNX's Gather. The gradient of a row is the sum over its copies.
        """
        splits, chosen = tensor(self.row_splits), tensor(sequences)
        starts = splits[:-1].op("Gather", chosen, axis=0)
        lengths = splits[1:].op("Gather", chosen, axis=0) - starts
        ends = lengths.op("CumSum", tensor(0))
        ids = segments.ids_of_lengths(lengths)
        rows = tensor(0).op("Range", lengths.sum(), tensor(1))
        rows = rows + (starts - ends + lengths).op("Gather", ids, axis=0)
        row_splits = tensor(np.zeros(1, np.int64)).op("Concat", ends, axis=0)
        return Ragged(tensor(self.values).op("Gather", rows, axis=0), row_splits)

    def sum(self) -> Tensor:
        """[sequences, ...]: the sum of each sequence."""
        return segments.segment_sum(tensor(self.values), self.ids, tensor(self.row_splits).shape[0] - 1)

    def mean(self) -> Tensor:
        """[sequences, ...]: the mean of each sequence, 0 for an empty one."""
        return segments.segment_mean(tensor(self.values), self.ids, tensor(self.row_splits).shape[0] - 1)

    def max(self) -> Tensor:
        """[sequences, ...]: the largest number of each sequence, -inf for an empty one."""
        return segments.segment_max(tensor(self.values), self.ids, tensor(self.row_splits).shape[0] - 1)

    def softmax(self) -> Ragged:
        """Softmax along each sequence."""
        count = tensor(self.row_splits).shape[0] - 1
        return Ragged(segments.segment_softmax(tensor(self.values), self.ids, count), self.row_splits)


def sparse_mm(left: Coo | Csr | Operand, right: Coo | Csr | Operand) -> Tensor:
    """The product of a sparse matrix and a dense one, on either side (`torch.sparse.mm`).

    FeedError unless one of them is a `Coo` or `Csr` and the other one is not.
    """
    if isinstance(left, Coo | Csr) and not isinstance(right, Coo | Csr):
        return left @ right
    if isinstance(right, Coo | Csr) and not isinstance(left, Coo | Csr):
        return right.__rmatmul__(left)
    raise FeedError(f"expected a Coo or Csr and a dense matrix, got {type(left).__name__} and {type(right).__name__}")


def sparse_addmm(
    start: Operand, left: Coo | Csr | Operand, right: Coo | Csr | Operand, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """`beta * start + alpha * (left @ right)` for a dense `start` (`torch.sparse.addmm`). Errors as for `sparse_mm`."""
    return tensor(start) * beta + sparse_mm(left, right) * alpha


def sparse_sampled_addmm(start: Coo, left: Operand, right: Operand, beta: float = 1.0, alpha: float = 1.0) -> Coo:
    """The product of dense matrices [rows, k] and [k, columns] at the places of `start`.

    Element (i, j) is `beta * start[i, j] + alpha * sum over k of left[i, k] right[k, j]`. Only the elements of `start`
    are computed; of a place that occurs several times, each gets the whole product (`torch.sparse.sampled_addmm`).
    """
    indices = tensor(start.indices)
    rows = tensor(left).op("Gather", indices[:, 0], axis=0)
    columns = tensor(right).T.op("Gather", indices[:, 1], axis=0)
    return Coo(indices, tensor(start.values) * beta + (rows * columns).sum(-1) * alpha, start.shape)


def _product(rows: Tensor, columns: Tensor, values: Tensor, dense: Tensor, count: int) -> Tensor:
    return segments.segment_sum(dense.op("Gather", columns, axis=0) * values.unsqueeze(1), rows, count)


def _matrix(dense: Any) -> Array:
    array = np.asarray(dense)
    if array.ndim != 2:
        raise FeedError(f"dense: expected a matrix, got shape {list(array.shape)}")
    return array


def _check_indices(indices: Array, values: Array, shape: tuple[int, int]) -> None:
    if indices.dtype != np.int64 or values.ndim != 1 or indices.shape != (len(values), 2):
        got = f"{indices.dtype}{list(indices.shape)} for values {list(values.shape)}"
        raise FeedError(f"indices: expected int64[nnz, 2] for values [nnz], got {got}")
    if (indices < 0).any() or (indices >= np.array(shape)).any():
        raise FeedError(f"indices: expected places inside shape {list(shape)}, got up to {indices.max(0).tolist()}")


def _check_splits(splits: Array, rows: int, count: int | None) -> None:
    if splits.dtype != np.int64 or splits.ndim != 1 or len(splits) < 1 or count not in (None, len(splits) - 1):
        wanted = "segments + 1" if count is None else count + 1
        raise FeedError(f"row_splits: expected int64[{wanted}], got {splits.dtype}{list(splits.shape)}")
    if splits[0] != 0 or splits[-1] != rows or (np.diff(splits) < 0).any():
        raise FeedError(f"row_splits: expected ascending numbers from 0 to {rows}, got {splits.tolist()[:8]}")
