"""Products whose rows are rounded to int8: the kernel computes what the reference does, within a stated bound."""

from __future__ import annotations

import numpy as np
import pytest

from lathe.core.codegen.target import host
from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.kernels.call import Request
from lathe.core.kernels.choose import candidates
from lathe.core.kernels.target import Target
from lathe.core.kernels.weight_only.dot_spec import WeightOnlyDotSpec
from lathe.core.reference import interpret
from tests.core.kernels.harness import NodeKernel
from tests.core.kernels.test_weight_only import floats, product
from tests.core.targets import VECTORS, each_wide, vectors


def check(kernel: NodeKernel, x: Array, threads: int = 1) -> None:
    """Against the reference, which rounds rows in the same way: a few units in the last place of the largest result."""
    spec = kernel.call.spec
    assert isinstance(spec, WeightOnlyDotSpec) and spec.pieces == 1
    (expected,) = interpret(kernel.graph, {kernel.graph.inputs[0].name: x}).values()
    kernel.check(x, threads=threads, rtol=0, atol=5e-7 * float(np.abs(expected).max()))


def dense(kernel: NodeKernel) -> Array:
    """The weights of the node as float64."""
    _, codes, scales = (kernel.graph.constants.get(value) for value in kernel.node.inputs[:3])
    assert codes is not None and scales is not None
    numbers, block = kernel.node.attrs["numbers"], kernel.node.attrs["block"]
    assert isinstance(block, int)
    known = np.asarray(numbers, np.float64)[codes] if numbers else codes.astype(np.float64)
    return known * np.repeat(scales.astype(np.float64), block, axis=0)[: len(codes)]


def multiplies_bytes(target: Target) -> bool:
    return target.has_small_byte_dot


@pytest.mark.sample(5)
@each_wide
@pytest.mark.parametrize("offsets", [{}, {"offsets": True}, {"zero_points": True}, {"zero_points": True, "half": True}])
@pytest.mark.parametrize(("bits", "block"), [(8, 24), (8, 32), (8, 128), (4, 16), (4, 32), (4, 128), (2, 32), (1, 32)])
def test_every_width_of_codes(target: Target, bits: int, block: int, offsets: dict[str, bool]) -> None:
    kernel = product(bits, 2 * block, 70, block, row_bits=8, target=target, **offsets)
    for n, threads in ((1, 1), (2, 2), (5, 1), (13, 3), (40, 2)):
        check(kernel, floats(n, 2 * block), threads)


@pytest.mark.sample(3)
@pytest.mark.parametrize("columns", [1, 16, 17, 48, 65, 130])
@pytest.mark.parametrize("depth", [1, 7, 33, 100])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_tail_of_rows_and_columns(bits: int, depth: int, columns: int) -> None:
    if not multiplies_bytes(vectors()):
        pytest.skip("without a product of bytes the rows stay float32")
    kernel = product(bits, depth, columns, 16, row_bits=8)
    for n in (1, 2, 3, 6, 33):
        check(kernel, floats(n, depth))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("extreme", [127, -128])
def test_the_largest_sums_do_not_saturate(bits: int, extreme: int) -> None:
    """AVX2 adds up pairs of products as int16: each code and each element has its largest magnitude here."""
    codes = np.full((64, 33), extreme, np.int8) if bits == 8 else np.full((64, 33), 15 * (extreme > 0), np.uint8)
    numbers = () if bits == 8 else tuple(map(float, range(-8, 8)))
    x = np.where(np.arange(64) % 3 == 0, -1, 1).astype(np.float32) * np.ones((5, 1), np.float32)
    scales = np.full((2, 33), 0.5, np.float32)
    rows = TensorType(DType.FLOAT32, (symbol("n"), 64))
    kernel = NodeKernel("DequantizedMatMul", rows, codes, scales, block=32, numbers=numbers, row_bits=8)
    (got,) = kernel(x)
    np.testing.assert_allclose(got, x.astype(np.float64) @ dense(kernel), rtol=1e-6)


@pytest.mark.parametrize(("bits", "block"), [(4, 32), (4, 64), (4, 128), (8, 128)])
def test_the_error_is_at_most_half_a_unit_for_each_element(bits: int, block: int) -> None:
    """With an outlier in one group, which costs the others nothing."""
    kernel = product(bits, 256, 33, block, row_bits=8)
    x = floats(4, 256)
    x[:, :block] *= 1e3
    weights, bound = dense(kernel), 0.0
    for start in range(0, 256, block):
        part = slice(start, start + block)
        bound = bound + np.abs(x[:, part]).max(axis=1, keepdims=True) / 254 * np.abs(weights[part]).sum(axis=0)
    (got,) = kernel(x)
    exact = x.astype(np.float64) @ weights
    assert np.all(np.abs(got - exact) <= bound + 1e-5 * np.abs(exact))


def test_blocks_of_a_whole_column_are_rounded_in_groups_of_128() -> None:
    kernel = product(8, 5000, 20, 5000, row_bits=8)
    check(kernel, floats(3, 5000))
    x = floats(1, 5000)
    x[0, :128] *= 1e4
    (got,) = kernel(x)
    weights = dense(kernel)
    first = np.abs(x[0, :128]).max() / 254 * np.abs(weights[:128]).sum(axis=0)
    rest = np.abs(x[0, 128:]).max() / 254 * np.abs(weights[128:]).sum(axis=0)
    exact = x.astype(np.float64) @ weights
    assert np.all(np.abs(got - exact) <= first + rest + 1e-5 * np.abs(exact))


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_stays_so(special: float) -> None:
    kernel = product(4, 64, 33, 32, row_bits=8)
    x = floats(3, 64)
    x[1, 40] = special
    (got,) = kernel(x)
    assert not np.isfinite(got[1]).any() and np.isfinite(got[[0, 2]]).all()


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30, 1e30])
def test_rows_of_any_size(size: float) -> None:
    kernel = product(4, 64, 33, 32, row_bits=8)
    x = floats(3, 64) * np.float32(size)
    (got,), exact = kernel(x), x.astype(np.float64) @ dense(kernel)
    assert np.all(np.abs(got - exact) <= 0.02 * np.abs(exact).max() + 1e-30)


@pytest.mark.parametrize("bits", [4, 8])
def test_results_depend_neither_on_other_rows_nor_on_vnni(bits: int) -> None:
    """Sums of a group are exact, and groups add up in one order, whatever the tile and the instructions."""
    targets = [target for target in VECTORS.values() if multiplies_bytes(target) and target.needs <= host().needs]
    x = floats(150, 256)  # several blocks of rows
    found = []
    for target in targets:
        kernel = product(bits, 256, 70, 64, row_bits=8, zero_points=True, target=target)
        found += [kernel(x, threads=2)[0][-9:], np.concatenate([kernel(x[i : i + 1])[0] for i in range(141, 150)])]
    for other in found:
        np.testing.assert_array_equal(other, found[0])


def test_scales_and_zero_points_have_their_narrowest_exact_types() -> None:
    if not multiplies_bytes(vectors()):
        pytest.skip("without a product of bytes codes become float32")
    for half in (False, True):
        spec = product(4, 64, 33, 32, zero_points=True, half=half).call.spec
        assert isinstance(spec, WeightOnlyDotSpec)
        assert spec.scale_dtype is (DType.FLOAT16 if half else DType.FLOAT32) and spec.offset_dtype is DType.INT8
    spec = product(4, 64, 33, 32, offsets=True).call.spec
    assert isinstance(spec, WeightOnlyDotSpec) and spec.offset_dtype is DType.FLOAT32


def test_only_nodes_that_permit_it_round_their_rows() -> None:
    target = vectors()
    for row_bits in (0, 8):
        kernel = product(4, 64, 33, 32, row_bits=row_bits)
        offered = candidates(Request(kernel.node, kernel.graph.constants, target))
        pieces = [call.spec.pieces if isinstance(call.spec, WeightOnlyDotSpec) else 0 for call in offered]
        if target.has_small_byte_dot:
            assert pieces == ([1, 2, 0] if row_bits else [2])
