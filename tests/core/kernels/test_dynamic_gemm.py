"""Products with a dynamic number of rows: around the threshold between two codes, and with no rows."""

from __future__ import annotations

from typing import Any

import pytest

from lathe.core.kernels.target import Target
from tests.core.kernels.sweep import kernel, sweep
from tests.core.kernels.test_attention import scaled
from tests.core.targets import each_target

_SIZES = (0, 1, 3, 4, 5, 11, 12, 13, 33, 70)
_OPERANDS: list[tuple[str, str, dict[str, Any]]] = [
    ("n,21", "21,n+2", {}),
    ("2,n,n", "2,n,7", {}),
    ("2,n,21", "2,n,21", {"perm_b": (0, 2, 1)}),
    ("n,5", "2,n,5", {"perm_b": (0, 2, 1)}),
    ("2,n,4,8", "2,n,4,8", {"perm_a": (0, 2, 1, 3), "perm_b": (0, 2, 3, 1), "perm_y": (0, 2, 1, 3)}),
]


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize(("a", "b", "perms"), _OPERANDS, ids=str)
def test_any_number_of_rows(target: Target, a: str, b: str, perms: dict[str, Any]) -> None:
    sweep("FusedMatMul", f"float32[{a}]", f"float32[{b}]", target=target, batches=_SIZES, tolerance=2e-5, **perms)


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize("extra", ["n,n", "n,1", "n", "1"])
def test_epilogues(target: Target, extra: str) -> None:
    operands = ("float32[n,8]", "float32[8,n]", f"float32[{extra}]")
    sweep("FusedMatMul", *operands, target=target, batches=_SIZES, epilogue=scaled(1))


@pytest.mark.parametrize(
    ("a", "b", "family"),
    [
        ("float32[size0,21]", "float32[21,size1]", "open_gemm"),
        ("float32[3,21]", "float32[21,size1]", "varying_gemm"),
        ("float32[40,21]", "float32[21,size1]", "wide_gemm"),
        ("float64[size0,21]", "float64[21,size1]", "wide_gemm"),
    ],
)
def test_operand_types_select_the_kernel_family(a: str, b: str, family: str) -> None:
    assert kernel("FusedMatMul", a, b).call.spec.family == family
