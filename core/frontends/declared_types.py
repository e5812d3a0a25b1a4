"""Declared types: from `TypeProto` to value types and back, and the symbols of named dimensions."""

from __future__ import annotations

import keyword
import re

import onnx

from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.frontends.tensors import element_type
from lathe.core.ir.dim import DATA_DEPENDENT_PREFIX, FILLED, SymDim, evaluate, symbol
from lathe.core.ir.dim import symbols as symbols_of
from lathe.core.ir.types import Dim, DType, MapType, OptionalType, SequenceType, TensorType, ValueType

# The largest tensor that a model may declare: no machine could hold more. Symbols and zeros count as 1.
MAX_TENSOR_BYTES = 1 << 40
MAX_RANK = 64  # NumPy's own limit
_RESERVED = frozenset({"inf", "nan", "true", "false", "none", "type", "tensor", "graph"})  # words of the textual form


class Symbols:
    """One symbol for each `dim_param` of a model, and a new symbol for each dimension without a name.

    Symbols made after `inputs_are_known` is set are data-dependent: no input has such a dimension, so its size is only
    known in a run. `open_` sets it from the start.
    """

    def __init__(self, open_: bool = False) -> None:
        self._by_param: dict[str, SymDim] = {}
        self._taken: set[str] = set()
        self.inputs_are_known = open_

    def named(self, param: str) -> SymDim:
        """The symbol of the dimension name `param`: the same one at every call."""
        if param not in self._by_param:
            self._by_param[param] = self.fresh(param)
        return self._by_param[param]

    def fresh(self, hint: str) -> SymDim:
        """A symbol that no other dimension has. Its name is `hint`, changed to a valid and unused identifier."""
        base = re.sub(r"[^A-Za-z0-9_]", "_", hint)
        base = base if base.isidentifier() else f"d{base}"
        if base.startswith(DATA_DEPENDENT_PREFIX) != self.inputs_are_known:
            base = f"{DATA_DEPENDENT_PREFIX}{base}" if self.inputs_are_known else f"d{base}"
        base = f"d{base}" if base.startswith(FILLED) else base  # FILLED is for symbols that are 1 or more
        base = f"{base}_" if keyword.iskeyword(base) or base in _RESERVED else base
        name, count = base, 1
        while name in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._taken.add(name)
        return symbol(name)


def value_type(proto: onnx.TypeProto, symbols: Symbols, name: str) -> ValueType:
    """The type that the model declares for value `name`.

    ModelError if it is missing or malformed, or if a tensor is too large (`check_size`). UnsupportedError for a rank
    above 64, an element type that Lathe lacks, and other kinds of types, such as sparse tensors.
    """
    where = f"value '{name}'"
    match proto.WhichOneof("value"):
        case "tensor_type":
            return _tensor_type(proto.tensor_type, symbols, name)
        case "sequence_type":
            return SequenceType(value_type(proto.sequence_type.elem_type, symbols, name))
        case "optional_type":
            return OptionalType(value_type(proto.optional_type.elem_type, symbols, name))
        case "map_type":
            key = element_type(proto.map_type.key_type, where)
            return MapType(_map_key(key, where), value_type(proto.map_type.value_type, symbols, name))
        case None:
            raise ModelError("has no declared type", where=where)
        case kind:
            raise UnsupportedError(f"has a {kind}, expected a tensor, a sequence, an optional or a map", where=where)


def _map_key(dtype: DType, where: str) -> DType:
    if not dtype.is_integer and dtype is not DType.STRING:
        raise ModelError(f"is a map from {dtype}, expected integers or strings", where=where)
    return dtype


def _tensor_type(proto: onnx.TypeProto.Tensor, symbols: Symbols, name: str) -> TensorType:
    where = f"value '{name}'"
    dtype = element_type(proto.elem_type, where)
    if not proto.HasField("shape"):
        return TensorType(dtype, None)
    type_ = TensorType(
        dtype, tuple(_dim(dim, symbols, f"{name}_dim{i}", where) for i, dim in enumerate(proto.shape.dim))
    )
    check_size(type_, where)
    return type_


def _dim(proto: onnx.TensorShapeProto.Dimension, symbols: Symbols, hint: str, where: str) -> Dim:
    if is_dim_name(proto.dim_param):
        return symbols.named(proto.dim_param)
    if not proto.HasField("dim_value") or proto.dim_value == -1:  # some exporters write -1 for any size
        return symbols.fresh(hint)
    if proto.dim_value < 0:
        raise ModelError(f"has a dimension of {proto.dim_value}, expected at least 0", where=where)
    return int(proto.dim_value)


def is_dim_name(param: str) -> bool:
    """Whether a `dim_param` is a name (it has a letter and is not "None"), so that equal names mean equal sizes.

    Exporters write "?" (Paddle's), "-1", "*" or Python's None for any size. Those are no names: two such dimensions may
    differ.
    """
    return param != "None" and any(character.isalpha() for character in param)


def check_size(type_: ValueType, where: str) -> None:
    """Refuse tensor types that no machine can hold; other types pass.

    ModelError if a tensor has more than `MAX_TENSOR_BYTES`, where symbols and extents of 0 count as 1. UnsupportedError
    if its rank exceeds `MAX_RANK`.
    """
    if not isinstance(type_, TensorType) or type_.shape is None:
        return
    if len(type_.shape) > MAX_RANK:
        raise UnsupportedError(f"rank is {len(type_.shape)}, expected at most {MAX_RANK}", where=where)
    nbytes = type_.dtype.itemsize
    for dim in type_.shape:
        nbytes *= max(evaluate(dim, dict.fromkeys(symbols_of(dim), 1)), 1)  # NumPy refuses [0, 2**62], too
    if nbytes > MAX_TENSOR_BYTES:
        raise ModelError(f"{type_} has {nbytes} bytes, expected at most {MAX_TENSOR_BYTES}", where=where)


def type_proto(type_: ValueType) -> onnx.TypeProto:
    """The type as a `TypeProto`, in which a dimension that is neither a number nor a single symbol has no value."""
    proto = onnx.TypeProto()
    match type_:
        case SequenceType(element):
            proto.sequence_type.elem_type.CopyFrom(type_proto(element))
        case OptionalType(element):
            proto.optional_type.elem_type.CopyFrom(type_proto(element))
        case MapType(key, element):
            proto.map_type.key_type = key.onnx_code
            proto.map_type.value_type.CopyFrom(type_proto(element))
        case TensorType(dtype, shape):
            proto.tensor_type.elem_type = dtype.onnx_code
            for dim in shape or ():
                _write_dim(proto.tensor_type.shape.dim.add(), dim)
            if shape == ():
                proto.tensor_type.shape.SetInParent()
    return proto


def _write_dim(proto: onnx.TensorShapeProto.Dimension, dim: Dim) -> None:
    if isinstance(dim, int):
        proto.dim_value = dim
    elif str(dim).isidentifier():
        proto.dim_param = str(dim)


def is_compatible(inferred: ValueType, declared: ValueType) -> bool:
    """Whether a declared type can describe a value of the inferred type.

    A symbol agrees with every dimension, an unknown shape with every shape, and an optional with its content's type.
    """
    match inferred, declared:
        case TensorType(), TensorType():
            return inferred.dtype is declared.dtype and _shapes_agree(inferred, declared)
        case SequenceType(a), SequenceType(b):
            return is_compatible(a, b)
        case OptionalType(a), OptionalType(b):
            return is_compatible(a, b)
        case MapType(), MapType():
            return inferred.key is declared.key and is_compatible(inferred.value, declared.value)
        case OptionalType(a), b:  # a loop-carried optional may be empty before the first iteration only
            return is_compatible(a, b)
        case a, OptionalType(b):
            return is_compatible(a, b)
    return False


def _shapes_agree(inferred: TensorType, declared: TensorType) -> bool:
    if inferred.shape is None or declared.shape is None:
        return True
    pairs = list(zip(inferred.shape, declared.shape, strict=False))
    return len(inferred.shape) == len(declared.shape) and all(
        not isinstance(a, int) or not isinstance(b, int) or a == b for a, b in pairs
    )
