"""MaxPool with indices of its maxima, and MaxUnpool, the inverse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.errors import FeedError
from lathe.core.ir.types import DType
from lathe.core.kernels.target import Target
from tests.core.kernels.sweep import kernel, normal
from tests.core.small_models import assert_like_onnx_runtime, model
from tests.core.targets import each_target

CASES: list[tuple[str, dict[str, Any]]] = [
    ("n,3,40", {"kernel_shape": (3,)}),
    ("n,3,41", {"kernel_shape": (3,), "strides": (2,), "pads": (1, 1)}),
    ("n,3,6,9", {"kernel_shape": (2, 2), "strides": (2, 2)}),
    ("2,n,7,20", {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1)}),
    ("n,2,11,35", {"kernel_shape": (3, 2), "strides": (1, 3), "pads": (1, 0, 0, 1)}),
    ("n,2,12,17", {"kernel_shape": (2, 3), "strides": (2, 2), "dilations": (3, 2)}),
    ("n,1,9,37", {"kernel_shape": (2, 2), "strides": (2, 2), "ceil_mode": 1}),
    ("n,2,5,6,7", {"kernel_shape": (2, 3, 2), "strides": (2, 1, 2), "pads": (0, 1, 0, 1, 0, 1)}),
]


@pytest.mark.sample(4)
@each_target
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "uint8"])
@pytest.mark.parametrize(("shape", "attrs"), CASES, ids=str)
def test_windows(target: Target, dtype: str, shape: str, attrs: dict[str, Any]) -> None:
    """Many elements are equal: the first one of a window counts."""
    compiled = kernel("MaxPool", f"{dtype}[{shape}]", target=target, outputs=2, **attrs)
    assert compiled.call.spec.family == "pool_indices"
    for rows, threads in ((0, 1), (1, 2), (2, 3), (5, 1)):
        (value,) = compiled.graph.inputs
        x = normal(DType[dtype.upper()], value.tensor.evaluate({"n": rows}))
        compiled.check(np.rint(x * 2).astype(x.dtype) if value.dtype.is_float else x, threads=threads, rtol=0, atol=0)


@each_target
def test_nan_and_infinities(target: Target) -> None:
    """NaN counts where a window begins with it; a window may hold nothing but -inf."""
    x = normal(DType.FLOAT32, (2, 2, 12, 13))
    x[:, :, ::3, ::2], x[0, 1], x[1, 0, 5] = np.nan, -np.inf, np.inf
    compiled = kernel("MaxPool", "float32[n,2,12,13]", target=target, outputs=2, kernel_shape=(3, 3), pads=(1, 1, 1, 1))
    compiled.check(x, rtol=0, atol=0)


@pytest.mark.parametrize("sizes", ["8,14", "H,W"])
@pytest.mark.parametrize(
    "attrs",
    ["kernel_shape = [2, 2], strides = [2, 2]", "kernel_shape = [2, 3], strides = [2, 1], pads = [0, 1, 0, 1]"],
)
def test_pool_and_unpool(sizes: str, attrs: str) -> None:
    data = model(
        f"float[N,3,{sizes}] x => float[] z, float[] y, int64[] places",
        f"y, places = MaxPool <{attrs}> (x)  h = Relu (y)  z = MaxUnpool <{attrs}> (h, places)",
    )
    feeds = [{"x": np.random.default_rng(n).standard_normal((n, 3, 8, 14)).astype(np.float32)} for n in (1, 3)]
    assert_like_onnx_runtime(data, *feeds)
    with lathe.compile(data, threads=1, tune="off") as session:
        session.run(feeds[0])
        assert "FALLBACK" not in session.explain()


def test_a_larger_output_and_indices_outside() -> None:
    data = model(
        "float[1,2,3,3] x, int64[1,2,3,3] places => float[] z",
        "z = MaxUnpool <kernel_shape = [2, 2], strides = [2, 2]> (x, places, shape)",
        "int64[4] shape = {1, 2, 7, 9}",
    )
    places = np.random.default_rng(0).permutation(72)[:18].reshape(1, 2, 3, 3)
    x = normal(DType.FLOAT32, (1, 2, 3, 3))
    with lathe.compile(data, threads=1, tune="off") as session:
        expected = lathe.interpret(lathe.load(data), {"x": x, "places": places})["z"]
        np.testing.assert_array_equal(session.run({"x": x, "places": places})["z"], expected)
        assert "FALLBACK" not in session.explain()
        for wrong in (-1, 72, -(2**40)):
            with pytest.raises(FeedError, match="out of range"):
                session.run({"x": x, "places": np.where(places == places.max(), wrong, places)})
