"""Pooling against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe.core.errors import ModelError
from lathe.core.ir.dim import symbol
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.inference import infer_node
from tests.core.one_node import assert_like_onnx, assert_rows_apart, assert_symbolic_batch, lathe_run, make_node

WINDOWS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 3, 6, 7), {"kernel_shape": [2, 3]}),
    "strided": ((2, 3, 9, 8), {"kernel_shape": [3, 2], "strides": [2, 3]}),
    "padded": ((1, 2, 7, 7), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 0, 1, 2]}),
    "dilated": ((1, 2, 9, 9), {"kernel_shape": [2, 3], "dilations": [3, 2]}),
    "ceil": ((1, 2, 8, 7), {"kernel_shape": [3, 2], "strides": [2, 2], "ceil_mode": 1}),
    "ceil padded": ((1, 2, 8, 7), {"kernel_shape": [3, 3], "strides": [2, 3], "pads": [1, 1, 1, 1], "ceil_mode": 1}),
    "ceil past the end": ((1, 1, 4, 4), {"kernel_shape": [1, 1], "strides": [2, 2], "ceil_mode": 1}),
    "same upper": ((1, 2, 7, 8), {"kernel_shape": [3, 4], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    "same lower": ((1, 2, 7, 8), {"kernel_shape": [2, 2], "strides": [2, 1], "auto_pad": "SAME_LOWER"}),
    "valid": ((1, 2, 5, 5), {"kernel_shape": [2, 2], "auto_pad": "VALID"}),
    "one axis": ((2, 3, 10), {"kernel_shape": [3], "strides": [2]}),
    "three axes": ((1, 2, 4, 5, 4), {"kernel_shape": [2, 3, 2], "pads": [0, 1, 0, 1, 1, 1]}),
}


def image(shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    return (np.random.default_rng(3).standard_normal(shape) * 9).astype(dtype)


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
def test_agrees_with_onnx_runtime(op: str, name: str) -> None:
    shape, attrs = WINDOWS[name]
    assert_like_onnx(op, [image(shape)], attrs)


@pytest.mark.parametrize("shape", [(0, 0, 0), (0, 3, 0), (0, 2, 0, 4)])
def test_the_largest_of_no_images_is_empty(shape: tuple[int, ...]) -> None:
    assert_like_onnx("GlobalMaxPool", [image(shape)], {})


@pytest.mark.parametrize("name", WINDOWS)
def test_average_counting_the_padding(name: str) -> None:
    shape, attrs = WINDOWS[name]
    assert_like_onnx("AveragePool", [image(shape)], {**attrs, "count_include_pad": 1})


@pytest.mark.parametrize("name", [name for name in WINDOWS if not name.startswith("same")])
@pytest.mark.parametrize("order", [0, 1])
def test_max_positions(name: str, order: int) -> None:
    shape, attrs = WINDOWS[name]
    assert_like_onnx("MaxPool", [image(shape)], {**attrs, "storage_order": order}, outputs=2)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.float64])
def test_max_of_other_types(dtype: Any) -> None:
    assert_like_onnx("MaxPool", [image((1, 2, 5, 5), dtype)], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]})


@pytest.mark.parametrize("op", ["GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 7), (1, 2, 3, 2, 3)])
def test_global(op: str, shape: tuple[int, ...]) -> None:
    assert_like_onnx(op, [image(shape)], {}, opset=12)  # ONNX Runtime has no GlobalLpPool of opset 22


@pytest.mark.parametrize(
    ("op", "attrs"),
    [("MaxPool", WINDOWS["padded"][1]), ("AveragePool", WINDOWS["padded"][1]), ("LpPool", WINDOWS["padded"][1]),
     ("GlobalAveragePool", {}), ("GlobalMaxPool", {})],
)  # fmt: skip
def test_layout_rows_and_symbolic_batch(op: str, attrs: dict[str, Any]) -> None:
    x = image((3, 2, 7, 7))
    (first,) = lathe_run(op, [x], attrs)
    (last,) = lathe_run(op, [np.moveaxis(x, 1, -1)], {**attrs, "layout": "NHWC"})
    np.testing.assert_allclose(np.moveaxis(last, -1, 1), first, 1e-6)
    assert_rows_apart(op, [x], attrs)
    assert_symbolic_batch(op, [x], attrs)


def test_positions_count_over_the_batch_so_rows_mix() -> None:
    node = make_node("MaxPool", [image((2, 1, 4, 4))], {"kernel_shape": [2, 2]}, outputs=2)
    op = registry.get("MaxPool")
    assert isinstance(op.rows(registry.Infer(op, node, {}), [0]), registry.MixesRows)


@pytest.mark.parametrize("size", [16, 17, 18, 19])
@pytest.mark.parametrize("attrs", [{"ceil_mode": 1}, {"ceil_mode": 1, "pads": (0, 1)}, {"ceil_mode": 0}])
def test_symbolic_size_with_ceil_mode(size: int, attrs: dict[str, Any]) -> None:
    """If the last window depends on the symbol's value, the dimension is unknown; otherwise it is exact."""
    (y,) = lathe_run("MaxPool", [image((1, 1, size))], {"kernel_shape": (3,), "strides": (2,), **attrs})
    node = make_node("MaxPool", [image((1, 1, size))], {"kernel_shape": (3,), "strides": (2,), **attrs})
    assert node.inputs[0] is not None
    node.inputs[0].type = TensorType(DType.FLOAT32, (1, 1, symbol("L")))
    infer_node(node, {})
    assert node.output.tensor.evaluate({"L": size}) == y.shape


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ({}, "'kernel_shape' is required"),
        ({"kernel_shape": [3]}, "2 spatial axes, the kernel 1"),
        ({"kernel_shape": [3, -1]}, "kernel_shape is \\[3, -1\\]"),
        ({"kernel_shape": [9, 1]}, "window of extent 9 is larger"),
        ({"kernel_shape": [3, 3], "pads": [0, 0, 0, -1]}, "expected 4 numbers of at least 0"),
    ],
)
def test_invalid_shapes_are_refused(attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        lathe_run("MaxPool", [image((1, 1, 5, 5))], attrs)
