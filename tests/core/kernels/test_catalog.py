"""The contract of the kernel catalog for every family."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.kernels.sweep import kernel


@pytest.mark.parametrize(
    ("op", "inputs", "attrs"),
    [
        ("Sub", ("float32[n,0,3]", "float32[0,1]"), {}),
        ("Transpose", ("float32[n,0,5]",), {"perm": (2, 1, 0)}),
        ("Concat", ("float32[n,5,17]", "float32[n,0,17]"), {"axis": 1}),
        ("Slice", ("float32[n,20]",), {"starts": (7,), "ends": (7,), "axes": (-1,)}),
        ("Split", ("float32[n,20]",), {"axis": 1, "split": (3, 17, 0), "outputs": 3}),
        ("Gather", ("float32[0,4]", "int64[n]"), {}),
        ("MatMul", ("float32[n,0]", "float32[0,4]"), {}),
        ("ReduceSum", ("float32[n,0]",), {"axes": (1,), "keepdims": 0}),
    ],
)
def test_values_that_are_always_empty_have_no_kernel(op: str, inputs: tuple[str, ...], attrs: dict[str, Any]) -> None:
    """Kernels are written for extents of at least one; only the batch may be empty."""
    with pytest.raises(LookupError, match="no kernel covers"):
        kernel(op, *inputs, **attrs)
