"""Running sums and products along every axis, in both directions."""

from __future__ import annotations

import pytest

from core.kernels.catalog import Request, select
from core.kernels.target import Target
from tests.core.kernels.harness import single_node
from tests.core.kernels.sweep import floats, kernel, sweep, tensor
from tests.core.targets import each_target, vectors


@each_target
@pytest.mark.parametrize("op", ["CumSum", "CumProd"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
def test_every_axis(target: Target, op: str, dtype: str, exclusive: int, reverse: int) -> None:
    attrs = {"exclusive": exclusive, "reverse": reverse}
    for axis in (0, 1, -1):
        sweep(op, f"{dtype}[n,4,21]", axis=(axis,), target=target, tolerance=1e-4, **attrs)
    sweep(op, f"{dtype}[5,n]", axis=(1,), target=target, tolerance=1e-4, **attrs)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_lines_are_shared_out(threads: int) -> None:
    kernel("CumSum", "float32[n,30,11]", axis=(1,)).check(floats(900, 30, 11), threads=threads, rtol=1e-4, atol=1e-4)


def test_other_types_and_axes_of_a_run_stay_with_the_reference() -> None:
    for inputs in (["float16[n,4]"], ["float32[n,4]", "int64[]"]):
        attrs = {"axis": (1,)} if len(inputs) == 1 else {}
        graph = single_node("CumSum", *map(tensor, inputs), **attrs)
        assert select(Request(graph.nodes[0], graph.constants, vectors())) is None
