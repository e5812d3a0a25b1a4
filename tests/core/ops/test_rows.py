"""Row rules are correct: where a rule says that rows are independent, computing them together changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import Any

import numpy as np
import pytest

from lathe.core.errors import ModelError
from lathe.core.ir.dim import parse_dim, symbol
from lathe.core.ir.graph import Graph
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.registry import Infer, MixesRows, RowAxis
from tests.core.ops.cases import CASES, Case
from tests.core.ops.harness import assert_close, graph_of, run
from tests.core.ops.numeric_cases import NUMERIC_CASES

# Operators that compute with the position, the number or the extremes of all rows, or that lay them out by data.
WITHOUT_RULE = {
    "Constant", "ConstantOfShape", "Range", "EyeLike", "Shape", "Size", "NonZero", "Unique",
    "MelWeightMatrix", "NonMaxSuppression", "RoiAlign", "MaxRoiPool", "MaxUnpool", "DynamicQuantizeLinear",
}  # fmt: skip
_MOST_PLACEMENTS = 3000  # of many inputs, too many to try
ALL_CASES = [*CASES, *NUMERIC_CASES]


def placements(case: Case) -> Iterator[list[RowAxis]]:
    """Every way to give the data inputs a row axis (or none)."""
    choices = [
        [None, *(() if array is None or i in case.param_indices else range(array.ndim))]
        for i, array in enumerate(case.inputs)
    ]
    yield from (list(axes) for axes in product(*choices) if any(axis is not None for axis in axes))


def answer(case: Case, axes: Sequence[RowAxis], bind: bool) -> tuple[Graph, Sequence[RowAxis] | MixesRows] | None:
    """The case with `n` rows along these axes, and the rule's result; None if these extents do not fit together."""
    extents = {case.inputs[i].shape[axis] for i, axis in enumerate(axes) if axis is not None}
    if len(extents) > 1 or 0 in extents:
        return None
    shapes = {
        i: (*case.inputs[i].shape[:axis], symbol("n"), *case.inputs[i].shape[axis + 1 :])
        for i, axis in enumerate(axes)
        if axis is not None
    }
    try:
        graph = graph_of(case, shapes, bind)
    except ModelError:
        return None
    op, node = registry.get(case.op), graph.nodes[0]
    return graph, op.rows(Infer(op, node, graph.constants), axes[: len(node.inputs)])


def with_rows(case: Case, axes: Sequence[RowAxis], rows: Sequence[int]) -> tuple[Any, ...]:
    """The inputs with these rows (numbered as in the case, in this order) along the row axes."""
    pairs = zip(case.inputs, axes, strict=True)
    return tuple(x if axis is None else np.take(x, rows, axis) for x, axis in pairs)


def check(case: Case, axes: Sequence[RowAxis], graph: Graph, out_axes: Sequence[RowAxis]) -> None:
    extent = next(case.inputs[i].shape[axis] for i, axis in enumerate(axes) if axis is not None)
    mine, yours = [i % extent for i in (1, 0)], [i % extent for i in (2, 0, 1)]
    first, second, both = (run(graph, with_rows(case, axes, rows)) for rows in (mine, yours, mine + yours))
    for a, b, together, axis in zip(first, second, both, out_axes, strict=True):
        if axis is None:
            assert_close(a, together, 0)
            assert_close(b, together, 0)
        else:
            assert_close(together, np.concatenate([a, b], axis), max(case.tolerance, 2e-6))


@pytest.mark.parametrize("bind", [False, True])
@pytest.mark.parametrize("op", sorted({case.op for case in ALL_CASES}))
def test_rows_declared_independent_are_independent(op: str, bind: bool) -> None:
    proven = 0
    for case in (case for case in ALL_CASES if case.op == op):
        for axes in islice(placements(case), _MOST_PLACEMENTS):
            found = answer(case, axes, bind)
            if found is not None and not isinstance(found[1], MixesRows):
                check(case, axes, found[0], found[1])
                proven += 1
    assert (proven > 0) == (op not in WITHOUT_RULE)


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "axes"),
    [
        ("Softmax", ((4, 3),), {"axis": 0}, [0]),
        ("ReduceMean", ((4, 3),), {"axes": (0,)}, [0]),
        ("ReduceSum", ((4, 3),), {}, [0]),
        ("MatMul", ((4, 3), (3, 4)), {}, [0, 1]),
        ("MatMul", ((3, 4), (4, 3)), {}, [1, 0]),
        ("Gemm", ((3, 4), (3, 5)), {"transA": 1}, [0, 0]),
        ("Einsum", ((4, 3), (4, 5)), {"equation": "bi,bj->ij"}, [0, 0]),
        ("Einsum", ((4, 3), (4, 5)), {"equation": "bi,bj->bij"}, [0, None]),
        ("Concat", ((4, 3), (4, 3)), {"axis": 0}, [0, 0]),
        ("Concat", ((4, 3), (4, 2)), {"axis": 1}, [0, None]),
        ("Slice", ((4, 3),), {"starts": (1,), "ends": (3,), "axes": (0,)}, [0]),
        ("Slice", ((4, 3),), {"starts": (-1,), "ends": (-9,), "axes": (0,), "steps": (-1,)}, [0]),
        ("Reshape", ((4, 6),), {"shape": (2, -1)}, [0]),
        ("Expand", ((4, 6),), {"shape": (4, 6)}, [0]),
        ("Reshape", ((2, 4, 3),), {"shape": (-1, 3)}, [1]),
        ("Add", ((4, 3), (4, 3)), {}, [0, None]),
        ("CumSum", ((4, 3),), {"axis": (0,)}, [0]),
        ("TopK", ((4, 3),), {"K": (2,), "axis": 0}, [0]),
        ("ArgMax", ((4, 3),), {"axis": 0}, [0]),
        ("Pad", ((4, 3),), {"pads": (1, 0, 0, 0)}, [0]),
        ("Tile", ((4, 3),), {"repeats": (2, 1)}, [0]),
        ("Flatten", ((3, 4, 2),), {"axis": 2}, [1]),
        ("Gather", ((4, 3), (2,)), {"axis": 0}, [0, None]),
        ("NonZero", ((4, 3),), {}, [0]),
    ],
)
def test_operators_that_mix_rows_declare_it(op: str, inputs: Any, attrs: Any, axes: list[RowAxis]) -> None:
    second = np.int64 if op == "Gather" else np.float32
    arrays = tuple(np.zeros(shape, second if i else np.float32) for i, shape in enumerate(inputs))
    found = answer(Case(op, arrays, attrs, outputs=2 if op == "TopK" else 1, label=op), axes, bind=True)
    assert found is not None
    assert isinstance(found[1], MixesRows)


@pytest.mark.parametrize(
    ("shape", "axis", "target", "expected"),
    [
        (("n", 12), 0, (-1, 3, 4), 0),
        (("n", 3, 4), 0, (-1, 4), 0),
        (("3*n", 4), 0, (-1, 3, 4), 0),
        (("n", "s", 4), 0, (-1, 4), 0),
        ((2, "n", 3), 1, (2, -1), 1),
        (("n", 6), 0, (1, -1), 1),
        (("n*s", 4), 0, ("n", "s", 4), 0),
        (("n*s", 4), 0, ("s", "n", 4), None),
        (("n", 4), 0, (2, -1), None),
        ((2, "n", 3), 1, (-1, 3), None),
        (("n", 4), 0, (4, -1), None),
    ],
)
def test_rows_move_with_a_reshape(shape: Any, axis: int, target: Any, expected: int | None) -> None:
    """Symbols other than the rows' (`s`, a sequence's length) never count as rows."""
    dims = tuple(parse_dim(dim) if isinstance(dim, str) else dim for dim in shape)
    wanted = tuple(parse_dim(dim) if isinstance(dim, str) else dim for dim in target)
    case = Case("Reshape", (np.zeros((1,) * len(dims), np.float32),), {"shape": wanted})
    graph = graph_of(case, {0: dims})
    op, node = registry.get("Reshape"), graph.nodes[0]
    result = op.rows(Infer(op, node, {}), [axis])
    assert isinstance(result, MixesRows) if expected is None else result == [expected]
