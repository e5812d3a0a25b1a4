"""Chains of convolutions around a depthwise one, against NumPy: strides, borders, tails, bands, threads."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lathe.core.codegen.target import host
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.kernels.call import Request
from lathe.core.kernels.choose import candidates
from lathe.core.kernels.conv_chain.spec import ConvChainSpec
from lathe.core.kernels.target import Target
from lathe.core.passes.fusion.conv_chain import ChainConvolutions
from tests.core.kernels.harness import NodeKernel, scalar_body
from tests.core.kernels.test_conv import N, check, floats
from tests.core.targets import each_target

LARGE = dataclasses.replace(host(), l2_bytes=1 << 21)  # where whole images fit
SMALL = dataclasses.replace(host(), l2_bytes=1 << 13)  # where only a few lines fit
RELU = scalar_body(1, lambda b, x: b("Relu", x))
SILU = scalar_body(1, lambda b, x: b("Mul", x, b("Sigmoid", x)))
PLUS = scalar_body(2, lambda b, x, r: b("Add", b("Relu", x), r))


def chain(
    size: tuple[int, int],
    channels: int,
    wide: int,
    outputs: int,
    kernel: int = 3,
    target: Target | None = None,
    residual: bool = False,
    activation: Graph = RELU,
    **attrs: Any,
) -> NodeKernel:
    """A chain that widens and narrows as far as `channels` and `outputs` are not 0."""
    graph = Graph("g")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (N, *size, channels or wide)))
    y: Value = x

    def conv(y: Value, weight: tuple[int, ...], *extras: Value, **attrs: Any) -> Value:
        parameters = b.constant(floats(*weight)), b.constant(floats(weight[0]))
        return b("FusedConv", y, *parameters, *extras, layout="NHWC", **attrs)

    if channels:
        y = conv(y, (wide, channels, 1, 1), epilogue=activation)
    y = conv(y, (wide, 1, kernel, kernel), group=wide, epilogue=activation, **attrs)
    if outputs:
        extras = (x,) if residual else ()
        y = conv(y, (outputs, wide, 1, 1), *extras, epilogue=PLUS if residual else None)
    graph.outputs = [y]
    assert ChainConvolutions(least_bytes=0, worthwhile=0).run(graph).changed == 1
    node = graph.nodes[0]
    given = [graph.constants.get(value, value.type) for value in node.inputs if value is not None]
    return NodeKernel("ConvChain", *given, target=target or host(), body=node.attrs["body"])  # type: ignore[arg-type]


def spec_of(kernel: NodeKernel) -> ConvChainSpec:
    assert isinstance(kernel.call.spec, ConvChainSpec)
    return kernel.call.spec


@pytest.mark.sample(3, native=True)
@pytest.mark.parametrize("target", [LARGE, SMALL], ids=["whole images", "lines"])
@pytest.mark.parametrize(("channels", "outputs"), [(5, 0), (0, 7), (5, 7), (20, 40)])
def test_parts(target: Target, channels: int, outputs: int) -> None:
    kernel = chain((12, 11), channels, 36, outputs, target=target, pads=(1, 1, 1, 1))
    assert (spec_of(kernel).band == 12) == (target is not SMALL)
    check(kernel, 1, 3)
    check(kernel, 0, 2, threads=3)


@pytest.mark.sample(3, native=True)
@pytest.mark.parametrize(
    ("kernel", "attrs"),
    [
        (3, {"strides": (2, 2), "pads": (1, 1, 1, 1)}),
        (3, {"strides": (2, 2), "pads": (0, 0, 1, 1)}),
        (5, {"pads": (2, 2, 2, 2)}),
        (5, {"strides": (2, 1), "pads": (1, 2, 2, 1)}),
        (3, {"dilations": (2, 3), "pads": (2, 3, 2, 3)}),
        (2, {"strides": (3, 3)}),
        (4, {"pads": (3, 3, 3, 3)}),
    ],
)
def test_windows(kernel: int, attrs: dict[str, Any]) -> None:
    for size in ((24, 17), (15, 30)):
        check(chain(size, 3, 24, 5, kernel, SMALL, **attrs), 1, 2, threads=2)


def test_an_image_of_a_line_or_less_than_a_window() -> None:
    for size in ((1, 9), (2, 2), (9, 1)):
        check(chain(size, 3, 24, 5, 5, SMALL, pads=(2, 2, 2, 2)), 1, threads=2)


@pytest.mark.parametrize("wide", [2, 16, 33])
def test_tails_of_channels(wide: int) -> None:
    check(chain((6, 9), 3, wide, 5, pads=(1, 1, 1, 1)), 2)


@pytest.mark.parametrize("target", [LARGE, SMALL], ids=["whole images", "lines"])
def test_residual_and_long_epilogues(target: Target) -> None:
    check(chain((10, 8), 6, 24, 6, 3, target, residual=True, activation=SILU, pads=(1, 1, 1, 1)), 1, 3, threads=2)


@each_target
def test_targets(target: Target) -> None:
    check(chain((9, 10), 6, 20, 9, target=target, pads=(1, 1, 1, 1)), 2)


def test_offers_bands() -> None:
    kernel = chain((24, 40), 6, 48, 8, target=dataclasses.replace(host(), l2_bytes=1 << 20), pads=(1, 1, 1, 1))
    calls = candidates(Request(kernel.node, kernel.graph.constants, kernel.target))
    bands = {call.spec.band for call in calls if isinstance(call.spec, ConvChainSpec)}
    assert len(bands) >= 3
    assert all(24 % band == 0 for band in bands)
