"""Running sums and products along every axis, in both directions."""

from __future__ import annotations

import numpy as np
import pytest

import lathe
from lathe.core.errors import FeedError
from lathe.core.ir.types import DType
from lathe.core.kernels.call import Request, Status
from lathe.core.kernels.choose import select
from lathe.core.kernels.target import Target
from tests.core.kernels.harness import single_node
from tests.core.kernels.sweep import floats, kernel, normal, sweep, tensor
from tests.core.small_models import assert_like_onnx_runtime, model
from tests.core.targets import each_target, vectors


@pytest.mark.sample(5)
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
def test_lines_are_split_among_threads(threads: int) -> None:
    kernel("CumSum", "float32[n,30,11]", axis=(1,)).check(floats(900, 30, 11), threads=threads, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize("kind", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_an_axis_given_at_run_time(target: Target, dtype: str, kind: str) -> None:
    for op, exclusive, reverse in (("CumSum", 0, 1), ("CumProd", 1, 0)):
        compiled = kernel(op, f"{dtype}[n,3,21]", f"{kind}[]", target=target, exclusive=exclusive, reverse=reverse)
        for axis in range(-3, 3):
            for rows in (0, 1, 5):
                x = normal(DType[dtype.upper()], (rows, 3, 21))
                compiled.check(x, np.array(axis, kind), threads=1 + rows % 3, rtol=1e-4, atol=1e-4)
                assert compiled.status == Status.OK
        for axis in (-4, 3, 2**31 - 1):
            compiled(normal(DType[dtype.upper()], (2, 3, 21)), np.array(axis, kind))
            assert compiled.status == Status.AXIS_OUT_OF_RANGE


def test_a_fed_axis_like_onnx_runtime() -> None:
    data = model("float[N,L,C] x, int32 axis => float[N,L,C] y", "y = CumSum (x, axis)")
    feeds = [{"x": floats(2, 9, 5), "axis": np.array(axis, np.int32)} for axis in (0, 1, 2, -1)]
    assert_like_onnx_runtime(data, *feeds)
    with lathe.compile(data, threads=1, tune="off") as session:
        for each in feeds:
            session.run(each)
        assert "FALLBACK" not in session.explain()
        with pytest.raises(FeedError, match="out of range"):
            session.run({**feeds[0], "axis": np.array(3, np.int32)})


def test_other_types_run_on_the_reference() -> None:
    graph = single_node("CumSum", tensor("float16[n,4]"), axis=(1,))
    assert select(Request(graph.nodes[0], graph.constants, vectors())) is None
