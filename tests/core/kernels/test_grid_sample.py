"""GridSample: every mode, with positions inside, around and far outside the image."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType
from lathe.core.kernels.call import Request
from lathe.core.kernels.choose import select
from lathe.core.kernels.target import Target
from tests.core.kernels.harness import single_node
from tests.core.kernels.sweep import kernel, normal, sweep, tensor
from tests.core.targets import each_target, vectors

WAYS: list[dict[str, Any]] = [
    {"mode": mode, "padding_mode": padding, "align_corners": aligned}
    for mode, padding, aligned in itertools.product(
        ("linear", "nearest", "cubic"), ("zeros", "border", "reflection"), (0, 1)
    )
]


def _name(way: dict[str, Any]) -> str:
    return "-".join(map(str, way.values()))


def spread(dtype: DType, shape: tuple[int, ...]) -> Array:
    """Positions, some outside of -1 to 1. None is halfway between two pixels, where rounding decides."""
    return np.asarray(normal(dtype, shape) * 0.9 + 0.013).astype(dtype.numpy)


@each_target
@pytest.mark.parametrize("way", WAYS, ids=_name)
@pytest.mark.sample(4)
def test_modes(target: Target, way: dict[str, Any]) -> None:
    sweep("GridSample", "float32[n,3,7,20]", "float32[n,5,9,2]", target=target, sample=spread, tolerance=5e-5, **way)


@each_target
@pytest.mark.parametrize("way", WAYS[:12], ids=_name)
@pytest.mark.sample(4)
def test_other_ranks(target: Target, way: dict[str, Any]) -> None:
    for image, grid in (("n,3,11", "n,37,1"), ("n,2,4,5,6", "n,3,2,5,3")):
        sweep(
            "GridSample", f"float32[{image}]", f"float32[{grid}]", target=target, batches=(0, 2), sample=spread,
            tolerance=5e-5, **way,
        )  # fmt: skip


@each_target
def test_dynamic_extents(target: Target) -> None:
    sweep("GridSample", "float32[2,n,7,20]", "float32[2,n,9,2]", target=target, sample=spread, tolerance=5e-5)
    sweep("GridSample", "float32[2,3,n+1,20]", "float32[2,5,9,2]", target=target, sample=spread, tolerance=5e-5)


@pytest.mark.sample(5, native=True)
@pytest.mark.parametrize("way", WAYS, ids=_name)
def test_invalid_positions_read_nothing_outside(way: dict[str, Any]) -> None:
    """The result at an invalid position may be any number or NaN; results at other positions are right."""
    compiled = kernel("GridSample", "float32[1,1,4,4]", "float32[1,1,8,2]", **way)
    x = normal(DType.FLOAT32, (1, 1, 4, 4))
    grid = np.zeros((1, 1, 8, 2), np.float32)
    good = (grid + 0.2).astype(np.float32)
    grid[0, 0, :, 0] = [np.nan, np.inf, -np.inf, 3e38, -3e38, 1e20, -1e20, 0.2]
    grid[0, 0, :, 1] = [0.2, 0.2, np.nan, -3e38, np.inf, 1e9, -1e9, 0.2]
    found = compiled(x, grid)[0]
    assert compiled.status == 0
    np.testing.assert_allclose(found[0, 0, 0, 7], compiled(x, good)[0][0, 0, 0, 7])


def test_unsupported_forms_run_on_the_reference() -> None:
    for x, grid, way in (
        ("float64[n,3,7,20]", "float64[n,5,9,2]", {}),
        ("float32[n,3,4,5,6]", "float32[n,5,9,2,3]", {"mode": "cubic"}),
    ):
        graph = single_node("GridSample", tensor(x), tensor(grid), **way)
        assert select(Request(graph.nodes[0], graph.constants, vectors())) is None
