"""Edge cases that the ONNX standard permits agree with ONNX Runtime; those that it forbids are refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import lathe
from lathe.core.errors import FeedError, ModelError
from lathe.core.reference import interpret
from tests.core.small_models import assert_like_onnx_runtime, model, normal, theirs, untyped
from tests.onnx_runtime import REFUSALS

SIZES = (1, 2, 3, 4)
PADS = ("0, 0, 0, 0", "1, 0, 1, 0", "0, 0, 1, 0")


def pooling(op: str, window: int, stride: int, pads: str, ceil: int) -> bytes:
    attributes = f"kernel_shape = [{window}, 1], strides = [{stride}, 1], pads = [{pads}], ceil_mode = {ceil}"
    return model("float[1,1,n,m] x => float[1,1,a,b] y", f"y = {op} <{attributes}> (x)", opset=22)


@pytest.mark.sample(3)
@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
def test_ceil_mode_counts_a_window_beyond_the_padded_image(op: str, pads: str) -> None:
    for window, stride in itertools.product((2, 3, 5), (1, 2, 3, 4)):
        data = pooling(op, window, stride, pads, ceil=1)
        for size in SIZES:
            feeds = {"x": normal(1, 1, size, 2)}
            try:
                want = theirs(data, feeds)["y"]
            except REFUSALS:
                with (
                    lathe.compile(data, tune="off") as session,
                    pytest.raises(FeedError, match="is larger than spatial"),
                ):
                    session.run(feeds)
                continue
            assert_like_onnx_runtime(data, feeds)
            np.testing.assert_allclose(interpret(lathe.load(data), feeds)["y"], want, 1e-5)


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
def test_an_image_one_stride_too_small_has_no_windows(op: str) -> None:
    for window, stride in ((2, 1), (3, 2), (5, 3)):
        data = pooling(op, window, stride, PADS[0], ceil=0)
        assert_like_onnx_runtime(data, {"x": normal(1, 1, window - stride, 2)}, {"x": normal(1, 1, window, 2)})


def test_no_window_is_made_up_where_the_formula_gives_none() -> None:
    """floor((2 - 3) / 2 + 1) is 0. ONNX Runtime truncates the quotient, so it has a window beyond the image."""
    data, feeds = pooling("MaxPool", 3, 2, PADS[0], ceil=0), {"x": normal(1, 1, 2, 2)}
    assert theirs(data, feeds)["y"].shape == (1, 1, 1, 2)
    with lathe.compile(data, tune="off") as session, pytest.raises(FeedError, match="window of extent 3 is larger"):
        session.run(feeds)
    with pytest.raises(FeedError, match="window of extent 3 is larger"):
        interpret(lathe.load(data), feeds)


def check_axes(body: str, axes: tuple[int, ...], *shape: int) -> None:
    """Check a model with constant axes, and with axes that are fed."""
    x, count = normal(*shape), len(axes)
    signature = f"float[n,{','.join(map(str, shape[1:]))}] x"
    constant = model(f"{signature} => float y", body, f"int64[{count}] axes = {{{', '.join(map(str, axes))}}}")
    assert_like_onnx_runtime(untyped(constant), {"x": x})
    fed = model(f"{signature}, int64[{count}] axes => float y", body)
    assert_like_onnx_runtime(untyped(fed), {"x": x, "axes": np.array(axes)})


@pytest.mark.sample(5)
@pytest.mark.parametrize("axes", [(1, 1), (1, -2), (2, -1, 1, 2)])
@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceProd", "ReduceL2", "ReduceLogSumExp"])
def test_an_axis_that_is_named_twice_is_reduced_once(op: str, axes: tuple[int, ...]) -> None:
    for keep in (0, 1):
        check_axes(f"y = {op} <keepdims = {keep}> (x, axes)", axes, 2, 3, 4)


@pytest.mark.parametrize("axes", [(1, 1), (1, -2)])
def test_an_axis_that_is_named_twice_is_squeezed_once(axes: tuple[int, ...]) -> None:
    check_axes("y = Squeeze(x, axes)", axes, 2, 1, 4)


TWICE = {
    "Unsqueeze": ("y = Unsqueeze(x, twice)", ""),
    "Slice": ("y = Slice(x, twice, ends, twice)", "int64[2] ends = {2, 3}"),
    "Pad": ("y = Pad(x, pads, , twice)", "int64[4] pads = {1, 1, 0, 0}"),
    "Resize": ("y = Resize <axes = [1, 1]> (x, , scales)", "float[2] scales = {2.0, 2.0}"),
}


@pytest.mark.parametrize("op", TWICE)
def test_no_axis_is_named_twice_where_its_places_differ(op: str) -> None:
    body, more = TWICE[op]
    data = model("float[4,4] x => float[a,b] y", body, f"int64[2] twice = {{1, 1}}{', ' if more else ''}{more}")
    with pytest.raises(REFUSALS, match="referred to more than once"):
        theirs(data, {"x": normal(4, 4)})
    with pytest.raises(ModelError, match="name an axis twice"):
        lathe.load(data)
