"""Pad with dynamic widths, against the reference and ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.errors import LatheError
from lathe.core.ir.types import DType, TensorType
from lathe.core.kernels.call import Request
from lathe.core.kernels.copy.pad_spec import PadSpec, pad
from lathe.core.kernels.target import Target
from tests.core.kernels.harness import NodeKernel
from tests.core.kernels.sweep import normal as elements
from tests.core.small_models import model, normal, theirs, untyped
from tests.core.targets import each_target

MODES = ("constant", "edge", "reflect", "wrap")


def padded(shape: tuple[int, ...], widths: Any, mode: str, dtype: DType, target: Target, fill: bool) -> NodeKernel:
    """A Pad with the kernel for any widths, even if the catalog prefers another kernel."""
    pads = tuple(int(width) for side in zip(*widths, strict=True) for width in side)
    value = {"constant_value": np.ones((), dtype.numpy)} if fill else {}
    made = NodeKernel("Pad", TensorType(dtype, shape), target=target, pads=pads, mode=mode, **value)
    call = pad(Request(made.node, made.graph.constants, target))
    assert call is not None and isinstance(call.spec, PadSpec)
    made.note_run(call)
    return made


def random_widths(random: np.random.Generator, shape: tuple[int, ...], mode: str) -> list[tuple[int, int]]:
    """Widths: some are many times the extent, some 0, some crop elements, in mode `constant` even all of them."""
    least = 0 if mode == "constant" else 1
    found: list[tuple[int, int]] = []
    for extent in shape:
        before, after = (int(width) for width in random.integers(-3, 20, 2) * random.integers(0, 2, 2))
        fits = extent + min(before, 0) + min(after, 0) >= least and extent + before + after > 0
        found.append((before, after) if fits else (0, 2))
    return found


@pytest.mark.sample(8)
@each_target
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [DType.UINT8, DType.FLOAT16, DType.FLOAT32, DType.INT64], ids=str)
def test_any_widths(target: Target, mode: str, dtype: DType) -> None:
    random = np.random.default_rng((MODES.index(mode), dtype.itemsize))
    for _ in range(8):
        shape = tuple(int(extent) for extent in random.integers(1, 9, random.integers(1, 5)))
        fill = mode == "constant" and bool(random.integers(2))
        made = padded(shape, random_widths(random, shape, mode), mode, dtype, target, fill)
        made.check(elements(dtype, shape), threads=int(random.integers(1, 4)))


def test_axes_without_padding_are_merged() -> None:
    target = NodeKernel("Relu", TensorType(DType.FLOAT32, (3,))).target
    widths = [(0, 0), (0, 0), (1, 0), (0, 0), (0, 0)]
    spec = padded((2, 3, 4, 5, 6), widths, "edge", DType.FLOAT32, target, False).call.spec
    assert isinstance(spec, PadSpec) and [axis.length for axis in spec.axes] == [6, 5, 30]


def test_several_reflections_have_a_kernel() -> None:
    for mode in MODES[1:]:
        made = NodeKernel("Pad", TensorType(DType.FLOAT32, (3, 2)), pads=(7, 0, 8, 5), mode=mode)
        made.check(normal(3, 2))


SIZES = "length = Shape <start = 1, end = 2> (x) less = Sub(three, length)"
padding: Any = np.pad
CONSTANTS = "int64[1] zero = {0}, int64[1] three = {3}, int64[2] axis = {1, 2}, float half = {0.5}"


@pytest.mark.parametrize(("mode", "value"), [*((mode, "half") for mode in MODES), ("constant", "fed")])
def test_one_code_for_all_lengths_and_widths(mode: str, value: str) -> None:
    """For y, the padding in front equals the length, and the end is padded or cropped to three steps."""
    body = (
        f'p = Concat <axis = 0> (length, zero, less, three) y = Pad <mode = "{mode}"> (x, p, {value}, axis)'
        f' q = Concat <axis = 0> (zero, zero, three, zero) z = Pad <mode = "{mode}"> (x, q, {value}, axis)'
    )
    signature = "float[b,s,4] x, float fed => float[a] y, float[a] z"
    data = untyped(model(signature, f"{SIZES} {body} w = Neg(fed)", CONSTANTS, opset=19))
    filled = {"constant_values": 2.5 if value == "fed" else 0.5} if mode == "constant" else {}
    with lathe.compile(lathe.load(data), tune="off", threads=1) as session:
        assert session.description.any_size and not session.description.in_parts
        for rows, length in ((2, 3), (1, 5), (3, 40), (1, 4), (2, 2), (1, 1)):
            feeds = {"x": normal(rows, length, 4), "fed": np.array(2.5, np.float32)}
            wanted = (
                padding(feeds["x"][:, :3], ((0, 0), (length, max(3 - length, 0)), (0, 3)), mode, **filled),
                padding(feeds["x"], ((0, 0), (0, 3), (0, 0)), mode, **filled),
            )
            for got, want in zip(session.run(feeds).values(), wanted, strict=True):
                np.testing.assert_array_equal(got, want, err_msg=f"{rows} x {length}")
            if mode != "reflect":  # ONNX Runtime reflects only once
                np.testing.assert_array_equal(wanted[1], theirs(data, feeds)["z"])
        assert "dynamic-shape code serves" in session.explain() and "FALLBACK" not in session.explain()


@pytest.mark.parametrize("mode", ["constant", "edge"])
@pytest.mark.parametrize("widths", [(3, -3), (-2, 3), (-4, 1), (5, -2)], ids=str)
def test_cropping_more_than_the_extent(mode: str, widths: tuple[int, int]) -> None:
    """Kernels need at least one remaining element; otherwise the reference fills, or raises an error."""
    before, after = widths
    text = f'y = Pad<mode="{mode}">(x, p)'
    data = model("float[2,k] x => float[2,m] y", text, f"int64[4] p = {{0,{before},0,{after}}}")
    with lathe.compile(data, threads=1, tune="off", new_shapes="wait") as session:
        for length in (6, 1, 2, 3, 4, 9):
            feeds = {"x": np.arange(2.0 * length, dtype=np.float32).reshape(2, length)}
            try:
                expected = lathe.interpret(lathe.load(data), feeds)["y"]
            except LatheError:
                with pytest.raises(LatheError):
                    session.run(feeds)
            else:
                np.testing.assert_array_equal(session.run(feeds)["y"], expected)
