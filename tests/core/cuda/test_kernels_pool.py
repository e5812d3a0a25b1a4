"""Pooling on GPUs: windows, padding, layouts, types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType
from tests.core.cuda.gpu_kernel import GpuKernel, compiles, sweep
from tests.core.kernels.harness import single_node
from tests.core.kernels.sweep import floats, normal, tensor

WINDOWS: list[dict[str, Any]] = [
    {"kernel_shape": (2, 2), "strides": (2, 2)},
    {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)},
    {"kernel_shape": (3, 2), "strides": (1, 2), "pads": (0, 1, 2, 0)},
    {"kernel_shape": (2, 3), "dilations": (2, 1)},
    {"kernel_shape": (3, 3), "strides": (3, 3), "ceil_mode": 1, "pads": (1, 0, 1, 0)},
    {"kernel_shape": (3, 3), "strides": (2, 2), "auto_pad": "SAME_UPPER"},
]


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("attrs", WINDOWS)
def test_windows(attrs: dict[str, Any], layout: str) -> None:
    shape = "n,9,8,5" if layout == "NHWC" else "n,5,9,8"
    sweep("MaxPool", f"float32[{shape}]", layout=layout, batches=(0, 1, 2), **attrs)
    for padded in (0, 1):
        sweep("AveragePool", f"float32[{shape}]", layout=layout, batches=(2,), count_include_pad=padded, **attrs)


def test_images_of_one_pixel() -> None:
    """The positions of windows and their bounds checks are then scalars instead of blocks."""
    for attrs in ({"kernel_shape": (3, 2), "pads": (1, 0, 1, 1)}, {"kernel_shape": (1, 1)}):
        for op in ("MaxPool", "AveragePool"):
            sweep(op, "float32[n,1,1,4]", layout="NHWC", batches=(1, 20), **attrs)
            compiles(op, "float32[n,1,1,4]", layout="NHWC", **attrs)


def test_one_axis_and_many_channels() -> None:
    sweep("MaxPool", "float32[n,17,70]", layout="NHWC", kernel_shape=(3,), strides=(2,))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "uint8", "int8"])
def test_types(dtype: str) -> None:
    attrs = {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "layout": "NHWC"}
    sweep("MaxPool", f"{dtype}[n,5,6,7]", batches=(2,), **attrs)


def test_not_a_number_is_the_greatest() -> None:
    x = floats(1, 4, 4, 3)
    x[0, 1, 1, 1] = np.nan
    x[0, 2, 2, 2] = -np.inf
    GpuKernel("MaxPool", "float32[n,4,4,3]", layout="NHWC", kernel_shape=(2, 2)).check(x)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("attrs", WINDOWS)
def test_gradients(attrs: dict[str, Any], layout: str) -> None:
    def few(dtype: DType, shape: tuple[int, ...]) -> Array:
        return np.round(2 * normal(dtype, shape))  # many are equal

    shape = "n,9,8,5" if layout == "NHWC" else "n,5,9,8"
    x = f"float32[{shape}]"
    result = single_node("MaxPool", tensor(x), layout=layout, **attrs).outputs[0].type
    sweep("MaxPoolGradient", x, str(result), layout=layout, sample=few, batches=(0, 1, 2), **attrs)


def test_gradient_of_one_window() -> None:
    for size in (1, 3):
        image = f"float32[1,1,{size},{size}]"
        sweep("MaxPoolGradient", image, "float32[1,1,1,1]", kernel_shape=(size, size), batches=(1,))


def test_every_offer_agrees() -> None:
    attrs = {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1)}
    for layout, shape in (("NHWC", "n,5,6,33"), ("NCHW", "n,33,5,6")):
        for rank in range(GpuKernel("MaxPool", f"float32[{shape}]", layout=layout, **attrs).offers):
            sweep("MaxPool", f"float32[{shape}]", layout=layout, rank=rank, batches=(2,), **attrs)


def test_compiles() -> None:
    attrs = {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1), "layout": "NHWC"}
    compiles("MaxPool", "float32[n,56,56,64]", **attrs)
    compiles("AveragePool", "bfloat16[n,56,56,64]", **attrs)
    compiles("MaxPool", "uint8[n,5,6,7]", **attrs)
    compiles("MaxPoolGradient", "float32[n,56,56,64]", "float32[n,28,28,64]", **attrs)
