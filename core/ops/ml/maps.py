"""Map operators of ai.onnx.ml: maps are dictionaries from class labels or feature names to numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, MapType, SequenceType, TensorType, ValueType
from lathe.core.ops.ml.scores import DOMAIN
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, NodeView, OpDef, RowAxis, register
from lathe.core.ops.opdef.type_rules import Kind, check_kind

_FLOAT32 = Kind("float32", frozenset({DType.FLOAT32}))
_KEYS = {DType.INT64: "int64", DType.STRING: "string"}


def zip_labels(c: NodeView) -> list[Any]:
    """The keys of a ZipMap's maps: integers or strings. ModelError unless exactly one attribute has them."""
    integers, words = c.attr("classlabels_int64s"), c.attr("classlabels_strings")
    if bool(integers) == bool(words):
        c.fail("has both or neither of classlabels_int64s and classlabels_strings, expected one of them")
    return list(integers or words)


def _map_type(c: Infer) -> MapType:
    value = c.node.input(0)
    if value is None or not isinstance(value.type, MapType) or not isinstance(value.type.value, TensorType):
        c.fail(f"input 0 (X) is {'missing' if value is None else value.type}, expected a map to numbers or strings")
    return value.type


@register
class ZipMap(OpDef):
    """A sequence of maps from class labels to scores, one for each row of X [N,C]; [C] is one row."""

    no_gradient = "maps have no gradient"
    inputs = "X"
    outputs = "Z"
    attrs = {"classlabels_int64s": None, "classlabels_strings": None}
    domain = DOMAIN

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, _FLOAT32)
        labels, shape = zip_labels(c), c.shape(0)
        if shape is not None and (
            len(shape) not in (1, 2) or (isinstance(shape[-1], int) and shape[-1] != len(labels))
        ):
            c.fail(f"X is {c.tensor(0)}, expected a column for each of the {len(labels)} labels")
        key = DType.INT64 if isinstance(labels[0], int) else DType.STRING
        return [SequenceType(MapType(key, TensorType(DType.FLOAT32, ())))]

    def reference(self, c: Call, x: Array) -> list[dict[Any, float]]:
        labels = zip_labels(c)
        if x.shape[-1:] != (len(labels),):
            c.fail(f"X has shape {list(x.shape)}, expected a column for each of the {len(labels)} labels")
        return _zip_rows(labels, np.atleast_2d(x).tolist())

    def quickly(self, c: NodeView) -> Callable[[Array], list[dict[Any, float]]] | None:
        x = c.node.inputs[0]
        labels = zip_labels(c)
        if x is None or not isinstance(x.type, TensorType) or not x.type.shape or len(x.type.shape) != 2:
            return None
        return (lambda x: _zip_rows(labels, x.tolist())) if x.type.shape[1] == len(labels) else None

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        """Rows of X along axis 0 become rows along axis 0 of the sequence: one map per row. A vector X mixes rows."""
        shape = c.shape(0)
        return (
            [0]
            if shape is not None and len(shape) == 2 and axes[0] == 0
            else MixesRows("its rows are not one map each")
        )


def _zip_rows(labels: list[Any], rows: list[list[float]]) -> list[dict[Any, float]]:
    """One dictionary per row, from labels to numbers; two and three labels have a fast path."""
    match labels:
        case [a, b]:
            return [{a: x, b: y} for x, y in rows]
        case [a, b, c]:
            return [{a: x, b: y, c: z} for x, y, z in rows]
    return list(map(dict, map(zip, repeat(labels), rows)))


@register
class DictVectorizer(OpDef):
    """The values of a map in the order of a vocabulary, [1, keys]; 0 or "" for keys that the map lacks."""

    no_gradient = "maps have no gradient"
    inputs = "X"
    outputs = "Y"
    attrs = {"int64_vocabulary": None, "string_vocabulary": None}
    domain = DOMAIN

    def infer(self, c: Infer) -> Sequence[ValueType]:
        type_ = _map_type(c)
        words = self.vocabulary(c, type_.key)
        assert isinstance(type_.value, TensorType)
        return [TensorType(type_.value.dtype, (1, len(words)))]

    def vocabulary(self, c: NodeView, key: DType) -> tuple[Any, ...]:
        words = c.attr(f"{_KEYS[key]}_vocabulary") if key in _KEYS else None
        return words if words else c.fail(f"has no vocabulary of {key} keys")

    def reference(self, c: Call, x: Mapping[Any, Any]) -> Array:
        words = c.attr("int64_vocabulary") or c.attr("string_vocabulary")
        type_ = c.node.outputs[0].tensor.dtype
        row = np.zeros((1, len(words)), type_.numpy)
        row[0] = [x.get(word, "" if type_ is DType.STRING else 0) for word in words]
        return row


_CASTS: Mapping[str, tuple[DType, Callable[[Any], Any]]] = {
    "TO_FLOAT": (DType.FLOAT32, float),
    "TO_INT64": (DType.INT64, lambda item: int(float(item))),
    "TO_STRING": (DType.STRING, str),
}


@register
class CastMap(OpDef):
    """The values of a map from integers, converted by `cast_to`, in the ascending order of their keys: [1, values].

    With map_form SPARSE, the key of a value is its index in [1, `max_map`], where other elements are 0 or ""; FeedError
    for a key out of range.
    """

    no_gradient = "maps have no gradient"
    inputs = "X"
    outputs = "Y"
    attrs = {"cast_to": "TO_FLOAT", "map_form": "DENSE", "max_map": 1}
    domain = DOMAIN

    def infer(self, c: Infer) -> Sequence[ValueType]:
        type_ = _map_type(c)
        if type_.key is not DType.INT64 or c.attr("cast_to") not in _CASTS:
            c.fail(f"casts {type_} {c.attr('cast_to')}, expected int64 keys and one of {', '.join(_CASTS)}")
        if c.attr("map_form") not in ("DENSE", "SPARSE") or (self._is_sparse(c) and c.attr("max_map") < 1):
            c.fail(f"map_form is {c.attr('map_form')!r} with max_map {c.attr('max_map')}")
        columns = c.attr("max_map") if self._is_sparse(c) else c.fresh_dim("values")
        return [TensorType(_CASTS[c.attr("cast_to")][0], (1, columns))]

    def _is_sparse(self, c: NodeView) -> bool:
        return bool(c.attr("map_form") == "SPARSE")

    def reference(self, c: Call, x: Mapping[int, Any]) -> Array:
        dtype, cast = _CASTS[c.attr("cast_to")]
        size = c.attr("max_map") if self._is_sparse(c) else len(x)
        row: Array = np.full((1, size), "" if dtype is DType.STRING else 0, dtype.numpy)
        for place, key in enumerate(sorted(x)):
            column = key if self._is_sparse(c) else place
            if not 0 <= column < size:
                c.fail(f"the map has key {key}, expected 0 to {size - 1}")
            row[0, column] = cast(x[key])
        return row
