"""Normalization against ONNX Runtime, and against ONNX's own reference where it has no kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from lathe.core.errors import ModelError
from lathe.core.ops.opdef import registry
from tests.core.one_node import (
    assert_like_onnx,
    assert_rows_apart,
    assert_symbolic_batch,
    lathe_run,
    make_node,
    one_node_model,
)
from tests.random_numbers import RNG, made_at_import


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return (RNG.standard_normal(shape) * 2 + 1).astype(dtype)


def channels(count: int, dtype: Any = np.float32) -> list[Any]:
    """Scale, bias, mean and a positive variance."""
    return [normal(count, dtype=dtype) for _ in range(3)] + [np.abs(normal(count, dtype=dtype)) + dtype(0.1)]


IMAGES = [(2, 4, 3, 5), (3, 4, 6), (2, 4, 2, 3, 2)]


@pytest.mark.parametrize("shape", [*IMAGES, (5, 4)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_batch_normalization(shape: tuple[int, ...], dtype: Any) -> None:
    assert_like_onnx("BatchNormalization", [normal(*shape, dtype=dtype), *channels(4, dtype)], {"epsilon": 1e-3})


def test_batch_normalization_in_training() -> None:
    inputs, attrs = [normal(3, 4, 5), *channels(4)], {"training_mode": 1, "momentum": 0.7}
    expected = ReferenceEvaluator(one_node_model("BatchNormalization", inputs, attrs, 3)).run(
        None, {f"x{i}": array for i, array in enumerate(inputs)}
    )
    for mine, theirs in zip(lathe_run("BatchNormalization", inputs, attrs, 3), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, 1e-4, 1e-5)


@pytest.mark.parametrize("shape", IMAGES)
def test_instance_normalization(shape: tuple[int, ...]) -> None:
    assert_like_onnx("InstanceNormalization", [normal(*shape), *channels(4)[:2]], {"epsilon": 1e-2})


@pytest.mark.parametrize("shape", IMAGES)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_group_normalization(shape: tuple[int, ...], groups: int) -> None:
    assert_like_onnx("GroupNormalization", [normal(*shape), *channels(4)[:2]], {"num_groups": groups}, tolerance=1e-4)


@pytest.mark.parametrize(("axis", "scale"), [(-1, (6,)), (1, (5, 6)), (2, (6,)), (0, (4, 5, 6))])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_normalization(axis: int, scale: tuple[int, ...], bias: bool) -> None:
    inputs = [normal(4, 5, 6), normal(*scale), normal(*scale)]
    assert_like_onnx("LayerNormalization", inputs if bias else inputs[:2], {"axis": axis}, tolerance=1e-4)


def test_layer_normalization_statistics() -> None:
    assert_like_onnx("LayerNormalization", [normal(4, 6), normal(6)], {}, outputs=3, tolerance=1e-4)


def test_layer_normalization_of_half_precision_takes_statistics_in_single() -> None:
    x = (normal(2, 4096) * 30).astype(np.float16)  # its squares overflow half precision
    y, mean, inverse = lathe_run("LayerNormalization", [x, np.ones(4096, np.float16)], {}, 3)
    assert (y.dtype, mean.dtype, inverse.dtype) == (np.float16, np.float32, np.float32)
    np.testing.assert_allclose(y.astype(np.float64).std(axis=1), 1, 1e-2)


@pytest.mark.parametrize(("axis", "scale"), [(-1, (6,)), (1, (5, 6))])
def test_rms_normalization(axis: int, scale: tuple[int, ...]) -> None:
    assert_like_onnx_reference("RMSNormalization", [normal(4, 5, 6), normal(*scale)], {"axis": axis})


@pytest.mark.parametrize("attrs", [{}, {"axes": [0, 2]}, {"axes": [-1]}])
def test_mean_variance_normalization(attrs: dict[str, Any]) -> None:
    # With two numbers along an axis, the variance of onnx.reference (a difference of means) cancels.
    assert_like_onnx_reference("MeanVarianceNormalization", [normal(3, 4, 2, 5)], attrs)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_lp_normalization(p: int, axis: int) -> None:
    x = normal(3, 4, 5)
    x[1] = 0
    x[:, 1] = 0
    assert_like_onnx("LpNormalization", [x], {"p": p, "axis": axis})


@pytest.mark.parametrize("size", [1, 3, 4, 5])
def test_local_response_normalization(size: int) -> None:
    if size % 2:  # ONNX Runtime has odd sizes only
        assert_like_onnx("LRN", [normal(2, 7, 3, 3)], {"size": size, "alpha": 0.1, "bias": 2.0})
    else:
        assert_like_onnx_reference("LRN", [normal(7, 7, 3, 3)], {"size": size, "alpha": 0.1})


def assert_like_onnx_reference(op: str, inputs: list[Any], attrs: dict[str, Any]) -> None:
    feeds = {f"x{i}": array for i, array in enumerate(inputs)}
    (expected,) = ReferenceEvaluator(one_node_model(op, inputs, attrs, opset=23)).run(None, feeds)
    (mine,) = lathe_run(op, inputs, attrs)
    np.testing.assert_allclose(mine, expected, 1e-4, 1e-5)


CASES: list[tuple[str, list[Any], dict[str, Any]]] = made_at_import(
    lambda: [
        ("BatchNormalization", [normal(3, 4, 5, 5), *channels(4)], {}),
        ("InstanceNormalization", [normal(3, 4, 5, 5), *channels(4)[:2]], {}),
        ("GroupNormalization", [normal(3, 4, 5, 5), *channels(4)[:2]], {"num_groups": 2}),
        ("LayerNormalization", [normal(3, 5, 6), normal(6)], {}),
        ("RMSNormalization", [normal(3, 5, 6), normal(6)], {}),
        ("MeanVarianceNormalization", [normal(3, 4, 2, 2)], {"axes": (2, 3)}),
        ("LpNormalization", [normal(3, 4)], {}),
        ("LRN", [normal(3, 5, 2, 2)], {"size": 3}),
    ]
)


@pytest.mark.parametrize(("op", "inputs", "attrs"), CASES, ids=[case[0] for case in CASES])
def test_rows_and_symbolic_batch(op: str, inputs: list[Any], attrs: dict[str, Any]) -> None:
    assert_rows_apart(op, inputs, attrs)
    assert_symbolic_batch(op, inputs, attrs)


@pytest.mark.parametrize(("op", "inputs", "attrs"), [case for case in CASES if "layout" in registry.get(case[0]).attrs])
def test_channels_last(op: str, inputs: list[Any], attrs: dict[str, Any]) -> None:
    (first,) = lathe_run(op, inputs, attrs)
    (last,) = lathe_run(op, [np.moveaxis(inputs[0], 1, -1), *inputs[1:]], {**attrs, "layout": "NHWC"})
    np.testing.assert_allclose(np.moveaxis(last, -1, 1), first, 1e-5, 1e-6)


@pytest.mark.parametrize(
    ("op", "inputs", "attrs"),
    made_at_import(
        lambda: [
            ("BatchNormalization", [normal(3, 4, 5), *channels(4)], {"training_mode": 1}),
            ("LayerNormalization", [normal(3, 4), normal(3, 4)], {"axis": 0}),
            ("MeanVarianceNormalization", [normal(3, 4, 2, 2)], {}),
            ("LpNormalization", [normal(3, 4)], {"axis": -2}),
        ]
    ),
)
def test_normalizing_over_the_batch_mixes_rows(op: str, inputs: list[Any], attrs: dict[str, Any]) -> None:
    rule, node = registry.get(op), make_node(op, inputs, attrs)
    rows = rule.rows(registry.Infer(rule, node, {}), [0] + [None] * (len(inputs) - 1))
    assert isinstance(rows, registry.MixesRows)


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "message"),
    made_at_import(
        lambda: [
            ("BatchNormalization", [normal(2, 3, 4), *channels(4)], {}, "scale is float32\\[4\\], expected \\[3\\]"),
            (
                "GroupNormalization",
                [normal(2, 4, 4), *channels(4)[:2]],
                {"num_groups": 3},
                "num_groups is 3, expected a divisor",
            ),
            (
                "LayerNormalization",
                [normal(2, 6), normal(5)],
                {},
                "Scale is float32\\[5\\], expected a shape that broadcasts",
            ),
            ("LayerNormalization", [normal(2, 6), normal(6)], {"axis": 2}, "axis 2 is out of range for rank 2"),
            ("LpNormalization", [normal(2, 6)], {"p": 3}, "p is 3, expected 1 or 2"),
            ("LRN", [normal(2, 6)], {"size": 0}, "size is 0"),
        ]
    ),
)
def test_invalid_shapes_are_refused(op: str, inputs: list[Any], attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        lathe_run(op, inputs, attrs)
