"""GPU kernels over lines: softmax, reductions, normalizations; lengths around powers of two, axes, special numbers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType
from lathe.core.kernels.cuda import generate
from lathe.core.kernels.cuda.compiler import _compile
from tests.core.cuda.gpu_kernel import GpuKernel, compiles, sweep
from tests.core.kernels.sweep import floats, normal, positive

LONG = 9001  # elements, more than registers hold


@pytest.mark.parametrize("op", ["Softmax", "GuardedSoftmax", "LogSoftmax"])
@pytest.mark.parametrize("length", [1, 3, 7, 17, 33, 128])
def test_softmax_of_rows(op: str, length: int) -> None:
    sweep(op, f"float32[n,{length}]")


@pytest.mark.parametrize("shape", ["n,5,1,3", "n,17,33", "n,200,16", "n,1,7"])
def test_softmax_of_columns(shape: str) -> None:
    sweep("Softmax", f"float32[{shape}]", axis=1)


def test_softmax_of_long_lines() -> None:
    sweep("Softmax", f"float32[n,{LONG}]", batches=(0, 1, 3))
    sweep("LogSoftmax", "float32[3,n]", axis=-1, batches=(1, 40, 3000))


@pytest.mark.parametrize("length", [7, 600, LONG])
def test_softmax_of_special_numbers(length: int) -> None:
    rows = floats(8, length)
    rows[0, : length // 2] = -np.inf  # masked
    rows[1] = -np.inf
    rows[2, 2] = np.inf
    rows[3, 1] = np.nan
    rows[4] *= 1e30
    rows[5] = 88.0
    rows[6] = np.nan
    with np.errstate(all="ignore"):
        for op in ("Softmax", "GuardedSoftmax"):
            GpuKernel(op, f"float32[n,{length}]").check(rows)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_softmax_of_narrow_numbers(dtype: str) -> None:
    sweep("Softmax", f"{dtype}[n,33]", batches=(3,), rtol=2e-2, atol=2e-3)


def test_every_offer_of_softmax_agrees() -> None:
    for shape, axis in (("n,33", 1), ("n,33,40", 1)):
        for rank in range(GpuKernel("Softmax", f"float32[{shape}]", axis=axis).offers):
            sweep("Softmax", f"float32[{shape}]", axis=axis, rank=rank, batches=(0, 3))


def test_softmax_compiles() -> None:
    compiles("Softmax", "float32[n,12,128,128]")
    compiles("LogSoftmax", f"bfloat16[n,{LONG}]")


KINDS = [
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare",
    "ReduceLogSumExp",
]  # fmt: skip


@pytest.mark.parametrize("op", KINDS)
@pytest.mark.parametrize("axes", [(1,), (2,), (1, 2), (0, 2)])
def test_reductions(op: str, axes: tuple[int, ...]) -> None:
    sweep(op, "float32[n,5,7]", axes=axes, batches=(1, 3), rtol=1e-3)


@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceLogSumExp"])
def test_long_reductions(op: str) -> None:
    sweep(op, f"float32[n,{LONG}]", axes=(1,), batches=(0, 3))
    sweep(op, "float32[n,3]", axes=(0,), batches=(1, 40, 3000))


def test_few_long_lines_are_split_among_programs() -> None:
    kernel = sweep("ReduceMean", "float32[n,3]", axes=(0,), batches=(1, 3, 3000))
    assert kernel.call.spec.parts == 1  # n is not known to be large
    for shape, axes in (("n,40,40,5", (0, 1, 2)), ("3,90000", (1,))):
        for op in ("ReduceSum", "ReduceMean", "ReduceL2"):
            kernel = sweep(op, f"float32[{shape}]", axes=axes, keepdims=0, batches=(2,), atol=1e-3, rtol=1e-3)
            assert kernel.call.spec.parts > 4
    compiles("ReduceMean", "float32[n,40,40,64]", axes=(0, 1, 2))


def test_logarithm_of_a_sum_of_positive_numbers() -> None:
    sweep("ReduceLogSum", "float32[n,17]", axes=(1,), sample=positive)


@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin", "ReduceSum"])
def test_reductions_of_other_types(op: str) -> None:
    for dtype in ("int64", "int32", "float64", "float16"):
        sweep(op, f"{dtype}[n,17]", axes=(1,), keepdims=0, batches=(3,), rtol=1e-2)


def test_extremes_propagate_nan() -> None:
    rows = floats(3, 17)
    rows[1, 4] = np.nan
    rows[2] = -np.inf
    for op in ("ReduceMax", "ReduceMin", "ReduceLogSumExp"):
        with np.errstate(all="ignore"):
            GpuKernel(op, "float32[n,17]", axes=(1,)).check(rows)


def test_global_pooling() -> None:
    sweep("GlobalAveragePool", "float32[n,5,7,3]", layout="NHWC")
    sweep("GlobalMaxPool", "float32[n,5,7,3]")


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
def test_indices_of_extremes(op: str, last: int) -> None:
    def few(dtype: DType, shape: tuple[int, ...]) -> Array:
        return np.round(2 * normal(dtype, shape))  # many are equal

    for shape, axis in (("n,17", 1), ("n,5,33", 1), ("n,9001", 1)):
        sweep(op, f"float32[{shape}]", axis=axis, select_last_index=last, sample=few, batches=(0, 3))
    rows = few(DType.FLOAT32, (3, 7))
    rows[0, 2] = rows[0, 5] = np.nan
    rows[1] = -np.inf
    rows[2] = np.inf
    GpuKernel(op, "float32[n,7]", axis=1, select_last_index=last).check(rows)


@pytest.mark.parametrize("length", [1, 3, 17, 33, 384, LONG])
def test_layer_normalization(length: int) -> None:
    sweep("LayerNormalization", f"float32[n,2,{length}]", floats(length), floats(length), batches=(0, 3), atol=1e-4)


def test_statistics_of_layers() -> None:
    sweep("LayerNormalization", "float32[n,33]", floats(33), floats(33), outputs=3, atol=1e-4)
    sweep("RMSNormalization", "float32[n,33]", floats(33), atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_layers_of_narrow_floats(dtype: str) -> None:
    sweep("LayerNormalization", f"{dtype}[n,33]", floats(33), floats(33), batches=(3,), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_group_normalization(layout: str) -> None:
    shape = "n,5,3,8" if layout == "NHWC" else "n,8,5,3"
    attrs = {"layout": layout, "num_groups": 4}
    sweep("GroupNormalization", f"float32[{shape}]", floats(8), floats(8), atol=1e-4, **attrs)
    sweep("InstanceNormalization", f"float32[{shape}]", floats(8), floats(8), atol=1e-4, layout=layout)


def test_batch_normalization() -> None:
    vectors = [floats(5), floats(5), floats(5), np.abs(floats(5)) + 0.5]
    sweep("BatchNormalization", "float32[n,5,3]", *vectors)


def test_every_offer_agrees() -> None:
    cases = [("ReduceMean", ["float32[n,33]"], {"axes": (1,)}), ("ReduceSum", ["float32[n,33,40]"], {"axes": (1,)})]
    for op, inputs, attrs in cases:
        for rank in range(GpuKernel(op, *inputs, **attrs).offers):
            sweep(op, *inputs, rank=rank, batches=(3,), atol=1e-4, **attrs)


def test_compiles() -> None:
    compiles("ReduceMean", "float32[n,49,2048]", axes=(1,))
    compiles("ReduceMax", f"bfloat16[n,{LONG}]", axes=(1,))
    compiles("ReduceProd", "int64[n,3]", axes=(0,))
    compiles("ArgMax", "float32[n,1000]", axis=1)
    compiles("LayerNormalization", "float32[n,384]", floats(384), floats(384), outputs=3)
    compiles(
        "GroupNormalization",
        "float16[n,32,32,64]",
        np.ones(64, np.float16),
        np.ones(64, np.float16),
        num_groups=8,
        layout="NHWC",
    )
    compiles("ReduceLogSumExp", "float32[n,1000]", axes=(1,))


@pytest.mark.parametrize(
    ("op", "shape", "attrs"),
    [
        ("ReduceMean", "n,49", {"axes": (1,)}),
        ("ReduceMean", "3,n", {"axes": (1,)}),
        ("ReduceL2", "n,49", {"axes": (1,)}),
        ("GlobalAveragePool", "n,3,7,7", {}),
        ("AveragePool", "n,3,9,9", {"kernel_shape": (3, 3)}),
        ("AveragePool", "n,3,9,9", {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1)}),
        ("AveragePool", "n,3,9,9", {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "count_include_pad": 1}),
        ("Div", "n,9", {}),
        ("Sqrt", "n,9", {}),
    ],
)
def test_quotients_and_roots_compile_to_exact_instructions(op: str, shape: str, attrs: dict[str, Any]) -> None:
    """Triton's own `/` and `sqrt` of float32 are estimates, which a step may see."""
    kernel = GpuKernel(op, *[f"float32[{shape}]"] * (1 + (op == "Div")), **attrs)
    ptx = _compile(generate(kernel.call.spec, kernel.target), 90).asm["ptx"]
    found = set(re.findall(r"\b(?:div|sqrt|rcp)\.[a-z.]+\.f32", ptx))
    assert found and found <= {"div.rn.f32", "sqrt.rn.f32"}
