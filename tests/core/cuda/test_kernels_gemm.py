"""Matrix products of GPUs: tails, batches, permuted and strided operands, epilogues, narrow types."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lathe.core.ir.types import DType
from lathe.core.kernels.gemm.cuda_spec import GemmSpec
from lathe.core.kernels.shared.cuda_product import SPLIT, split_into_halves
from tests.core.cuda.gpu_kernel import GpuKernel, compiles, sweep
from tests.core.kernels.harness import scalar_body
from tests.core.kernels.sweep import floats

ADD_RELU = scalar_body(2, lambda b, x, y: b("Relu", b("Add", x, y)))


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("depth", [1, 3, 7, 17, 33, 64])
@pytest.mark.parametrize("columns", [1, 17, 33])
def test_tails(depth: int, columns: int, arch: int) -> None:
    sweep("FusedMatMul", f"float32[n,{depth}]", floats(depth, columns), batches=(0, 1, 33), arch=arch)


def test_many_tiles() -> None:
    kernel = sweep("FusedMatMul", "float32[n,20]", floats(20, 150), batches=(1, 70))
    assert kernel.call.spec.tile.columns < 150


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("n,5,9", "n,9,7"),
        ("n,5,9", "9,7"),
        ("n,3,5,9", "n,1,9,7"),
        ("3,5,9", "n,1,9,7"),
        ("1,9", "n,9,7"),
        ("n,9", "9,n"),
    ],
)
def test_batches(a: str, b: str) -> None:
    sweep("FusedMatMul", f"float32[{a}]", f"float32[{b}]")


def test_depth_may_be_the_batch() -> None:
    sweep("FusedMatMul", "float32[n,5]", "float32[n,7]", perm_a=(1, 0), batches=(1, 3, 70))


def test_a_long_depth_is_split_among_programs() -> None:
    kernel = sweep("FusedMatMul", "float32[1100,5]", "float32[1100,7]", "float32[7]", perm_a=(1, 0), epilogue=ADD_RELU,
                   batches=(1,), atol=1e-3)  # fmt: skip
    assert kernel.call.spec.parts > 1
    compiles("FusedMatMul", "float32[n,5]", "float32[n,7]", perm_a=(1, 0))


def test_operands_may_be_permuted() -> None:
    heads = "float32[n,6,2,5]"
    sweep("FusedMatMul", heads, heads, perm_a=(0, 2, 1, 3), perm_b=(0, 2, 3, 1))
    sweep("FusedMatMul", "float32[n,2,6,6]", heads, perm_b=(0, 2, 1, 3), perm_y=(0, 2, 1, 3))
    sweep("FusedMatMul", "float32[n,4,6]", floats(21, 6), perm_b=(1, 0))


def test_rows_of_several_loops_are_one_index() -> None:
    kernel = sweep("FusedMatMul", "float32[5,n,9]", floats(9, 8), perm_a=(1, 0, 2))
    assert kernel.call.spec.rows.rank == 2 and kernel.call.spec.batch.extents == (1,)


@pytest.mark.parametrize("shape", ["8", "n,5,8", "5,1", "1", "n,1,8"])
def test_epilogues(shape: str) -> None:
    sweep("FusedMatMul", "float32[n,5,9]", floats(9, 8), f"float32[{shape}]", epilogue=ADD_RELU)


def test_a_residual_is_replaced() -> None:
    kernel = sweep("FusedMatMul", "float32[n,9]", floats(9, 8), "float32[n,8]", epilogue=ADD_RELU)
    assert kernel.call.inplace == (2,)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_factors(dtype: str) -> None:
    sweep("FusedMatMul", f"{dtype}[n,33]", f"{dtype}[33,20]", batches=(1, 17), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16], ids=str)
def test_narrow_factors_with_float32(dtype: DType) -> None:
    cast = scalar_body(1, lambda b, x: b("Cast", x, to=dtype.onnx_code))
    constant = sweep("FusedMatMul", f"{dtype}[n,33]", floats(33, 20), batches=(1, 17), rtol=1e-3, atol=1e-3)
    assert constant.call.spec.factors == (dtype, dtype)
    sweep("FusedMatMul", f"{dtype}[n,33]", "float32[33,20]", epilogue=cast, batches=(3,), rtol=2e-2, atol=2e-2)


def test_every_offer_agrees() -> None:
    a, b = "float32[n,40]", floats(40, 50)
    offered = GpuKernel("FusedMatMul", a, b).offers
    assert offered > 4
    for rank in range(offered):
        sweep("FusedMatMul", a, b, batches=(20,), rank=rank)


def test_tf32_only_on_request() -> None:
    exact = GpuKernel("FusedMatMul", "float32[n,64]", floats(64, 64))
    fast = GpuKernel("FusedMatMul", "float32[n,64]", floats(64, 64), tf32=True)
    assert (exact.call.spec.precision, fast.call.spec.precision) == ("tf32x3", "tf32")


@pytest.mark.parametrize("arch", [80, 90])
def test_results_by_tf32_are_not_smaller_on_average(arch: int) -> None:
    """Of products of positive numbers, whose errors of 2**-11 would add up if all were truncated."""

    def positive(dtype: DType, shape: tuple[int, ...]) -> Any:
        return np.random.default_rng(1).uniform(1, 100, shape).astype(dtype.numpy)

    weight = np.random.default_rng(0).uniform(1, 100, (512, 24)).astype(np.float32)
    for op, x, w in (
        ("FusedMatMul", "float32[n,512]", weight),
        ("FusedConv", "float32[n,2,2,128]", weight.reshape(24, 128, 2, 2)),
        ("Conv", "float32[n,128,2,2]", weight.reshape(24, 128, 2, 2)),
    ):
        kernel = sweep(
            op, x, w, batches=(9,), sample=positive, rtol=2e-4, arch=arch, tf32=True,
            **({"layout": "NHWC"} if op == "FusedConv" else {}),
        )  # fmt: skip
        assert kernel.call.spec.precision == "tf32"


def test_products_of_small_integers_by_tf32_are_exact() -> None:
    def whole(dtype: DType, shape: tuple[int, ...]) -> Any:
        return np.random.default_rng(1).integers(-900, 900, shape).astype(dtype.numpy)

    weight = np.random.default_rng(0).integers(-900, 900, (8, 20)).astype(np.float32)
    sweep("FusedMatMul", "float32[n,8]", weight, batches=(9,), sample=whole, rtol=0.0, atol=0.0, arch=90, tf32=True)


def test_fast_tiles_for_large_products_small_ones_for_small() -> None:
    large = GpuKernel("FusedMatMul", "float16[n,512,1024]", np.zeros((1024, 4096), np.float16)).call.spec.tile
    small = GpuKernel("FusedMatMul", "float16[n,64]", np.zeros((64, 10), np.float16)).call.spec.tile
    assert large.rows * large.columns >= 128 * 128 and small.columns == 16
    assert replace(small, warps=4) == small


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_compiles(dtype: str) -> None:
    compiles("FusedMatMul", f"{dtype}[n,256]", f"{dtype}[256,256]")


@pytest.mark.parametrize("arch", [80, 89, 90])
def test_float16_takes_tensor_cores_that_add_up_in_float32(arch: int) -> None:
    cast = scalar_body(1, lambda b, x: b("Cast", x, to=DType.FLOAT16.onnx_code))
    kernel = GpuKernel("FusedMatMul", "float16[n,256]", floats(256, 256), epilogue=cast)
    products = ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "wgmma.mma_async.sync.aligned")
    assert any(name in kernel.ptx(arch) for name in products[: 1 if arch < 90 else 2])


def test_odd_sizes_and_epilogues_compile() -> None:
    compiles("FusedMatMul", "float32[n,37]", floats(37, 50), "float32[n,50]", epilogue=ADD_RELU)
    compiles("FusedMatMul", "float32[n,6,2,5]", "float32[n,6,2,5]", perm_a=(0, 2, 1, 3), perm_b=(0, 2, 3, 1), tf32=True)


def test_exact_products_compile() -> None:
    exact = [
        r
        for r in range(24)
        if GpuKernel("FusedMatMul", "float32[n,64]", floats(64, 64), rank=r).call.spec.precision == "ieee"
    ]
    compiles("FusedMatMul", "float32[n,64]", floats(64, 64), rank=exact[0])


@pytest.mark.parametrize(("depth", "columns", "perm"), [(20, 7, None), (64, 33, None), (33, 40, (1, 0))])
def test_products_of_bytes_are_exact(depth: int, columns: int, perm: tuple[int, ...] | None) -> None:
    """Also the largest possible sums; tensor cores multiply only int8."""
    rng = np.random.default_rng(depth)
    weight = rng.integers(-128, 128, (depth, columns), dtype=np.int8)
    weight[:, 0] = -128
    given = np.ascontiguousarray(weight.T if perm else weight)

    def bytes_of(dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
        x = rng.integers(0, 256, shape, dtype=np.uint8)
        x[:1] = 255
        return x

    kernel = sweep("FusedMatMul", f"uint8[n,3,{depth}]", given, sample=bytes_of, **({"perm_b": perm} if perm else {}),
                   batches=(0, 1, 17), rtol=0, atol=0)  # fmt: skip
    assert kernel.call.spec.element is DType.INT8


def test_products_of_bytes_have_epilogues() -> None:
    weight = np.random.default_rng(0).integers(-128, 128, (70, 40), dtype=np.int8)
    offset = np.arange(40, dtype=np.int32) * 100
    body = scalar_body(2, lambda b, x, y: b("Cast", b("Sub", x, y), to=1), DType.INT32)
    sweep("FusedMatMul", "uint8[n,70]", weight, offset, epilogue=body, batches=(1, 33))


def test_products_of_bytes_compile() -> None:
    compiles("FusedMatMul", "uint8[n,70]", np.ones((70, 40), np.int8))


@pytest.mark.parametrize(("depth", "columns", "perm"), [(64, 48, None), (40, 30, None), (36, 20, (1, 0))])
def test_float32_weights_are_split_in_halves_for_hopper(depth: int, columns: int, perm: tuple[int, ...] | None) -> None:
    """Also with infinities and NaN in the left factor, which stay what they are."""
    weight = floats(*((columns, depth) if perm else (depth, columns)))

    def with_infinities(dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
        x = np.random.default_rng(depth).standard_normal(shape).astype(np.float32)
        x[..., 0, 0] = np.inf
        x[..., 1:2, 3] = np.nan
        return x

    keywords: dict[str, Any] = {"arch": 90, **({"perm_b": perm} if perm else {})}
    kernel = sweep("FusedMatMul", f"float32[n,3,{depth}]", weight, rtol=1e-5, **keywords)
    assert isinstance(kernel.call.spec, GemmSpec) and kernel.call.spec.precision == SPLIT
    sweep("FusedMatMul", f"float32[n,3,{depth}]", weight, sample=with_infinities, batches=(2,), rtol=1e-5, **keywords)


def test_halves_of_weights_are_exact_in_tf32_and_add_up() -> None:
    given = np.float32([0, 1, -1 / 3, 1e-30, 3.4028235e38, -3.4028235e38, np.inf, -np.inf, np.nan, 2**-140])
    first, second = split_into_halves(given)
    finite = np.isfinite(given)
    np.testing.assert_allclose((first + second)[finite], given[finite], rtol=2**-21, atol=1e-38)
    np.testing.assert_array_equal(first[~finite], given[~finite])
    assert not second[~finite].any()
    for half in (first[:4], second):
        assert not (half.view(np.uint32) & 0x1FFF).any()
