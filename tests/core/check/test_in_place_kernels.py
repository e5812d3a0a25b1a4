"""Every kernel family that may overwrite an operand gives the same bits in place as out of place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from lathe.core.check.boxes import Layout, dense_strides
from lathe.core.check.in_place import _FINISHING, may_run_in_place
from lathe.core.codegen.target import host
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Array, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.kernels.call import In, Out
from lathe.core.reference import bind_symbols
from tests.core.kernels.harness import NodeKernel, guarded, guarded_output, scalar_body, vectors
from tests.core.kernels.sweep import floats, kernel
from tests.core.kernels.test_amx import needs_tiles
from tests.core.kernels.test_conv import F32, N, convolution
from tests.core.kernels.test_dot_product_words import halves

_ADD = scalar_body(2, lambda b, x, y: b("Relu", b("Add", x, y)))


def _long(b: Builder, x: Value, y: Value) -> Value:
    return b("Add", b("Tanh", x), b("Mul", y, y))


def residual(*dims: int) -> TensorType:
    return TensorType(F32, (N, *dims))


@dataclass(frozen=True)
class Replacing:
    """A node, its kernel family, the input that the result may replace, and feeds."""

    family: str
    index: int
    make: Callable[[], NodeKernel]
    feeds: Callable[[], list[Array]]


def picks(rows: int, below: int) -> Array:
    return np.random.default_rng(rows).integers(-below, below, rows).astype(np.int64)


def _product(columns: int, **attrs: Any) -> NodeKernel:
    extra = TensorType(F32, (N, 5, columns))
    return NodeKernel("FusedMatMul", residual(5, 9), floats(9, columns), extra, epilogue=_ADD, **attrs)


def _dequantized(numbers: Array) -> NodeKernel:
    codes = np.random.default_rng(3).integers(0, 16, (40, 21)).astype(np.uint8)
    scales = np.abs(floats(5, 21)) + 0.1
    attrs = {"block": 8, "numbers": tuple(numbers.astype(float).tolist()), "epilogue": _ADD}
    return NodeKernel("DequantizedMatMul", residual(5, 40), codes, scales, None, residual(5, 21), **attrs)


def _strassen() -> NodeKernel:
    target = replace(vectors(), l1_bytes=1 << 20)  # a cache size at which the seven products of Strassen are preferred
    extra = residual(72, 384)
    return NodeKernel("FusedMatMul", residual(72, 384), floats(384, 384), extra, epilogue=_ADD, target=target)


ALL = [
    Replacing("elementwise", 0, lambda: kernel("Sub", "float32[n,37]", "float32[37]"),
              lambda: [floats(9, 37), floats(37)]),
    Replacing("elementwise", 1, lambda: kernel("Sub", "float32[n,37]", "float32[n,37]"),
              lambda: [floats(9, 37), floats(10, 37)[1:]]),
    Replacing("elementwise", 0, lambda: kernel("BatchNormalization", "float32[n,5,7]", *[np.abs(floats(5))] * 4),
              lambda: [floats(3, 5, 7)]),
    Replacing("softmax", 0, lambda: kernel("Softmax", "float32[n,133]"), lambda: [floats(40, 133)]),
    Replacing("softmax", 0, lambda: kernel("LogSoftmax", "float32[n,13,29]", axis=1), lambda: [floats(40, 13, 29)]),
    Replacing("layernorm", 0, lambda: kernel("LayerNormalization", "float32[n,33]", floats(33), floats(33)),
              lambda: [floats(40, 33)]),
    Replacing("layernorm", 0, lambda: kernel("RMSNormalization", "float32[n,384]", floats(384)),
              lambda: [floats(40, 384)]),
    Replacing("groupnorm", 0, lambda: kernel("GroupNormalization", "float32[n,12,5,7]", *[floats(12)] * 2,
                                             num_groups=3),
              lambda: [floats(4, 12, 5, 7)]),
    Replacing("groupnorm", 0, lambda: kernel("InstanceNormalization", "float32[n,6,50]", floats(6), floats(6)),
              lambda: [floats(4, 6, 50)]),
    Replacing("gemm", 2, lambda: _product(21), lambda: [floats(7, 5, 9), floats(7, 5, 21)]),
    Replacing("gemm", 2, lambda: NodeKernel("FusedMatMul", residual(5, 9), floats(9, 21), residual(5, 21),
                                            epilogue=_ADD, perm_y=(0, 1, 2)),
              lambda: [floats(7, 5, 9), floats(7, 5, 21)]),
    Replacing("weight_only", 4, lambda: _dequantized(np.sin(np.arange(16))),
              lambda: [floats(7, 5, 40), floats(7, 5, 21)]),
    Replacing("weight_only_dot", 4, lambda: _dequantized(np.arange(16) - 8),
              lambda: [floats(7, 5, 40), floats(7, 5, 21)]),
    Replacing("gemm", 3, lambda: convolution((9, 8), 40, 24, (1, 1), residual(9, 8, 24), pads=(0,) * 4, bias=False,
                                             epilogue=_ADD),
              lambda: [floats(3, 9, 8, 40), floats(3, 9, 8, 24)]),
    Replacing("strassen", 2, _strassen, lambda: [floats(3, 72, 384), floats(3, 72, 384)]),
    Replacing("conv", 3, lambda: convolution((5, 6), 4, 9, (3, 3), residual(5, 6, 9), pads=(1,) * 4, epilogue=_ADD),
              lambda: [floats(6, 5, 6, 4), floats(6, 5, 6, 9)]),
    Replacing("depthwise", 3, lambda: convolution((6, 10), 20, 20, (3, 3), residual(6, 10, 20), group=20, pads=(1,) * 4,
                                                  epilogue=_ADD),
              lambda: [floats(4, 6, 10, 20), floats(5, 6, 10, 20)[1:]]),
    Replacing("depthwise", 3, lambda: convolution((6, 10), 20, 20, (3, 3), residual(6, 10, 20), group=20, pads=(1,) * 4,
                                                  epilogue=scalar_body(2, _long)),
              lambda: [floats(4, 6, 10, 20), floats(5, 6, 10, 20)[1:]]),
    Replacing("winograd", 3, lambda: convolution((14, 13), 32, 32, (3, 3), residual(14, 13, 32), pads=(1,) * 4,
                                                 epilogue=_ADD),
              lambda: [floats(3, 14, 13, 32), floats(4, 14, 13, 32)[1:]]),
    Replacing("winograd_lines", 3, lambda: convolution((20, 22), 3, 32, (7, 7), residual(10, 11, 32), pads=(3,) * 4,
                                                       strides=(2, 2), epilogue=_ADD),
              lambda: [floats(3, 20, 22, 3), floats(3, 10, 11, 32)]),
    Replacing("scatter", 0, lambda: kernel("ScatterND", "float32[20,17]", "int64[n,1]", "float32[n,17]",
                                           reduction="add"),
              lambda: [floats(20, 17), picks(90, 20)[:, None], floats(90, 17)]),
    Replacing("cache_write", 0, lambda: kernel("CacheWrite", "float32[5,2,20,8]", "float32[n,2,20]", "int64[n]",
                                               transposed=1),
              lambda: [floats(5, 2, 20, 8), floats(9, 2, 20), np.arange(9) * 4]),
    Replacing("scatter_elements", 0, lambda: kernel("ScatterElements", "float32[20,17]", "int64[n,17]", "float32[n,17]",
                                                    axis=0, reduction="add"),
              lambda: [floats(20, 17), picks(90 * 17, 20).reshape(90, 17), floats(90, 17)]),
]  # fmt: skip


def over_input(made: NodeKernel, index: int, arrays: list[Array], threads: int) -> Array:
    """The bytes of the first output when it overwrites an input."""
    feeds = dict(zip(made.graph.inputs, arrays, strict=True))
    n = bind_symbols(made.graph.inputs, feeds).get("n", 1)
    known = feeds | made.graph.constants
    outputs = [guarded_output(value, n) for value in made.node.outputs]
    shared = guarded(known[made.node.inputs[index]])  # type: ignore[index]
    memory = [
        shared if operand in (In(index), Out(0)) else made._memory(operand, known, outputs, n, threads)
        for operand in made.call.operands
    ]
    made._run(memory, n, threads)
    return shared


def layout(array: Array) -> Layout:
    return Layout(0, array.shape, dense_strides(array.shape, array.itemsize), array.itemsize)


def check(each: Replacing) -> None:
    made, arrays = each.make(), each.feeds()
    assert made.call.spec.family == each.family
    source = dict(zip(made.graph.inputs, arrays, strict=True))[made.node.inputs[each.index]]  # type: ignore[index]
    for threads in (1, 3):
        want = made(*arrays, threads=threads)[0]
        assert may_run_in_place(made.node, made.call.spec, each.index, layout(source), 0, layout(want))
        got = over_input(made, each.index, arrays, threads)
        np.testing.assert_array_equal(got.view(want.dtype).reshape(want.shape), want)


@pytest.mark.sample(5)
@pytest.mark.parametrize("each", ALL, ids=[f"{each.family}-{index}" for index, each in enumerate(ALL)])
def test_results_in_place_equal_those_out_of_place(each: Replacing) -> None:
    check(each)


@needs_tiles
def test_in_place_on_tiles() -> None:
    def make() -> NodeKernel:
        a, extra = TensorType(DType.BFLOAT16, (N, 32)), TensorType(F32, (N, 33))
        return NodeKernel("FusedMatMul", a, floats(32, 33), extra, epilogue=_ADD, target=host())

    check(Replacing("amx", 2, make, lambda: [halves(41, 32), floats(41, 33)]))


def test_every_family_has_a_case() -> None:
    """Intel's tiles have a test of their own; NVIDIA's library needs a GPU."""
    tried = {each.family for each in ALL}
    assert set(_FINISHING) - tried == {"amx", "cublaslt"}
    assert tried >= {"elementwise", "softmax", "layernorm", "groupnorm", "scatter", "scatter_elements"}


def test_an_output_that_holds_intermediates_replaces_no_operand() -> None:
    """A long epilogue runs over finished rows, which are stored in the output until then."""
    body = scalar_body(2, _long)
    for size, family in (((3, 3), "conv"), ((1, 1), "gemm")):
        made = convolution((5, 6), 4, 21, size, residual(5, 6, 21), pads=(size[0] // 2,) * 4, epilogue=body)
        assert made.call.spec.family == family
        shape = layout(np.zeros((2, 5, 6, 21), np.float32))
        assert not may_run_in_place(made.node, made.call.spec, 3, shape, 0, shape)


def test_no_other_operand_and_no_other_address_is_allowed() -> None:
    made = _product(21)
    result = layout(np.zeros((7, 5, 21), np.float32))
    for index, allowed in ((0, False), (1, False), (2, True)):
        assert may_run_in_place(made.node, made.call.spec, index, result, 0, result) == allowed
    further = Layout(4, result.shape, result.strides, result.itemsize)
    assert not may_run_in_place(made.node, made.call.spec, 2, further, 0, result)
    row = Layout(0, (21,), (4,), 4)
    assert not may_run_in_place(made.node, made.call.spec, 2, row, 0, result)
    turned = NodeKernel("FusedMatMul", residual(5, 9), floats(9, 5), residual(5, 5), epilogue=_ADD, perm_y=(0, 2, 1))
    square = layout(np.zeros((7, 5, 5), np.float32))
    assert not may_run_in_place(turned.node, turned.call.spec, 2, square, 0, square)
