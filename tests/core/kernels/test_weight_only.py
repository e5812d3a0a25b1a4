"""Products with weights of few bits: every width of codes, blocks, tails, targets; any n with one compiled kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.kernels.target import Target
from lathe.core.kernels.weight_only.dot_spec import WeightOnlyDotSpec
from lathe.core.kernels.weight_only.spec import WeightOnlySpec
from lathe.core.reference import interpret
from tests.core.kernels.harness import NodeKernel, scalar_body
from tests.core.targets import each_target, vectors

F32 = DType.FLOAT32
N = symbol("n")
_CURVE = tuple(np.sinh(np.linspace(-2, 2, 16)).astype(np.float32).tolist())  # numbers that do not count up


def floats(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def product(
    bits: int,
    depth: int,
    columns: int,
    block: int,
    rows: Any = N,
    offsets: bool = False,
    numbers: tuple[float, ...] | None = None,
    half: bool = False,
    zero_points: bool = False,
    **more: Any,
) -> NodeKernel:
    """A kernel; `half`: scales are numbers of float16, `zero_points`: offsets are minus integers times the scales."""
    random = np.random.default_rng(depth + columns)
    shape, blocks = (depth, columns), (-(-depth // block), columns)
    if bits == 8:
        codes, numbers = random.integers(-128, 128, shape).astype(np.int8), ()
    else:
        codes = random.integers(0, 1 << bits, shape).astype(np.uint8)
        numbers = numbers or tuple(float(code - (1 << (bits - 1))) for code in range(1 << bits))
    scales = random.uniform(0.01, 0.1, blocks).astype(np.float32)
    scales = scales.astype(np.float16).astype(np.float32) if half else scales
    points = random.integers(-8, 8, blocks).astype(np.float32)
    shifts = [-points * scales if zero_points else floats(*blocks)] if offsets or zero_points else []
    extras = more.pop("extras", ())
    if extras and not shifts:
        shifts = [None]  # type: ignore[list-item]
    x = TensorType(F32, (rows, depth))
    attrs = {"block": block, "numbers": numbers, **more}
    return NodeKernel("DequantizedMatMul", x, codes, scales, *shifts, *extras, **attrs)


def check(kernel: NodeKernel, *arrays: Array, threads: int = 1) -> None:
    """Against the reference, with the error of A rounded to 16 bits: 2^-16 of the largest element, for each product."""
    feeds = {value.name: array for value, array in zip(kernel.graph.inputs, arrays, strict=True)}
    (expected,) = interpret(kernel.graph, feeds).values()
    kernel.check(*arrays, threads=threads, rtol=0, atol=1e-4 * float(np.abs(expected).max()))


@pytest.mark.sample(3)
@each_target
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize(("bits", "block"), [(8, 96), (8, 24), (4, 32), (4, 16), (2, 32), (1, 32)])
def test_every_width_of_codes(target: Target, bits: int, block: int, offsets: bool) -> None:
    kernel = product(bits, 96, 70, block, offsets=offsets, target=target)
    for n, threads in ((1, 1), (3, 2), (5, 1), (13, 3), (40, 2)):
        check(kernel, floats(n, 96), threads=threads)


@each_target
def test_numbers_that_do_not_count_up(target: Target) -> None:
    kernel = product(4, 64, 70, 32, numbers=_CURVE, target=target)
    assert type(kernel.call.spec) is WeightOnlySpec
    for n in (1, 2, 4, 15):
        check(kernel, floats(n, 64))


@pytest.mark.sample(5)
@pytest.mark.parametrize("numbers", [None, _CURVE], ids=["linear", "curve"])
@pytest.mark.parametrize("columns", [1, 16, 17, 64, 65, 130])
@pytest.mark.parametrize("depth", [1, 7, 33, 100])
def test_every_tail_of_rows_and_columns(depth: int, columns: int, numbers: tuple[float, ...] | None) -> None:
    kernel = product(4, depth, columns, 16, numbers=numbers)
    for n in (1, 2, 3, 6, 33):
        check(kernel, floats(n, depth))


@pytest.mark.sample(3, native=True)
@pytest.mark.parametrize("rows", [1, 4, 11, 12, 70])
@pytest.mark.parametrize("numbers", [None, _CURVE], ids=["linear", "curve"])
def test_a_known_number_of_rows(rows: int, numbers: tuple[float, ...] | None) -> None:
    check(product(4, 64, 48, 32, rows, offsets=True, numbers=numbers), floats(rows, 64), threads=2)


def test_one_scale_for_each_column_of_deep_weights() -> None:
    """Sums of bytes over the whole depth could exceed 32 bits, so rows of A get several scales."""
    kernel = product(8, 5000, 20, 5000)
    check(kernel, np.full((3, 5000), 1.0, np.float32))
    check(kernel, floats(3, 5000))


def test_the_epilogue_reads_a_bias_and_a_residual() -> None:
    add = scalar_body(3, lambda b, x, bias, residual: b("Relu", b("Add", b("Add", x, bias), residual)))
    extras = (floats(33), TensorType(F32, (N, 33)))
    kernel = product(4, 64, 33, 32, epilogue=add, extras=extras)
    for n in (1, 5, 20):
        check(kernel, floats(n, 64), floats(n, 33), threads=2)


def test_an_outlier_costs_accuracy_in_its_own_block_only() -> None:
    kernel = product(4, 64, 16, 32)
    x = floats(1, 64)
    x[0, :32] *= 1e4
    _, codes, scales = (kernel.graph.constants.get(value) for value in kernel.node.inputs[:3])
    assert codes is not None and scales is not None
    weights = (codes.astype(np.float64) - 8) * np.repeat(scales, 32, axis=0)
    (got,) = kernel(x)
    rounding = np.abs(x[0, :32]).max() / 2**16 * np.abs(weights[:32]).sum(axis=0)
    rounding += np.abs(x[0, 32:]).max() / 2**16 * np.abs(weights[32:]).sum(axis=0)
    assert np.all(np.abs(got - x.astype(np.float64) @ weights) <= rounding + 1e-6 * np.abs(got))


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_stays_so(special: float) -> None:
    kernel = product(4, 64, 33, 32)
    x = floats(3, 64)
    x[1, 40] = special
    (got,) = kernel(x)
    assert not np.isfinite(got[1]).any() and np.isfinite(got[[0, 2]]).all()


def test_rows_of_zeros_give_zeros() -> None:
    kernel = product(4, 64, 33, 32)
    (got,) = kernel(np.zeros((3, 64), np.float32))
    assert not got.any()


def test_bytes_are_multiplied_where_the_cpu_has_an_instruction() -> None:
    target = vectors()
    assert isinstance(product(4, 64, 33, 32).call.spec, WeightOnlyDotSpec) == target.has_small_byte_dot
    assert isinstance(product(8, 64, 33, 32).call.spec, WeightOnlyDotSpec) == target.has_byte_dot
