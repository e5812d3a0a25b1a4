"""Operators with symbolic extents: they run if the extents agree, and raise an error if they do not.

A symbol may be the batch, any other one, or one that only data show (here: of what Compress keeps of a longer input).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import lathe
from lathe.core.errors import LatheError
from tests.core.one_node import one_node_model
from tests.core.small_models import assert_like_onnx_runtime, model, normal, theirs


@dataclass(frozen=True)
class Sized:
    """An operator whose input number `index` has an extent along `axis` that the other inputs determine."""

    op: str
    inputs: Sequence[Any]  # None: absent
    index: int  # number of the input
    axis: int = 0
    attrs: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 22
    name: str = ""  # the name of the input in error messages
    wrong: Sequence[int] = (1, 5)  # NumPy would broadcast 1; with 5 a kernel would read beyond other operands

    @property
    def label(self) -> str:
        return f"{self.op}-{self.name}"

    def fed(self, extent: int | None = None) -> dict[str, Any]:
        """The inputs by name; if `extent` is given, input `index` is repeated or cut to it."""
        arrays = list(self.inputs)
        if extent is not None:
            places = np.arange(extent) % arrays[self.index].shape[self.axis]
            arrays[self.index] = np.take(arrays[self.index], places, self.axis)
        return {f"x{i}": array for i, array in enumerate(arrays) if array is not None}

    def model(self, symbol: str, constant: bool = False) -> onnx.ModelProto:
        """A model of the operator alone, in which the extent is a symbol.

        `constant`: all inputs but the first and the `index`-th are constants, for passes and kernels that need those.
        """
        made = one_node_model(self.op, self.inputs, self.attrs, opset=self.opset)
        self.port(made).type.tensor_type.shape.dim[self.axis].dim_param = symbol
        for i, array in enumerate(self.inputs):
            if constant and array is not None and i not in (0, self.index):
                made.graph.initializer.append(onnx.numpy_helper.from_array(array, f"x{i}"))
        kept = [value for value in made.graph.input if value.name not in {each.name for each in made.graph.initializer}]
        del made.graph.input[:]
        made.graph.input.extend(kept)
        return made

    def port(self, made: onnx.ModelProto) -> Any:
        return next(value for value in made.graph.input if value.name == f"x{self.index}")


def _floats(*shape: int) -> Any:
    return normal(*shape, seed=len(shape))


def _bytes(*shape: int) -> Any:
    return (np.arange(np.prod(shape)) % 100).astype(np.uint8).reshape(shape)


IMAGES, POINT, SCALE = _floats(3, 4, 5, 5), np.array(3, np.uint8), np.array(0.1, np.float32)
POSITIVE = np.abs(_floats(4)) + 1
QUANTIZED = [_bytes(3, 4, 5, 5), SCALE, POINT, _bytes(4, 4, 3, 3), np.full(4, SCALE), np.full(4, POINT), SCALE, POINT]
LSTM = [_floats(6, 3, 2), _floats(1, 16, 2), _floats(1, 16, 4), _floats(1, 32)]

SIZED = [
    Sized("Conv", [IMAGES, _floats(4, 4, 3, 3), _floats(4)], 2, name="B"),
    Sized("Conv", [IMAGES, _floats(4, 4, 3, 3)], 1, 1, name="W"),
    Sized("Conv", [IMAGES, _floats(4, 4, 3, 3)], 1, 3, {"kernel_shape": [3, 3]}, name="kernel_shape"),
    Sized("ConvTranspose", [IMAGES, _floats(4, 4, 3, 3), _floats(4)], 2, name="B"),
    Sized("ConvTranspose", [IMAGES, _floats(4, 4, 3, 3)], 1, 2, {"kernel_shape": [3, 3]}, name="kernel_shape"),
    Sized("ConvInteger", [_bytes(3, 4, 5, 5), _bytes(4, 4, 3, 3), POINT], 1, 1, opset=10, name="W"),
    Sized("QLinearConv", [*QUANTIZED, np.arange(4, dtype=np.int32)], 8, opset=10, name="B"),
    Sized("DequantizeLinear", [_bytes(3, 4), POSITIVE], 1, attrs={"axis": 1}, name="the scale", wrong=(3, 5)),
    Sized("BatchNormalization", [IMAGES, *[_floats(4)] * 3, POSITIVE], 4, opset=15, name="input_var"),
    Sized("InstanceNormalization", [IMAGES, _floats(4), _floats(4)], 1, name="scale"),
    Sized("GroupNormalization", [IMAGES, _floats(4), _floats(4)], 2, 0, {"num_groups": 2}, 21, "bias"),
    Sized("LSTM", LSTM, 2, 2, {"hidden_size": 4}, name="hidden_size"),
    Sized("LSTM", LSTM, 3, 1, {"hidden_size": 4}, name="B"),
    Sized("LSTM", [*LSTM, None, _floats(1, 3, 4), _floats(1, 3, 4)], 5, 1, {"hidden_size": 4}, name="initial_h"),
    Sized("GRU", [_floats(6, 3, 2), _floats(1, 12, 2), _floats(1, 12, 4)], 1, 1, {"hidden_size": 4}, name="W"),
    Sized("OneHot", [np.array([1, 0, 3]), np.array(4), _floats(2)], 2, name="values"),
    Sized("GridSample", [IMAGES, _floats(3, 4, 4, 2)], 1, 3, name="grid"),
    Sized("RoiAlign", [IMAGES, np.abs(_floats(2, 4)), np.array([0, 2])], 1, 1, opset=16, name="rois"),
    Sized("MaxRoiPool", [IMAGES, np.abs(_floats(2, 5))], 1, 1, {"pooled_shape": [2, 2]}, 21, "rois", wrong=(4, 6)),
    Sized("NonMaxSuppression", [_floats(2, 6, 4), _floats(2, 3, 6), np.array(2)], 0, 2, name="boxes"),
    Sized("LayerNormalization", [IMAGES, _floats(5)], 1, name="Scale", wrong=(2, 6)),
    Sized("DFT", [_floats(3, 4, 2)], 0, 2, opset=17, attrs={"axis": 1}, name="input", wrong=(3,)),
    Sized("ReverseSequence", [_floats(6, 3), np.array([2, 6, 4])], 1, name="sequence_lens"),
    Sized("TensorScatter", [_floats(3, 6, 4), _floats(3, 2, 4)], 1, 2, {"axis": 1}, 24, "update"),
    Sized("ScatterND", [_floats(5, 4), np.array([[3], [1]]), _floats(2, 4)], 2, 1, name="updates"),
]
WRONG = [pytest.param(sized, wrong, id=f"{sized.label}-{wrong}") for sized in SIZED for wrong in sized.wrong]


@pytest.mark.sample(5)
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("sized", SIZED, ids=lambda sized: sized.label)
def test_an_extent_that_is_a_symbol_may_be_the_right_one(sized: Sized, constant: bool) -> None:
    made = sized.model("M", constant)
    assert_like_onnx_runtime(made.SerializeToString(), _given(made, sized.fed()), tolerance=1e-3)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize(("sized", "wrong"), WRONG)
def test_a_wrong_extent_of_the_batch_symbol_is_refused(sized: Sized, wrong: int, constant: bool) -> None:
    """No kernel may assume that the batch size equals the required extent."""
    made = sized.model("N", constant)
    with lathe.compile(made.SerializeToString(), tune="off") as session:
        with pytest.raises(LatheError, match=rf"{sized.name} (is|are|has|expects)|W expects"):
            session.run(_given(made, sized.fed(wrong)))
        session.run(_given(made, sized.fed()))


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize(("sized", "wrong"), WRONG)
def test_a_wrong_data_dependent_extent_is_refused(sized: Sized, wrong: int, constant: bool) -> None:
    made = _computed(sized, constant)
    data, whole = made.SerializeToString(), _given(made, sized.fed(40))
    right = sized.inputs[sized.index].shape[sized.axis]
    with lathe.compile(data, tune="off") as session:
        got = session.run({**whole, "keep": np.arange(40) < right})
        for name, array in theirs(data, {**whole, "keep": np.arange(40) < right}).items():
            np.testing.assert_allclose(got[name], array, 1e-3, 1e-3)
        with pytest.raises(LatheError, match=rf"{sized.name} (is|are|has|expects)|W expects"):
            session.run({**whole, "keep": np.arange(40) < wrong})


def _given(made: onnx.ModelProto, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """The feeds that are inputs of the model."""
    return {value.name: feeds[value.name] for value in made.graph.input if value.name in feeds}


def _computed(sized: Sized, constant: bool) -> onnx.ModelProto:
    """The model with a Compress, by `keep`, of the input along the axis."""
    made = sized.model("L", constant)
    port, node = sized.port(made), made.graph.node[0]
    made.graph.node.insert(0, helper.make_node("Compress", [port.name, "keep"], ["kept"], axis=sized.axis))
    made.graph.node[1].input[:] = ["kept" if name == port.name else name for name in node.input]
    made.graph.input.append(helper.make_tensor_value_info("keep", onnx.TensorProto.BOOL, ["L"]))
    return made


@pytest.mark.parametrize("scale", ["float[M] s", "float s"])
def test_a_vector_of_one_zero_point_needs_no_axis(scale: str) -> None:
    data = model(f"float[N] x, {scale}, uint8[M] z => uint8[N] y", "y = QuantizeLinear (x, s, z)", opset=19)
    number = np.full([1] if "[" in scale else [], 0.1, np.float32)
    assert_like_onnx_runtime(data, {"x": normal(5), "s": number, "z": np.array([3], np.uint8)})


KERNELS = [
    ("float[2,4,5,6] x, float[4,4,N,M] w => float[2,4,h,v] y", "y = Conv <pads = [1,0,0,1]> (x, w)"),
    ("float[2,4,5,6] x, float[4,4,N,N] w => float[2,4,h,v] y", 'y = Conv <auto_pad = "SAME_UPPER"> (x, w)'),
    ("float[2,4,5,6] x, float[4,2,N,M] w => float[2,2,h,v] y", "y = ConvTranspose <strides = [2,1]> (x, w)"),
    ("uint8[2,4,5,6] x, uint8[4,4,N,M] w => int32[2,4,h,v] y", "y = ConvInteger (x, w)"),
]


@pytest.mark.parametrize(("signature", "body"), KERNELS)
def test_kernels_with_dynamic_extents(signature: str, body: str) -> None:
    dtype = np.uint8 if signature.startswith("uint8") else np.float32
    channels = 2 if "Transpose" in body else 4
    x = (np.abs(_floats(2, 4, 5, 6)) * 20).astype(dtype)
    kernels = [(np.abs(_floats(4, channels, size, size)) * 20).astype(dtype) for size in (3, 2, 1)]
    assert_like_onnx_runtime(model(signature, body), *({"x": x, "w": w} for w in kernels))


def test_a_kernel_that_does_not_fit_is_refused() -> None:
    signature, body = KERNELS[0]
    with lathe.compile(model(signature, body), tune="off") as session, pytest.raises(LatheError, match="larger than"):
        session.run({"x": _floats(2, 4, 5, 6), "w": _floats(4, 4, 9, 9)})


HEADS = "h = Shape <start = 0, end = 2> (x)  four = Concat <axis = 0> (h, rest)  y = Reshape (z, four)"


def test_an_extent_that_is_a_quotient_of_the_batch() -> None:
    """The elements of z per row of x are known only at run time; for an empty x they are undefined."""
    data = model("float[N,M] x, float[A,B] z => float[a,b,c,d] y", HEADS, "int64[2] rest = {3, -1}")
    assert_like_onnx_runtime(data, {"x": normal(2, 5), "z": normal(10, 12)}, {"x": normal(1, 2), "z": normal(4, 6)})
    with lathe.compile(data, tune="off") as session, pytest.raises(LatheError, match="Reshape"):
        session.run({"x": normal(0, 5), "z": normal(10, 12)})


def test_group_normalization_of_an_old_opset_with_any_channels() -> None:
    body = "y = GroupNormalization <num_groups = 2> (x, scale, bias)"
    data = model("float[N,C,5] x, float[2] scale, float[2] bias => float[N,C,5] y", body)
    feeds = {"x": normal(3, 4, 5), "scale": normal(2), "bias": normal(2, seed=1)}
    assert_like_onnx_runtime(data, feeds)
