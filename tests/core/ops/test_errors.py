"""Errors of operators in type inference and at run time name the node, what was expected and what was given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe.core.errors import FeedError, ModelError, UnsupportedError
from lathe.core.ir.dim import symbol
from lathe.core.ops.opdef import registry
from tests.core.ops.cases import F16, F32, I64, bools, case, floats, ints, scalar, vector
from tests.core.ops.harness import graph_of, run, run_lathe

ILL_TYPED = [
    (case("Add", floats(3), ints(3)), "one element type, got A: float32, B: int64"),
    (case("Add", floats(3), floats(4)), "shapes [3] and [4] do not broadcast"),
    (case("Add", floats(3)), "has 1 inputs, expected 2"),
    (case("Sum"), "has no inputs, expected at least 1"),
    (case("Sqrt", ints(3)), "input 0 (X) is int64, expected a floating-point type"),
    (case("And", ints(3), ints(3)), "input 0 (A) is int64, expected bool"),
    (case("Where", floats(3), floats(3), floats(3)), "input 0 (condition) is float32, expected bool"),
    (case("Gelu", floats(3), approximate="sigmoid"), "'approximate' is 'sigmoid', expected 'none' or 'tanh'"),
    (case("BitShift", ints(3), ints(3), direction="UP"), "'direction' is 'UP', expected 'LEFT' or 'RIGHT'"),
    (case("Cast", floats(3)), "attribute 'to' is required"),
    (case("Clip", floats(3), floats(2)), "min is float32[2], expected a scalar"),
    (case("PRelu", floats(3), floats(2, 3)), "slope float32[2,3] does not broadcast to X float32[3]"),
    (case("MatMul", floats(2, 3), floats(4, 5)), "inner extents 3 and 4 differ"),
    (case("MatMul", scalar(1.0), floats(4, 5)), "expected rank 1 or more"),
    (
        case("Gemm", floats(2, 3), floats(3, 5), floats(1, 2, 5)),
        "C is float32[1,2,5], which does not broadcast to [2,5]",
    ),
    (case("Gemm", floats(2, 3, 1), floats(3, 5)), "A is float32[2,3,1], expected rank 2"),
    (
        case("Einsum", floats(2, 3), floats(4, 5), equation="ij,jk"),
        "axis 'j' of equation 'ij,jk' is 3 in one input and 4",
    ),
    (case("Einsum", equation="ij->ji"), "has no inputs, expected at least 1"),
    (case("Einsum", floats(2, 3), equation="ijk->i"), "has a term 'ijk' for a tensor of rank 2"),
    (case("Einsum", floats(2, 3), equation="ij,jk"), "has 2 terms for 1 inputs"),
    (case("Einsum", floats(2, 3), equation="ij->k"), "names an axis of the output that no input has"),
    (case("Softmax", floats(2, 3), axis=2), "axis 2 is out of range for rank 2"),
    (case("Unsqueeze", floats(2, 3), vector(0, -4)), "axes [0, 0] name an axis twice"),
    (
        case("Col2Im", floats(1, 4, 5), vector(3, 3), vector(0, 2)),
        "block_shape is [0, 2], expected numbers of at least 1",
    ),
    (case("ArgMax", floats(2, 0), axis=1), "is empty, expected at least one element"),
    (case("TopK", floats(2, 3), vector(4), outputs=2), "K is 4, expected 0 to 3"),
    (case("Reshape", floats(2, 3), vector(4, 2)), "cannot give 6 elements of shape [2,3] the shape [4,2]"),
    (case("Reshape", floats(2, 3), vector(4, -1)), "cannot give 6 elements of shape [2,3] the shape [4,-1]"),
    (case("Reshape", floats(2, 3), vector(-1, -1)), "at most one -1"),
    (case("Reshape", floats(2, 3), vector(1, 1, 0)), "copies extent 2 of an input of rank 2"),
    (case("Squeeze", floats(2, 3), vector(1)), "its extent is 3, expected 1"),
    (case("STFT", floats(1, 8, 1), scalar(4, I64), floats(16)), "a frame has 16 samples, expected 1 to the 8 of the"),
    (case("STFT", floats(1, 8, 1), scalar(4, I64), None, scalar(-4, I64)), "a frame has -4 samples, expected 1 to"),
    (case("Transpose", floats(2, 3), perm=[0, 0]), "perm is [0, 0], expected a permutation of 0..1"),
    (case("Concat", floats(2, 3), floats(2, 4), axis=0), "must agree except along axis 0, got [2,3], [2,4]"),
    (case("Concat", floats(2, 3), floats(2), axis=0), "must have one rank, got [2,3], [2]"),
    (case("Split", floats(4), vector(1, 2), outputs=2), "split is [1,2], which sums to 3, expected 4"),
    (case("Split", floats(4), num_outputs=3, outputs=2), "num_outputs is 3, but the node has 2 outputs"),
    (case("Slice", floats(4), vector(0), vector(4), vector(0), vector(0)), "a step is 0"),
    (case("Slice", floats(4), vector(0), vector(4, 5)), "have 1, 2, 1 and 1 elements"),
    (case("Slice", floats(4), vector(0), floats(1)), "input 2 (ends) is float32, expected int32 or int64"),
    (case("Pad", floats(4), vector(1)), "pads has 1 elements, expected 2"),
    (case("Pad", floats(4), vector(-3, -3)), "crop more elements than"),
    (
        case("Pad", floats(4), vector(1, 1), mode="mirror"),
        "'mode' is 'mirror', expected constant, reflect, edge or wrap",
    ),
    (case("Tile", floats(4), vector(2, 2)), "repeats is [2,2], expected 1 numbers"),
    (case("DepthToSpace", floats(1, 6, 2, 2), blocksize=2), "an extent of 6 is not a multiple of 4"),
    (case("DepthToSpace", floats(1, 8, 2, 2), blocksize=2, mode="X"), "'mode' is 'X', expected 'DCR' or 'CRD'"),
    (case("ConstantOfShape", vector(-2)), "shape is [-2], expected extents of 0 or more"),
    (case("Constant"), "has 0 value attributes, expected 1"),
    (case("Gather", floats(3), floats(2)), "input 1 (indices) is float32, expected int32 or int64"),
    (case("GatherElements", floats(3), ints(2, 3)), "expected one rank"),
    (case("GatherND", floats(3), ints(2, 2)), "the indices reach past data's rank"),
    (case("ScatterND", floats(3, 4), ints(2, 1), floats(2, 3)), "updates are float32[2,3], expected [2,4]"),
    (case("ScatterElements", floats(3), ints(2), floats(2), reduction="mean"), "'reduction' is 'mean'"),
    (case("OneHot", ints(3), scalar(4, I64), floats(3)), "values is float32[3], expected [2]"),
    (case("QuantizeLinear", floats(3, 4), floats(3)), "the scale has 3 elements, axis 1 of the input 4"),
    (case("DequantizeLinear", ints(3, dtype=np.int8), scalar(0.5), scalar(1, np.uint8)), "x_zero_point is uint8"),
    (case("LSTM", floats(5, 2, 3), floats(1, 8, 3), floats(1, 8, 4)), "W is float32[1,8,3], expected [1,16,3]"),
    (case("GRU", floats(5, 2, 3), floats(1, 6, 3), floats(1, 6, 2), activations=("Tanh",)), "has 1 activations"),
    (case("GridSample", floats(1, 2, 3, 4), floats(1, 5, 5, 3)), "grid is float32[1,5,5,3], expected [1,O1,O2,2]"),
    (case("Adagrad", scalar(0.1), scalar(0, I64), floats(3), floats(1), floats(3)), "is float32[1], expected [3]"),
    (case("Multinomial", floats(2, 0)), "input is float32[2,0], expected rank 2 and at least one class"),
    (case("RandomNormal", shape=(2, -1)), "shape is [2, -1], expected extents of 0 or more"),
    (case("FeatureVectorizer"), "inputdimensions is [], expected a size for each of the 0 inputs, at least one"),
    (
        case(
            "Momentum",
            scalar(0.1),
            scalar(0, I64),
            *[floats(2)] * 3,
            mode="fast",
            alpha=0.9,
            beta=1.0,
            norm_coefficient=0.0,
        ),
        "mode is 'fast', expected standard or nesterov",
    ),
    (case("Resize", floats(1, 1, 2, 2), None, vector(1, 1, 2.0**21, 1, dtype=F32)), "above 0, at most 1048576"),
    (case("GlobalLpPool", floats(1, 2, 3), p=0), "p is 0, expected at least 1"),
    (
        case("ConvTranspose", floats(1, 2, 3), floats(2, 2, 2), output_padding=[0, 0]),
        "output_padding is [0, 0], expected",
    ),
    (case("FusedConv", floats(1, 2, 3, 3), floats(2, 2, 1, 1), pad_value=1), "pad_value is 1 for float32, expected 0"),
    (case("FusedConv", floats(1, 2, 3, 3, dtype=F16), floats(2, 2, 1, 1, dtype=F16), pad_value=1), "pad_value is 1"),
    (case("BitCast", floats(3), to=11), "expected an element type as wide as float64"),
]


@pytest.mark.parametrize(("wrong", "message"), ILL_TYPED, ids=[wrong.label for wrong, _ in ILL_TYPED])
def test_ill_typed_nodes_are_refused_by_inference(wrong: Any, message: str) -> None:
    with pytest.raises(ModelError) as error:
        graph_of(wrong)
    assert message in str(error.value)
    assert f"node '{wrong.label}' ({wrong.op})" in error.value.where


WRONG_DATA = [
    (case("Gather", floats(3), vector(0, 3)), "index 3 is out of range for axis 0 of extent 3"),
    (case("Gather", floats(2, 3), vector(-4), axis=1), "index -4 is out of range for axis 1 of extent 3"),
    (case("GatherElements", floats(2, 3), vector([0, 2, 0])), "index 2 is out of range for axis 0 of extent 2"),
    (case("GatherND", floats(2, 3), vector([0, 3])), "index 3 is out of range for axis 1 of extent 3"),
    (case("ScatterElements", floats(3), vector(5), floats(1)), "index 5 is out of range"),
    (case("ScatterND", floats(3), vector([-4]), floats(1)), "index -4 is out of range for axis 0 of extent 3"),
    (case("Range", scalar(0, I64), scalar(3, I64), scalar(0, I64)), "delta is 0"),
    (case("Range", scalar(0), scalar(np.inf), scalar(1)), "are 0.0, inf and 1.0, expected finite numbers"),
    (case("Compress", floats(3), bools(5)), "condition has 5 elements, expected at most 3"),
    (case("ReverseSequence", floats(3, 2), vector(4, 1)), "sequence_lens has 1 to 4, expected 0 to 3"),
    (case("Cast", np.array(["x"], object), to=7), "cannot cast to int64"),
    (case("RoiAlign", floats(1, 1, 4, 4), floats(1, 4), vector(0), sampling_ratio=5000), "takes 5000 samples"),
    (case("RoiAlign", floats(1, 1, 4, 4), floats(1, 4), vector(1)), "a batch index lies outside the 1 images"),
    (case("TensorScatter", floats(1, 3, 2), floats(1, 2, 2), vector(2)), "writes at 2 to 3, the cache has 3 positions"),
    (case("MaxUnpool", floats(1, 1, 2), vector([[0, 9]]), kernel_shape=(2,)), "outside the 3 elements"),
    (case("Col2Im", floats(1, 4, 5), vector(3, 3), vector(2, 2)), "input has 5 windows, the image 4"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG_DATA, ids=[wrong.label for wrong, _ in WRONG_DATA])
def test_wrong_data_is_refused_at_run_time(wrong: Any, message: str) -> None:
    with pytest.raises(FeedError) as error:
        run_lathe(wrong)
    assert message in str(error.value)
    assert f"({wrong.op})" in str(error.value)


def test_an_unknown_operator_is_unsupported() -> None:
    with pytest.raises(UnsupportedError, match="operator Frobnicate is not implemented"):
        registry.get("Frobnicate")


def test_an_operator_is_registered_once() -> None:
    with pytest.raises(ValueError, match="operator Add is registered twice"):
        registry.register(type("Add", (registry.OpDef,), {}))


def test_a_wrong_dynamic_shape_is_refused_at_run_time() -> None:
    """The extents are symbols at compile time; only the data shows that they do not fit."""
    graph = graph_of(case("Reshape", floats(4, 3), vector(2, 6)), {0: (symbol("n"), 3)})
    assert graph.outputs[0].shape == (2, 6)
    assert run(graph, (floats(4, 3),))[0].shape == (2, 6)
    with pytest.raises(FeedError, match=r"cannot give 15 elements of shape \[5,3\] the shape \[2,6\]"):
        run(graph, (np.zeros((5, 3), F32),))
