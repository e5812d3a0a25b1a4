"""Types of values: element types, symbolic shapes, tensors, sequences, optionals and maps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TypeAlias

import ml_dtypes
import numpy as np

from lathe.core.errors import UnknownRankError
from lathe.core.ir.dim import Dim, SymDim, evaluate, parse_dim, product, substitute, symbol, symbols

__all__ = ["DType", "Dim", "MapType", "OptionalType", "SequenceType", "SymDim", "TensorType", "ValueType", "symbol"]


class DType(Enum):
    """Element types. The value is (name, NumPy dtype, ONNX TensorProto code, Open Inference Protocol name or "")."""

    FLOAT32 = ("float32", np.dtype(np.float32), 1, "FP32")
    UINT8 = ("uint8", np.dtype(np.uint8), 2, "UINT8")
    INT8 = ("int8", np.dtype(np.int8), 3, "INT8")
    UINT16 = ("uint16", np.dtype(np.uint16), 4, "UINT16")
    INT16 = ("int16", np.dtype(np.int16), 5, "INT16")
    INT32 = ("int32", np.dtype(np.int32), 6, "INT32")
    INT64 = ("int64", np.dtype(np.int64), 7, "INT64")
    STRING = ("string", np.dtype(object), 8, "BYTES")
    BOOL = ("bool", np.dtype(np.bool_), 9, "BOOL")
    FLOAT16 = ("float16", np.dtype(np.float16), 10, "FP16")
    FLOAT64 = ("float64", np.dtype(np.float64), 11, "FP64")
    UINT32 = ("uint32", np.dtype(np.uint32), 12, "UINT32")
    UINT64 = ("uint64", np.dtype(np.uint64), 13, "UINT64")
    COMPLEX64 = ("complex64", np.dtype(np.complex64), 14, "")
    COMPLEX128 = ("complex128", np.dtype(np.complex128), 15, "")
    BFLOAT16 = ("bfloat16", np.dtype(ml_dtypes.bfloat16), 16, "BF16")
    FLOAT8E4M3FN = ("float8e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn), 17, "")
    FLOAT8E4M3FNUZ = ("float8e4m3fnuz", np.dtype(ml_dtypes.float8_e4m3fnuz), 18, "")
    FLOAT8E5M2 = ("float8e5m2", np.dtype(ml_dtypes.float8_e5m2), 19, "")
    FLOAT8E5M2FNUZ = ("float8e5m2fnuz", np.dtype(ml_dtypes.float8_e5m2fnuz), 20, "")
    UINT4 = ("uint4", np.dtype(ml_dtypes.uint4), 21, "")
    INT4 = ("int4", np.dtype(ml_dtypes.int4), 22, "")
    FLOAT4E2M1 = ("float4e2m1", np.dtype(ml_dtypes.float4_e2m1fn), 23, "")
    FLOAT8E8M0 = ("float8e8m0", np.dtype(ml_dtypes.float8_e8m0fnu), 24, "")
    UINT2 = ("uint2", np.dtype(ml_dtypes.uint2), 25, "")
    INT2 = ("int2", np.dtype(ml_dtypes.int2), 26, "")
    FLOAT6E2M3 = ("float6e2m3", np.dtype(ml_dtypes.float6_e2m3fn), 27, "")
    FLOAT6E3M2 = ("float6e3m2", np.dtype(ml_dtypes.float6_e3m2fn), 28, "")

    def __init__(self, label: str, numpy: np.dtype[np.generic], onnx_code: int, triton: str) -> None:
        self.label = label
        self.numpy = numpy
        self.onnx_code = onnx_code
        self.triton = triton

    __hash__ = object.__hash__  # that of Enum is Python code, and kernels look types up for each instruction

    def __str__(self) -> str:
        return self.label

    @property
    def itemsize(self) -> int:
        """Bytes of one element in a NumPy array; for strings, those of an object pointer."""
        return self.numpy.itemsize

    @property
    def bits(self) -> int:
        """Bits of one element in an ONNX file; meaningless for strings.

        In memory, elements of fewer than 8 bits take a byte each.
        """
        return _NARROW_BITS.get(self.label, 8 * self.itemsize)

    @property
    def is_float(self) -> bool:
        return self.label.startswith(("float", "bfloat"))

    @property
    def is_integer(self) -> bool:
        return self.label.startswith(("int", "uint"))

    def holds(self, dtype: np.dtype[np.generic]) -> bool:
        """Whether arrays of the NumPy dtype `dtype` have this element type; strings may be str, bytes or objects."""
        return dtype == self.numpy or (self is DType.STRING and dtype.kind in "USO")

    @staticmethod
    def parse(label: str) -> DType:
        """The element type with this name; ValueError when there is none."""
        if label not in _BY_LABEL:
            raise ValueError(f"unknown element type {label!r}")
        return _BY_LABEL[label]

    @staticmethod
    def from_numpy(dtype: np.dtype[np.generic]) -> DType:
        """The element type of arrays of this NumPy dtype; ValueError if none. STRING for str, bytes and objects."""
        if dtype.kind in "USO":
            return DType.STRING
        if dtype not in _BY_NUMPY:
            raise ValueError(f"arrays of {dtype} have no element type in Lathe")
        return _BY_NUMPY[dtype]

    @staticmethod
    def from_onnx(code: int) -> DType:
        """The element type of an ONNX TensorProto.DataType code; ValueError when Lathe lacks it."""
        if code not in _BY_ONNX:
            raise ValueError(f"ONNX element type code {code} is not supported")
        return _BY_ONNX[code]


_MAX_DEPTH = 64  # of types within types
_NARROW_BITS = {"uint2": 2, "int2": 2, "uint4": 4, "int4": 4, "float4e2m1": 4, "float6e2m3": 6, "float6e3m2": 6}
_BY_LABEL = {dtype.label: dtype for dtype in DType}
_BY_NUMPY = {dtype.numpy: dtype for dtype in DType}
_BY_ONNX = {dtype.onnx_code: dtype for dtype in DType}

Shape: TypeAlias = tuple[Dim, ...]


@lru_cache(maxsize=1 << 14)
def _elements(shape: Shape) -> Dim:
    """The product of a shape's dimensions. Cached: the compiler asks for few shapes, each of them many times."""
    return product(shape)


@dataclass(frozen=True, slots=True)
class TensorType:
    """A dense tensor. `shape` is None if the rank is unknown; only the reference runner computes such values."""

    dtype: DType
    shape: Shape | None

    def __str__(self) -> str:
        dims = "*" if self.shape is None else ",".join(map(str, self.shape))
        return f"{self.dtype}[{dims}]"

    @property
    def dims(self) -> Shape:
        """The shape of a tensor whose rank is known; UnknownRankError otherwise."""
        if self.shape is None:
            raise UnknownRankError(f"the rank of {self} is not known")
        return self.shape

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def size(self) -> Dim:
        """The number of elements, symbolic if a dimension is. UnknownRankError if the rank is unknown."""
        return _elements(self.dims)

    @property
    def nbytes(self) -> Dim:
        return self.size * self.dtype.itemsize

    @property
    def symbols(self) -> frozenset[str]:
        return frozenset().union(*(symbols(dim) for dim in self.shape or ()))

    @property
    def is_static(self) -> bool:
        return self.shape is not None and all(isinstance(dim, int) for dim in self.shape)

    def substitute(self, env: Mapping[str, Dim]) -> TensorType:
        if self.shape is None:
            return self
        return TensorType(self.dtype, tuple(substitute(dim, env) for dim in self.shape))

    def evaluate(self, env: Mapping[str, int]) -> tuple[int, ...]:
        """The shape in numbers for the values `env` of its symbols.

        UnknownRankError if the rank is unknown; KeyError if a symbol has no value or a quotient divides by zero.
        """
        return tuple(evaluate(dim, env) for dim in self.dims)


@dataclass(frozen=True, slots=True)
class SequenceType:
    """An ONNX sequence of values of one type."""

    element: ValueType

    def __str__(self) -> str:
        return f"seq({self.element})"


@dataclass(frozen=True, slots=True)
class OptionalType:
    """An ONNX optional: a value of this type, or nothing."""

    element: ValueType

    def __str__(self) -> str:
        return f"optional({self.element})"


@dataclass(frozen=True, slots=True)
class MapType:
    """An ONNX map from integers or strings to values of one type; at run time a dictionary."""

    key: DType
    value: ValueType

    def __str__(self) -> str:
        return f"map({self.key},{self.value})"


ValueType: TypeAlias = TensorType | SequenceType | OptionalType | MapType


def parse_type(text: str) -> ValueType:
    """The type with this text, in the form that `str(type)` prints; ValueError if the text is malformed."""
    return _parse(text, 0)


def _parse(text: str, depth: int) -> ValueType:
    if depth > _MAX_DEPTH:
        raise ValueError(f"a type is nested deeper than {_MAX_DEPTH}")
    text = text.strip()
    for prefix, kind in (("seq(", SequenceType), ("optional(", OptionalType)):
        if text.startswith(prefix) and text.endswith(")"):
            return kind(_parse(text[len(prefix) : -1], depth + 1))
    if text.startswith("map(") and text.endswith(")"):
        key, _, element = text[len("map(") : -1].partition(",")
        return MapType(DType.parse(key), _parse(element, depth + 1))
    label, bracket, rest = text.partition("[")
    if not bracket or not rest.endswith("]"):
        raise ValueError(f"not a type: {text!r}")
    body = rest[:-1]
    if body == "*":
        return TensorType(DType.parse(label), None)
    return TensorType(DType.parse(label), tuple(parse_dim(dim) for dim in body.split(",") if dim))
