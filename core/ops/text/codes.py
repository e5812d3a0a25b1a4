"""Text as numbers: `TextCodes`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, NodeView, OpDef, Required, RowAxis, register
from lathe.core.ops.opdef.type_rules import check_kind, untouched_rows
from lathe.core.ops.text.strings import STRING


@register
class TextCodes(OpDef):
    """The index of each string in a vocabulary of distinct strings, -1 for any other string (int64)."""

    domain = "lathe"
    inputs = "X"
    outputs = "Y"
    attrs = {"vocabulary": Required("texts")}
    zero_gradient = "strings have no gradients"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, STRING)
        return [TensorType(DType.INT64, c.shape(0))]

    def reference(self, c: Call, x: Array) -> Array:
        return self.quickly(c)(x)

    def quickly(self, c: NodeView) -> Callable[[Array], Array]:
        codes = {text: code for code, text in enumerate(c.attr("vocabulary"))}

        def look_up(x: Array) -> Array:
            return np.array([codes.get(text, -1) for text in x.ravel().tolist()], np.int64).reshape(x.shape)

        return look_up

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return untouched_rows(c, axes, ())
