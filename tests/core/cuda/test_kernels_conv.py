"""Convolutions of GPUs: kernels, strides, dilations, padding, groups, layouts, epilogues, types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType
from tests.core.cuda.gpu_kernel import GpuKernel, compiles, sweep
from tests.core.kernels.harness import scalar_body, single_node
from tests.core.kernels.sweep import floats, tensor

FEW = (0, 1, 3)
ADD_RELU = scalar_body(2, lambda b, x, y: b("Relu", b("Add", x, y)))


def conv(image: str, weight: Any, *more: Any, **attrs: Any) -> GpuKernel:
    attrs.setdefault("layout", "NHWC")
    attrs.setdefault("pads", (0, 0, 0, 0))
    attrs.setdefault("rtol", 1e-4)
    if image.startswith("float32"):  # sm_90 has other weights and products for float32
        sweep("FusedConv", image, weight, *more, batches=FEW, atol=1e-4, arch=90, **attrs)
    return sweep("FusedConv", image, weight, *more, batches=FEW, atol=1e-4, **attrs)


@pytest.mark.parametrize("channels", [1, 3, 16, 17, 32])
@pytest.mark.parametrize("outputs", [1, 17])
def test_channels(channels: int, outputs: int) -> None:
    kernel = conv(f"float32[n,7,5,{channels}]", floats(outputs, channels, 3, 3), None, pads=(1, 1, 1, 1))
    assert kernel.call.spec.by_channels is (channels % 16 == 0)


@pytest.mark.parametrize(
    "attrs",
    [
        {"strides": (2, 1)}, {"dilations": (1, 2)}, {"pads": (1, 0, 2, 3)}, {"strides": (3, 2), "pads": (1, 1, 1, 1)},
        {"pads": (2, 2, 2, 2), "dilations": (2, 2)},
    ],
)  # fmt: skip
def test_windows(attrs: dict[str, Any]) -> None:
    conv("float32[n,9,8,16]", floats(5, 16, 3, 2), **attrs)


@pytest.mark.parametrize("groups", [2, 4])
def test_groups(groups: int) -> None:
    conv("float32[n,5,6,32]", floats(8, 32 // groups, 3, 3), floats(8), group=groups)


def test_pointwise() -> None:
    conv("float32[n,5,6,33]", floats(20, 33, 1, 1))
    conv("float32[n,5,6,16]", floats(20, 16, 1, 1), strides=(2, 2))


def test_one_and_three_axes() -> None:
    conv("float32[n,17,3]", floats(5, 3, 4), pads=(1, 2))
    conv("float32[n,4,5,3,2]", floats(5, 2, 2, 3, 1), pads=(0, 1, 0, 1, 1, 0))


@pytest.mark.parametrize("shape", ["n,5,6,8", "8", "n,1,1,8"])
def test_epilogues(shape: str) -> None:
    kernel = conv("float32[n,5,6,4]", floats(8, 4, 3, 3), None, f"float32[{shape}]", pads=(1,) * 4, epilogue=ADD_RELU)
    assert kernel.call.inplace == ((3,) if shape == "n,5,6,8" else ())
    conv("float32[n,5,6,4]", floats(8, 4, 3, 3), floats(8), f"float32[{shape}]", pads=(1,) * 4, epilogue=ADD_RELU)


def test_channels_first_with_computed_weights() -> None:
    sweep("Conv", "float32[n,3,7,5]", "float32[4,3,3,3]", "float32[4]", pads=(1, 1, 1, 1), batches=FEW, atol=1e-4)
    sweep("Conv", "float32[n,6,7,5]", "float32[6,1,3,3]", group=6, batches=FEW, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow(dtype: str) -> None:
    image, weights = f"{dtype}[n,5,6,16]", f"{dtype}[8,16,3,3]"
    sweep("FusedConv", image, weights, layout="NHWC", pads=(1,) * 4, batches=(2,), rtol=3e-2, atol=6e-2)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16], ids=str)
def test_narrow_images_with_float32_weights(dtype: DType) -> None:
    cast = scalar_body(1, lambda b, x: b("Cast", x, to=dtype.onnx_code))
    attrs = {"layout": "NHWC", "pads": (1,) * 4, "epilogue": cast}
    sweep("FusedConv", f"{dtype}[n,5,6,16]", floats(8, 16, 3, 3), None, batches=(2,), rtol=2e-2, atol=6e-2, **attrs)


@pytest.mark.parametrize("channels", [3, 16, 33])
def test_depthwise(channels: int) -> None:
    kernel = conv(
        f"float32[n,7,5,{channels}]", floats(channels, 1, 3, 3), floats(channels), pads=(1,) * 4, group=channels
    )
    assert kernel.call.spec.family == "depthwise"
    conv(f"float32[n,7,5,{channels}]", floats(channels, 1, 3, 2), strides=(2, 2), dilations=(1, 2), group=channels)


def bytes_of(dtype: DType, shape: tuple[int, ...]) -> Array:
    """Random integers over the whole range of the type."""
    info = np.iinfo(dtype.numpy)
    return np.random.default_rng(0).integers(info.min, info.max, shape, dtype.numpy, endpoint=True)


@pytest.mark.parametrize(
    "attrs",
    [
        {}, {"pads": (1, 1, 1, 1), "pad_value": 131}, {"strides": (2, 1), "pads": (0, 2, 1, 0), "pad_value": 255},
        {"dilations": (1, 2), "group": 2}, {"group": 32, "pads": (1, 1, 1, 1), "pad_value": 7},
    ],
)  # fmt: skip
def test_bytes(attrs: dict[str, Any]) -> None:
    """Exact for any padding: tensor cores take only int8, so uint8 values are shifted and the sums corrected."""
    weight = bytes_of(DType.INT8, (64, 32 // attrs.get("group", 1), 3, 2))
    kernel = conv("uint8[n,6,5,32]", weight, "int32[64]", sample=bytes_of, rtol=0, **attrs)
    assert kernel.call.spec.family == "conv" and kernel.call.spec.element is DType.INT8


def test_few_bytes_and_their_epilogue() -> None:
    body = scalar_body(1, lambda b, x: b("Cast", x, to=DType.FLOAT32.onnx_code), DType.INT32)
    weight, attrs = bytes_of(DType.INT8, (17, 4, 3, 3)), {"pads": (1,) * 4, "pad_value": 120, "epilogue": body}
    for rank in range(3):
        conv("uint8[n,7,5,4]", weight, "int32[17]", sample=bytes_of, rank=rank, **attrs)
    compiles("FusedConv", "uint8[n,7,5,4]", weight, "int32[17]", layout="NHWC", **attrs)


def test_convolutions_of_bytes_compile() -> None:
    compiles("FusedConv", "uint8[n,56,56,64]", bytes_of(DType.INT8, (64, 64, 3, 3)), layout="NHWC", pads=(1,) * 4)


TRANSPOSED: list[dict[str, Any]] = [
    {}, {"strides": (2, 3)}, {"dilations": (2, 1)}, {"pads": (1, 0, 2, 1)},
    {"strides": (2, 2), "output_padding": (1, 1)}, {"strides": (3, 2), "pads": (1, 1, 1, 1)},
    {"strides": (2, 2), "output_shape": (7, 9)},
]  # fmt: skip


@pytest.mark.parametrize("attrs", TRANSPOSED)
def test_transposed(attrs: dict[str, Any]) -> None:
    sweep("ConvTranspose", "float32[n,6,4,5]", "float32[6,4,3,2]", batches=FEW, atol=1e-4, **attrs)
    sweep(
        "ConvTranspose", "float32[n,6,4,5]", "float32[6,2,3,2]", "float32[4]", group=2, batches=(2,), atol=1e-4, **attrs
    )


WINDOWS: list[dict[str, Any]] = [
    {}, {"strides": (2, 1)}, {"dilations": (1, 2)}, {"pads": (1, 0, 2, 1)},
    {"auto_pad": "SAME_UPPER", "strides": (2, 2)},
]  # fmt: skip


@pytest.mark.parametrize("attrs", WINDOWS)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_gradients_of_weights(attrs: dict[str, Any], layout: str) -> None:
    counts = single_node("Conv", tensor("float32[n,4,9,8]"), tensor("float32[6,4,3,2]"), **attrs).outputs[0].shape[2:]
    high, wide = counts
    x, dy = ("n,4,9,8", f"n,6,{high},{wide}") if layout == "NCHW" else ("n,9,8,4", f"n,{high},{wide},6")
    facts = {"kernel_shape": (3, 2), "layout": layout, **attrs}
    sweep("ConvWeightGradient", f"float32[{x}]", f"float32[{dy}]", batches=FEW, atol=1e-3, **facts)
    sweep("ConvWeightGradient", f"float32[{x}]", f"float32[{dy}]", batches=(2,), group=2, atol=1e-3, **facts)


def test_many_pixels_are_split_among_programs() -> None:
    shapes = ("float32[n,4,40,40]", "float32[n,6,38,38]")
    kernel = sweep("ConvWeightGradient", *shapes, kernel_shape=(3, 3), batches=(1,), atol=1e-2)
    assert kernel.call.spec.parts > 8 and kernel.call.grid == (kernel.call.spec.programs, kernel.call.spec.parts)


def test_batch_last() -> None:
    sweep("Conv", "float32[3,7,5,n]", "float32[4,3,3,3]", pads=(1, 1, 1, 1), layout="CHWN", batches=FEW, atol=1e-4)


def test_every_offer_agrees() -> None:
    for weights, group in ((floats(20, 32, 3, 1), 1), (floats(32, 1, 3, 1), 32)):
        attrs = {"layout": "NHWC", "pads": (1, 0, 1, 0), "group": group}
        for rank in range(GpuKernel("FusedConv", "float32[n,5,9,32]", weights, **attrs).offers):
            sweep("FusedConv", "float32[n,5,9,32]", weights, batches=(2,), rank=rank, atol=1e-4, **attrs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiles(dtype: str) -> None:
    attrs = {"layout": "NHWC", "pads": (1, 1, 1, 1)}
    extra = f"{dtype}[n,56,56,64]"
    compiles("FusedConv", extra, f"{dtype}[64,64,3,3]", None, extra, epilogue=body(dtype), **attrs)
    compiles("FusedConv", f"{dtype}[n,56,56,64]", f"{dtype}[64,1,3,3]", None, group=64, **attrs)


def test_first_layers_compile() -> None:
    compiles(
        "FusedConv", "float32[n,64,64,3]", floats(64, 3, 7, 7), floats(64), layout="NHWC", strides=(2, 2), pads=(3,) * 4
    )


def test_transposed_compiles() -> None:
    compiles("ConvTranspose", "float32[n,64,14,14]", "float32[64,32,3,3]", strides=(2, 2), pads=(1, 1, 1, 1))


def test_gradients_compile() -> None:
    compiles("ConvWeightGradient", "float32[n,64,56,56]", "float32[n,64,56,56]", kernel_shape=(3, 3), pads=(1,) * 4)


def body(dtype: str) -> Any:
    return scalar_body(2, lambda b, x, y: b("Relu", b("Add", x, y)), DType.parse(dtype))
