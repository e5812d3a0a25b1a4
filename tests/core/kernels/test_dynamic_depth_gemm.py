"""Products with a dynamic depth or width, around the vector length and empty."""

from __future__ import annotations

from typing import Any

import pytest

from lathe.core.kernels.target import Target
from tests.core.kernels.sweep import sweep
from tests.core.kernels.test_attention import scaled
from tests.core.targets import each_target

_SIZES = (0, 1, 2, 7, 15, 16, 17, 33, 64, 70, 131)


@pytest.mark.sample(5, native=True)
@each_target
@pytest.mark.parametrize(
    ("a", "b", "perms"),
    [
        ("2,3,21", "2,21,n", {}),
        ("2,3,n", "2,n,21", {}),
        ("2,3,n", "2,n,70", {}),
        ("2,3,21", "2,n,21", {"perm_b": (0, 2, 1)}),
        ("2,3,n", "2,5,n", {"perm_b": (0, 2, 1)}),
        ("2,n,3", "n,21", {"perm_a": (0, 2, 1)}),
        ("1,n+1", "n+1,n", {}),
        ("2,4,1,8", "2,4,n+1,8", {"perm_b": (0, 1, 3, 2)}),
        ("2,3,n", "2,n,21", {"perm_y": (0, 2, 1)}),
        ("2,3,8", "2,8,n", {"perm_y": (2, 0, 1)}),
        ("n,3,8", "n,8,n", {"perm_y": (2, 0, 1)}),
        ("2,1,4,8", "2,n,4,8", {"perm_a": (0, 2, 1, 3), "perm_b": (0, 2, 3, 1), "perm_y": (0, 2, 1, 3)}),
    ],
    ids=str,
)
def test_sizes(target: Target, a: str, b: str, perms: dict[str, Any]) -> None:
    sweep("FusedMatMul", f"float32[{a}]", f"float32[{b}]", target=target, batches=_SIZES, tolerance=2e-5, **perms)


@each_target
@pytest.mark.parametrize("extra", ["2,1,n", "3,n", "2,3,1", "1"])
def test_epilogues(target: Target, extra: str) -> None:
    operands = ("float32[2,3,8]", "float32[2,n,8]", f"float32[{extra}]")
    sweep("FusedMatMul", *operands, target=target, batches=_SIZES, perm_b=(0, 2, 1), epilogue=scaled(1))
