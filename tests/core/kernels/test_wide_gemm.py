"""Products of wide types and of dynamic sizes, around vector and tile lengths and empty."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.reference
import pytest

import lathe
from lathe.core.kernels.target import Target
from tests.core.kernels.sweep import kernel, normal, sweep
from tests.core.kernels.test_attention import scaled
from tests.core.small_models import assert_like_onnx_runtime, model
from tests.core.targets import each_target

_SIZES = (0, 1, 2, 7, 8, 9, 33, 70)
_WIDE = ["float64", "int32", "int64", "uint32", "uint64"]
_OPERANDS: list[tuple[str, str, dict[str, Any]]] = [
    ("n,21", "21,13", {}),
    ("5,n", "n,13", {}),
    ("19,21", "21,n", {}),
    ("n,n+1", "n+1,n", {}),
    ("2,n,21", "2,21,5", {}),
    ("3,n", "5,n", {"perm_b": (1, 0)}),
    ("n,9", "9,17", {"perm_a": (0, 1), "perm_y": (1, 0)}),
    ("2,1,n,4", "3,4,7", {}),
    ("2,n,4,8", "2,n,4,8", {"perm_a": (0, 2, 1, 3), "perm_b": (0, 2, 3, 1), "perm_y": (0, 2, 1, 3)}),
]


@pytest.mark.sample(5)
@each_target
@pytest.mark.parametrize("dtype", _WIDE)
@pytest.mark.parametrize(("a", "b", "perms"), _OPERANDS, ids=str)
def test_wide_numbers(target: Target, dtype: str, a: str, b: str, perms: dict[str, Any]) -> None:
    sweep("FusedMatMul", f"{dtype}[{a}]", f"{dtype}[{b}]", target=target, batches=_SIZES, tolerance=1e-12, **perms)


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize(("a", "b"), [("40,8", "8,n"), ("n,8", "8,n+3"), ("3,70,n", "n,n")])
def test_float32_of_any_size(target: Target, a: str, b: str) -> None:
    sweep("FusedMatMul", f"float32[{a}]", f"float32[{b}]", target=target, batches=_SIZES, tolerance=2e-5)
    assert kernel("FusedMatMul", f"float32[{a}]", f"float32[{b}]").call.spec.family == "wide_gemm"


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize("extra", ["40,n", "n", "40,1", "1"])
def test_epilogues(target: Target, extra: str) -> None:
    operands = ("float32[40,8]", "float32[8,n]", f"float32[{extra}]")
    sweep("FusedMatMul", *operands, target=target, batches=_SIZES, epilogue=scaled(1))


@each_target
def test_bytes(target: Target) -> None:
    """Their products add up in int32, exactly."""
    for a, b in (("n,21", "21,13"), ("3,n,8", "8,n"), ("2,5,n", "2,n,19")):
        sweep("FusedMatMul", f"uint8[{a}]", f"int8[{b}]", target=target, batches=_SIZES)


@pytest.mark.sample(10)
@pytest.mark.parametrize("sizes", [("5,21", "21,13"), ("M,K", "K,N"), ("B,M,K", "K,N"), ("B,M,K", "B,K,N")])
@pytest.mark.parametrize("left", ["uint8", "int8"])
@pytest.mark.parametrize("right", ["uint8", "int8"])
@pytest.mark.parametrize("zeros", ["", ", s", ", s, t", ", , t"])
def test_bytes_and_their_zero_points(sizes: tuple[str, str], left: str, right: str, zeros: str) -> None:
    """ONNX Runtime's sums of full-range int8 may saturate; the ONNX reference is exact."""
    rng, extents = np.random.default_rng(0), {"B": 2, "M": 5, "K": 21, "N": 13}
    columns = sizes[1].rpartition(",")[2]
    types = {"x": f"{left}[{sizes[0]}]", "z": f"{right}[{sizes[1]}]", "s": f"{left}[1]", "t": f"{right}[{columns}]"}
    given = {name: text for name, text in types.items() if name in f"xz{zeros}"}
    signature = ", ".join(f"{text} {name}" for name, text in given.items())
    data = model(f"{signature} => int32[] y", f"y = MatMulInteger (x, z{zeros})")
    feeds = {}
    for name, text in given.items():
        shape = [extents.get(size) or int(size) for size in text.rpartition("[")[2].rstrip("]").split(",")]
        low, high = (0, 256) if text.startswith("u") else (-128, 128)
        feeds[name] = rng.integers(low, high, shape).astype(text.partition("[")[0])
    (expected,) = onnx.reference.ReferenceEvaluator(onnx.load_from_string(data)).run(None, feeds)
    with lathe.compile(data, threads=1, tune="off") as session:
        np.testing.assert_array_equal(session.run(feeds)["y"], expected)
        assert "FALLBACK" not in session.explain(), session.explain()


def test_integers_wrap() -> None:
    """As in NumPy and ONNX Runtime."""
    for dtype in (np.int32, np.int64, np.uint32, np.uint64):
        large = np.full((9, 7), np.iinfo(dtype).max // 2 + 3, dtype)
        compiled = kernel("MatMul", f"{np.dtype(dtype)}[9,7]", f"{np.dtype(dtype)}[7,9]")
        np.testing.assert_array_equal(compiled(large, large.T)[0], large @ large.T)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_are_split_among_threads(threads: int) -> None:
    shapes = ("float64[n,40]", "float64[40,9]")
    compiled = kernel("FusedMatMul", *shapes)
    feeds = [normal(v.dtype, v.tensor.evaluate({"n": 700})) for v in compiled.graph.inputs]
    compiled.check(*feeds, threads=threads, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["double", "int32", "int64"])
@pytest.mark.parametrize(
    ("a", "b"), [("M,K", "K,N"), ("L", "L,N"), ("B,M,L", "L"), ("L", "L"), ("B,M,K", "K,N"), ("B,M,K", "B,K,N")]
)
@pytest.mark.sample(3)
def test_products_agree_with_onnx_runtime(kind: str, a: str, b: str) -> None:
    """With vectors as operands, for known and for dynamic sizes."""
    sizes = {"B": 2, "M": 5, "K": 4, "N": 9, "L": 3}
    shapes = [[sizes[name] for name in text.split(",")] for text in (a, b)]
    dtype = {"double": "float64"}.get(kind, kind)
    rng = np.random.default_rng(0)
    feeds = {name: rng.integers(-9, 9, shape).astype(dtype) for name, shape in zip("xz", shapes, strict=True)}
    for left, right in ((a, b), tuple(",".join(map(str, shape)) for shape in shapes)):
        data = model(f"{kind}[{left}] x, {kind}[{right}] z => {kind}[] y", "y = MatMul (x, z)")
        assert_like_onnx_runtime(data, feeds)
        with lathe.compile(data, threads=1, tune="off") as session:
            session.run(feeds)
            assert "FALLBACK" not in session.explain()


@pytest.mark.sample(3, native=True)
@pytest.mark.parametrize("transposed", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_gemm_of_float64(transposed: tuple[int, int]) -> None:
    a, b = ("K,M" if transposed[0] else "M,K"), ("N,K" if transposed[1] else "K,N")
    body = f"y = Gemm <alpha = 0.5, beta = 2.0, transA = {transposed[0]}, transB = {transposed[1]}> (a, b, c)"
    data = model(f"double[{a}] a, double[{b}] b, double[N] c => double[M,N] y", body)
    rng = np.random.default_rng(0)
    left, right, bias = (rng.standard_normal(shape) for shape in ((6, 21), (21, 11), (11,)))
    feeds = {"a": left.T.copy() if transposed[0] else left, "b": right.T.copy() if transposed[1] else right, "c": bias}
    assert_like_onnx_runtime(data, feeds, tolerance=1e-12)
