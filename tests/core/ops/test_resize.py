"""Resize against ONNX Runtime, and against ONNX's reference where they differ: in corners of fractional sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe.core.errors import ModelError
from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Node
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.inference import infer_node
from tests.core.one_node import assert_like_onnx, lathe_run, make_node
from tests.core.ops.cases import Case
from tests.core.ops.harness import oracle

COORDINATES = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric"]
NEAREST = ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]
IMAGE = np.random.default_rng(2).standard_normal((1, 2, 5, 6)).astype(np.float32)


def scales(*values: float) -> list[Any]:
    return [None, np.array(values, np.float32)]


def sizes(*values: int) -> list[Any]:
    return [None, None, np.array(values, np.int64)]


TARGETS = {
    "double": scales(1, 1, 2, 2),
    "fractional": scales(1, 1, 1.7, 0.6),
    "shrink": scales(1, 1, 0.7, 0.4),
    "sizes": sizes(1, 2, 9, 4),
    "to one": sizes(1, 2, 1, 3),
}


COMBINATIONS = [
    (target, coordinates)
    for target in TARGETS
    for coordinates in COORDINATES
    if coordinates != "align_corners" or target not in ("fractional", "shrink")
]


@pytest.mark.parametrize(("target", "coordinates"), COMBINATIONS)
@pytest.mark.parametrize("nearest", NEAREST)
def test_nearest(target: str, coordinates: str, nearest: str) -> None:
    attrs = {"mode": "nearest", "coordinate_transformation_mode": coordinates, "nearest_mode": nearest}
    assert_like_onnx("Resize", [IMAGE, *TARGETS[target]], attrs)


@pytest.mark.parametrize(("target", "coordinates"), COMBINATIONS)
@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_interpolation(target: str, coordinates: str, mode: str) -> None:
    attrs = {"mode": mode, "coordinate_transformation_mode": coordinates}
    assert_like_onnx("Resize", [IMAGE, *TARGETS[target]], attrs, tolerance=1e-4)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("target", ["fractional", "shrink"])
def test_aligned_corners_of_a_size_that_is_not_whole(target: str, mode: str) -> None:
    attrs = {"mode": mode, "coordinate_transformation_mode": "align_corners"}
    (expected,) = oracle(Case("Resize", (IMAGE, *TARGETS[target]), attrs, oracle="onnx"))
    (got,) = lathe_run("Resize", [IMAGE, *TARGETS[target]], attrs)
    np.testing.assert_allclose(got, expected, 1e-4, 1e-4)


@pytest.mark.parametrize("coefficient", [-0.5, -0.75])
@pytest.mark.parametrize("target", ["double", "shrink"])
def test_cubic_excluding_the_outside(coefficient: float, target: str) -> None:
    attrs = {"mode": "cubic", "cubic_coeff_a": coefficient, "exclude_outside": 1}
    assert_like_onnx("Resize", [IMAGE, *TARGETS[target]], attrs, tolerance=1e-4)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("target", ["shrink", "sizes", "double"])
def test_antialias(mode: str, target: str) -> None:
    assert_like_onnx("Resize", [IMAGE, *TARGETS[target]], {"mode": mode, "antialias": 1}, tolerance=1e-4)


@pytest.mark.parametrize("mode", ["linear", "nearest"])
def test_crop(mode: str) -> None:
    roi = np.array([0, 0, 0.2, -0.3, 1, 1, 0.9, 1.4], np.float32)
    attrs = {"mode": mode, "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 7.0}
    assert_like_onnx("Resize", [IMAGE, roi, None, np.array([1, 2, 4, 7])], attrs, tolerance=1e-4)


@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
def test_keeping_the_proportions(policy: str) -> None:
    inputs = [IMAGE, None, None, np.array([9, 8])]
    assert_like_onnx(
        "Resize", inputs, {"axes": [2, 3], "keep_aspect_ratio_policy": policy, "mode": "linear"}, tolerance=1e-4
    )


def test_integers_and_other_ranks() -> None:
    assert_like_onnx("Resize", [(IMAGE * 40).astype(np.int8), *scales(1, 1, 2, 2)], {})
    assert_like_onnx("Resize", [IMAGE[0, 0], *scales(2, 1.5)], {"mode": "linear"}, tolerance=1e-4)


def test_channels_last_counts_axes_channels_first() -> None:
    inputs = TARGETS["fractional"]
    (first,) = lathe_run("Resize", [IMAGE, *inputs], {"mode": "linear"})
    (last,) = lathe_run("Resize", [np.moveaxis(IMAGE, 1, -1), *inputs], {"mode": "linear", "layout": "NHWC"})
    np.testing.assert_allclose(np.moveaxis(last, -1, 1), first, 1e-6, 1e-6)


def resize_node(attrs: dict[str, Any]) -> Node:
    """A Resize of [batch, 2, H, 6] with its parameters as attributes."""
    node = make_node("Resize", [IMAGE], attrs)
    assert node.inputs[0] is not None
    node.inputs[0].type = TensorType(DType.FLOAT32, (symbol("batch"), 2, symbol("H"), 6))
    return node


@pytest.mark.parametrize(
    ("attrs", "expected"),
    [
        ({"scales": (1.0, 1.0, 2.0, 2.0)}, (3, 2, 22, 12)),
        ({"scales": (1.0, 1.0, 1.5, 0.5)}, (3, 2, 16, 3)),
        ({"sizes": (symbol("batch"), 2, 7, 8)}, (3, 2, 7, 8)),
        ({"sizes": (7, 8), "axes": (2, 3)}, (3, 2, 7, 8)),
    ],
)
def test_symbolic_dimensions(attrs: dict[str, Any], expected: tuple[int, ...]) -> None:
    node = resize_node(attrs)
    infer_node(node, {})
    assert node.output.tensor.evaluate({"batch": 3, "H": 11}) == expected


@pytest.mark.parametrize(
    ("attrs", "apart"),
    [
        ({"scales": (1.0, 1.0, 2.0, 2.0)}, True),
        ({"sizes": (symbol("batch"), 2, 7, 8)}, True),
        ({"sizes": (7, 8), "axes": (2, 3)}, True),
        ({"scales": (2.0, 1.0, 2.0, 2.0)}, False),
        ({"sizes": (4, 2, 7, 8)}, False),
    ],
)
def test_rows(attrs: dict[str, Any], apart: bool) -> None:
    op, node = registry.get("Resize"), resize_node(attrs)
    assert (op.rows(registry.Infer(op, node, {}), [0]) == [0]) is apart


@pytest.mark.parametrize(
    ("inputs", "attrs", "message"),
    [
        ([], {}, "neither scales nor sizes"),
        (scales(1, 2), {}, "scales has 2 elements, expected 4"),
        (scales(1, 1, 0, 2), {}, "scale is 0"),
        (scales(1, 1, 2, 2), {"mode": "area"}, "mode is 'area', expected one of nearest"),
        (sizes(1, 2, -3, 2), {}, "output would have shape"),
        (scales(1, 1, 1e-9, 1), {"mode": "linear", "antialias": 1}, "makes every result of more than 65536 samples"),
    ],
)
def test_invalid_parameters_are_refused(inputs: list[Any], attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        lathe_run("Resize", [IMAGE, *inputs], attrs)
