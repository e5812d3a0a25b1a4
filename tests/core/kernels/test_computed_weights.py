"""Convolutions with computed weights, for known and dynamic image sizes, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

import lathe
from tests.core.small_models import assert_like_onnx_runtime, model, normal

# Shape of the image, shape of the weights, attributes.
CASES = [
    ((2, 6, 9), (4, 6, 3), ""),
    ((1, 6, 9), (4, 3, 3), "group = 2, pads = [2, 1], strides = [2]"),
    ((2, 3, 9, 7), (5, 3, 1, 1), ""),
    ((2, 3, 9, 7), (5, 3, 3, 3), "pads = [1, 1, 1, 1]"),
    ((1, 3, 10, 7), (5, 3, 3, 2), "strides = [2, 3], dilations = [2, 1], pads = [0, 1, 2, 0]"),
    ((2, 4, 8, 8), (6, 2, 3, 3), "group = 2, strides = [2, 2]"),
    ((2, 5, 9, 7), (5, 1, 3, 3), "group = 5, pads = [1, 1, 1, 1]"),
    ((1, 5, 9, 7), (5, 1, 5, 2), "group = 5, strides = [2, 1], dilations = [1, 2]"),
    ((1, 5, 9, 7), (10, 1, 3, 3), "group = 5"),
    ((1, 3, 12, 12), (3, 1, 8, 8), "group = 3"),
    ((1, 2, 5, 4, 6), (3, 2, 2, 3, 2), "pads = [0, 1, 0, 1, 1, 1]"),
]


@pytest.mark.sample(16)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("image", "weights", "attrs"), CASES, ids=str)
def test_computed_weights(
    image: tuple[int, ...], weights: tuple[int, ...], attrs: str, known: bool, bias: bool
) -> None:
    sizes = image[2:] if known else [f"S{axis}" for axis in range(len(image) - 2)]
    extents = [",".join(map(str, shape)) for shape in ((image[1], *sizes), weights)]
    given = f"float[N,{extents[0]}] x, float[{extents[1]}] w, float[{weights[0]}] b"
    body = f"v = Tanh (w)  y = Conv {f'<{attrs}>' if attrs else ''} (x, v{', b' if bias else ''})"
    data = model(f"{given} => float[] y" if bias else f"{given.rpartition(',')[0]} => float[] y", body)
    feeds = {"x": normal(*image), "w": normal(*weights, seed=1)} | ({"b": normal(weights[0], seed=2)} if bias else {})
    larger = {**feeds, "x": normal(3, image[1], *image[2:] if known else (size + 3 for size in image[2:]), seed=3)}
    assert_like_onnx_runtime(data, feeds, larger)
    with lathe.compile(data, threads=1, tune="off") as session:
        session.run(feeds)
        assert "FALLBACK" not in session.explain()
        nothing = session.run({**feeds, "x": feeds["x"][:0]})["y"]
        assert nothing.shape == (0, *session.run(feeds)["y"].shape[1:])


@pytest.mark.sample(2, native=True)
@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
def test_padding_that_follows_from_the_size(mode: str) -> None:
    body = f'y = Conv <auto_pad = "{mode}", strides = [2, 2]> (x, w)'
    for sizes in ("9,8", "H,W"):
        data = model(f"float[N,3,{sizes}] x, float[4,3,3,3] w => float[] y", body)
        assert_like_onnx_runtime(data, {"x": normal(2, 3, 9, 8), "w": normal(4, 3, 3, 3, seed=1)})


def test_weights_of_dynamic_shape_run_on_the_reference() -> None:
    data = model("float[N,C,H,W] x, float[M,C,3,3] w => float[] y", "y = Conv (x, w)")
    assert_like_onnx_runtime(data, {"x": normal(2, 3, 9, 8), "w": normal(4, 3, 3, 3, seed=1)})


@pytest.mark.parametrize("kind", ["double", "float16"])
def test_other_floats(kind: str) -> None:
    data = model(f"{kind}[N,3,9,8] x, {kind}[4,3,3,3] w => {kind}[] y", "y = Conv (x, w)")
    dtype = {"double": np.float64, "float16": np.float16}[kind]
    feeds = {"x": normal(2, 3, 9, 8).astype(dtype), "w": normal(4, 3, 3, 3, seed=1).astype(dtype)}
    with lathe.compile(data, threads=1, tune="off") as session:
        found = session.run(feeds)["y"]
        assert "FALLBACK" not in session.explain()
    expected = lathe.interpret(lathe.load(data), feeds)["y"]
    np.testing.assert_allclose(
        found.astype(np.float64), expected.astype(np.float64), 1e-2 if kind == "float16" else 1e-9, 1e-2
    )
