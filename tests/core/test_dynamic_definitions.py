"""Fourier transforms, triangles, transposed convolutions and `auto_pad` with dynamic extents.

They are compared with ONNX Runtime, and transforms with NumPy's FFT.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.ops.tensor.signal import MOST_WORK
from tests.core.small_models import model, normal, theirs, untyped

CONSTANTS = "int64 one = {1}, int64 k = {2}, int64 back = {-1}, int64 step = {3}, int64 seven = {7}, int64[1] two = {2}"
LENGTHS = (5, 1, 2, 8, 9, 33, 64)


def answers(data: bytes, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """The outputs of dynamic-shape code that has run another length before."""
    with lathe.compile(lathe.load(data), tune="off", threads=1) as session:
        assert session.description.any_size and not session.description.in_parts
        session.run({name: array[:, :2] if array.ndim > 1 else array for name, array in feeds.items()})
        return dict(session.run(feeds))


@pytest.mark.sample(2)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("parts", [1, 2])
def test_transforms_along_a_size(length: int, parts: int) -> None:
    body = "y = DFT(x, , one) z = DFT <inverse = 1> (x, , one) w = DFT(x, seven, one)"
    data = untyped(model(f"float[b,s,3,{parts}] x => float[a] y, float[a] z, float[a] w", body, CONSTANTS, opset=20))
    x = normal(2, length, 3, parts)
    signal = x[..., 0] + (1j * x[..., 1] if parts == 2 else 0)
    got = answers(data, {"x": x})
    for name, want in (
        ("y", np.fft.fft(signal, axis=1)),
        ("z", np.fft.ifft(signal, axis=1)),
        ("w", np.fft.fft(signal, 7, 1)),
    ):
        np.testing.assert_allclose(
            got[name], np.stack([want.real, want.imag], -1), 2e-5, 2e-5 * max(length, 7), err_msg=name
        )


@pytest.mark.sample(3)
@pytest.mark.parametrize("length", LENGTHS[2:])
def test_half_a_spectrum(length: int) -> None:
    body = "y = DFT <onesided = 1> (x, , one) z = DFT <onesided = 1, inverse = 1> (h, , one)"
    data = untyped(model("float[b,s,1] x, float[b,t,2] h => float[a] y, float[a] z", body, CONSTANTS, opset=20))
    x = normal(2, length, 1)
    half = np.fft.rfft(normal(2, 2 * length - 2, seed=1))
    got = answers(data, {"x": x, "h": np.stack([half.real, half.imag], -1).astype(np.float32)})
    spectrum = np.fft.rfft(x[..., 0])
    np.testing.assert_allclose(got["y"], np.stack([spectrum.real, spectrum.imag], -1), 2e-5, 2e-5 * length)
    np.testing.assert_allclose(got["z"][..., 0], np.fft.irfft(half), 2e-5, 2e-5)


@pytest.mark.parametrize("new_shapes", ["default", "wait"])
def test_long_transforms_use_the_fft(new_shapes: Any) -> None:
    """By default the references run at once; with "wait" specialised code runs."""
    data = untyped(model("float[b,s,1] x => float[a] y", "t = DFT(x, , one) y = Mul(t, t)", CONSTANTS, opset=20))
    x = normal(1, MOST_WORK + 7, 1)
    want = np.fft.fft(x[..., 0])
    with lathe.compile(lathe.load(data), tune="off", threads=1, new_shapes=new_shapes) as session:
        session.run({"x": normal(1, 5, 1)})
        got = session.run({"x": x})["y"]
        assert len(session._shapes.cached_runners()) == (1 if new_shapes == "wait" else 0)
    np.testing.assert_allclose(got, np.stack([want.real, want.imag], -1) ** 2, 1e-4, 1e-2)


@pytest.mark.parametrize("length", [7, 8, 20, 99])
def test_frames_of_a_signal(length: int) -> None:
    body = "y = STFT <onesided = 1> (x, step, , seven)"
    data = untyped(model("float[b,s,1] x => float[a] y", body, CONSTANTS, opset=20))
    x = normal(2, length, 1)
    with lathe.compile(lathe.load(data), tune="off", threads=1) as session:
        session.run({"x": normal(2, 11, 1)})
        np.testing.assert_allclose(session.run({"x": x})["y"], theirs(data, {"x": x})["y"], 1e-4, 1e-4)
        assert "dynamic-shape code serves" in session.explain() and "FALLBACK" not in session.explain()


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_])
@pytest.mark.parametrize("shape", [(1, 4, 7), (2, 9, 3), (2, 1, 1)])
def test_triangles(dtype: Any, shape: tuple[int, int, int]) -> None:
    element = {np.float32: "float", np.int64: "int64", np.bool_: "bool"}[dtype]
    body = "y = Trilu(x) z = Trilu <upper = 0> (x, k) w = Trilu(x, back)"
    data = untyped(model(f"{element}[b,s,t] x => {element}[a] y, {element}[a] z, {element}[a] w", body, CONSTANTS))
    x = (normal(*shape) * 3).astype(dtype)
    for name, want in theirs(data, {"x": x}).items():
        np.testing.assert_array_equal(answers(data, {"x": x})[name], want)


IMAGES = {
    "same, upper": 'y = Conv <auto_pad = "SAME_UPPER", strides = [2, 3]> (x, w)',
    "same, lower": 'y = Conv <auto_pad = "SAME_LOWER", strides = [2, 1]> (x, w)',
    "same, apart": 'y = Conv <auto_pad = "SAME_UPPER", strides = [2, 1], group = 2> (x, d)',
    "same, pooled": 'y = MaxPool <auto_pad = "SAME_UPPER", kernel_shape = [3, 2], strides = [2, 2]> (x)',
    "transposed": "y = ConvTranspose <strides = [2, 3], pads = [1, 0, 0, 1], output_padding = [1, 0]> (x, w)",
    "transposed, side by side": "t = Neg(x) y = ConvTranspose <strides = [3, 3]> (t, w)",
    "transposed, apart": "y = ConvTranspose <strides = [2, 2], group = 2> (x, d)",
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("threads", [1, 2])
def test_images(kind: str, threads: int) -> None:
    weights = ", ".join(str(number / 40) for number in range(36))
    constants = f"float[2,2,3,3] w = {{{weights}}}, float[2,1,3,3] d = {{{', '.join(weights.split(', ')[:18])}}}"
    data = untyped(model("float[b,2,h,w0] x => float[a] y", IMAGES[kind], constants))
    with lathe.compile(lathe.load(data), tune="off", threads=threads) as session:
        for shape in ((1, 2, 5, 6), (2, 2, 8, 9), (1, 2, 3, 3), (2, 2, 17, 40), (1, 2, 12, 7)):
            x = normal(*shape)
            np.testing.assert_allclose(session.run({"x": x})["y"], theirs(data, {"x": x})["y"], 2e-5, 2e-5)
        assert "dynamic-shape code serves" in session.explain() and "FALLBACK" not in session.explain()
