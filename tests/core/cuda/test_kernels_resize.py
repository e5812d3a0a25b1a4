"""Resize on GPUs, in both layouts and every mode."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.cuda.gpu_kernel import compiles, sweep

WAYS: list[dict[str, Any]] = [
    {"mode": "nearest", "scales": (1.0, 1.0, 2.0, 2.0), "coordinate_transformation_mode": "asymmetric"},
    {"mode": "nearest", "scales": (1.0, 1.0, 0.6, 1.7), "nearest_mode": "floor"},
    {"mode": "linear", "sizes": (9, 23), "axes": (2, 3), "coordinate_transformation_mode": "align_corners"},
    {"mode": "linear", "sizes": (3, 4), "axes": (2, 3), "antialias": 1},
    {"mode": "cubic", "scales": (1.0, 1.0, 1.5, 0.8)},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_ways(way: dict[str, Any]) -> None:
    sweep("Resize", "float32[n,3,7,20]", batches=(0, 2), **way)
    sweep("Resize", "float32[n,7,5,19]", batches=(0, 2), layout="NHWC", **way)
    sweep("Resize", "float32[2,n,7,20]", batches=(0, 2), **way)


def test_one_result() -> None:
    sweep("Resize", "float32[1,1,7,20]", sizes=(1, 1), axes=(2, 3), mode="linear", batches=(1,))
    sweep("Resize", "float32[n,1,7,20]", sizes=(1, 9), axes=(2, 3), mode="linear", batches=(2,))


def test_compiles() -> None:
    compiles("Resize", "float32[n,32,32,16]", layout="NHWC", mode="linear", scales=(1.0, 1.0, 2.0, 2.0))
