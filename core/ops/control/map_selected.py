"""MapSelected: computes a nested graph for the rows that a mask selects, such as the tokens of one expert."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Array, Graph
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.opdef.inference import forget_types, infer_graph
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, OpDef, Required, RowAxis, register

SELECTED = symbol("_selected")  # in the body: the number of true elements of the mask


@register
class MapSelected(OpDef):
    """The rows of `base`, to which a body's results for the selected elements of a mask are written or added.

    base is [T, ...]; mask, bool [P, T], has P elements for each row. A source is [T, ...], or [P, T, ...] if its
    element of the attribute `per_place` is 1. For the S true elements [p, t] of the mask, in row-major order, the body
    is given row t, or row [p, t], of each source, as [S, ...]; it computes one result [S, ...], row by row. Each row of
    the result replaces row t of a copy of base (the last one, if several have one t), or is added to it if `adds` is 1.
    """

    domain = "lathe"
    inputs = "base, mask, *sources"
    outputs = "Y"
    attrs = {"body": Required("graph"), "per_place": Required("ints"), "adds": 0}
    no_gradient = "only passes emit it, after differentiation"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        body: Graph = c.attr("body")
        base, mask, per_place = c.tensor(0), c.tensor(1), c.attr("per_place")
        if mask.dtype is not DType.BOOL or len(mask.dims) != 2 or mask.dims[1] != base.dims[0]:
            c.fail(f"mask is {mask}, expected bool[places, {base.dims[0]}]")
        if len(body.inputs) != len(per_place) or len(per_place) != len(c.node.inputs) - 2:
            c.fail(f"its body has {len(body.inputs)} inputs, expected one for each of {len(c.node.inputs) - 2} sources")
        for index, (value, is_per_place) in enumerate(zip(body.inputs, per_place, strict=True)):
            source = c.tensor(2 + index)
            value.type = TensorType(source.dtype, (SELECTED, *source.dims[1 + is_per_place :]))
        forget_types(body)
        infer_graph(body, dict(c.known))
        expected = TensorType(base.dtype, (SELECTED, *base.dims[1:]))
        if [value.type for value in body.outputs] != [expected]:
            c.fail(f"its body computes {', '.join(str(value.type) for value in body.outputs)}, expected {expected}")
        return [base]

    def reference(self, c: Call, base: Array, mask: Array, *sources: Array) -> Array:
        result = base.copy()
        places, rows = np.nonzero(mask)
        if not len(rows):
            return result
        pairs = zip(sources, c.attr("per_place"), strict=True)
        given = [source[places, rows] if is_per_place else source[rows] for source, is_per_place in pairs]
        (computed,) = c.run_graph(c.attr("body"), given)
        if c.attr("adds"):
            np.add.at(result, rows, computed)
        else:
            result[rows] = computed
        return result

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        expected = [0, 1, *(1 if is_per_place else 0 for is_per_place in c.attr("per_place"))]
        if list(axes) == expected:
            return [0]
        return MixesRows(f"its inputs have their rows along axes {list(axes)}, expected {expected}")
