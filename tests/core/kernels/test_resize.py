"""Resize of images in both layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe.core.ir.dim import symbol
from lathe.core.kernels.call import Request
from lathe.core.kernels.choose import select
from lathe.core.kernels.target import Target
from tests.core.kernels.harness import single_node
from tests.core.kernels.sweep import kernel, sweep, tensor
from tests.core.targets import each_target

WAYS: list[dict[str, Any]] = [
    {"mode": "nearest", "scales": (1.0, 1.0, 2.0, 2.0), "coordinate_transformation_mode": "asymmetric"},
    {"mode": "nearest", "scales": (1.0, 1.0, 0.6, 1.7), "nearest_mode": "floor"},
    {"mode": "linear", "scales": (1.0, 1.0, 2.0, 3.0)},
    {"mode": "linear", "sizes": (9, 23), "axes": (2, 3), "coordinate_transformation_mode": "align_corners"},
    {"mode": "linear", "sizes": (3, 4), "axes": (2, 3), "antialias": 1},
    {"mode": "cubic", "scales": (1.0, 1.0, 1.5, 0.8)},
]


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_modes(target: Target, way: dict[str, Any]) -> None:
    sweep("Resize", "float32[n,3,7,20]", target=target, batches=(0, 2), **way)
    sweep("Resize", "float32[n,7,5,19]", target=target, batches=(0, 2), layout="NHWC", **way)


@each_target
@pytest.mark.parametrize("way", WAYS[::2], ids=lambda way: "-".join(map(str, way.values())))
def test_rows_along_the_channels(target: Target, way: dict[str, Any]) -> None:
    sweep("Resize", "float32[2,2*n,7,20]", target=target, batches=(0, 2), **way)


@each_target
def test_sizes_of_all_axes_may_be_given(target: Target) -> None:
    """Exporters write such sizes for one mask per row; here also for several images."""
    for shape in ((symbol("n"), 3), (1, symbol("n")), (2, symbol("n"))):
        sizes = (*shape, 3, 5)
        sweep("Resize", f"float32[{shape[0]},{shape[1]},7,20]", target=target, batches=(0, 2), sizes=sizes)


def test_large_images_are_split_among_threads() -> None:
    compiled = kernel("Resize", "float32[n,32,32,16]", layout="NHWC", mode="linear", scales=(1.0, 1.0, 4.0, 4.0))
    for threads in (1, 3):
        compiled.check(np.ones((2, 32, 32, 16), np.float32), threads=threads)


OTHER_AXES: dict[str, tuple[str, dict[str, Any]]] = {
    "a line": ("float32[n,3,7]", {"mode": "linear", "scales": (1.0, 1.0, 2.5)}),
    "a line, channels last": ("float32[n,7,19]", {"mode": "nearest", "scales": (1.0, 1.0, 2.0), "layout": "NHWC"}),
    "channels": ("float32[n,3,7,20]", {"mode": "linear", "scales": (1.0, 2.0, 1.0, 1.0)}),
    "height": ("float32[n,3,7,20]", {"mode": "cubic", "scales": (1.0, 1.0, 2.0, 1.0)}),
    "a volume": ("float32[n,2,3,4,5]", {"mode": "linear", "scales": (1.0, 1.0, 2.0, 1.5, 3.0)}),
    "a volume, channels last": (
        "float32[n,3,4,5,6]",
        {"mode": "linear", "sizes": (6, 3, 9), "axes": (2, 3, 4), "layout": "NHWC"},
    ),
    "depth and width": ("float32[n,2,3,4,5]", {"mode": "nearest", "scales": (1.0, 1.0, 2.0, 1.0, 0.6)}),
}


@each_target
@pytest.mark.parametrize("name", OTHER_AXES)
def test_other_axes(target: Target, name: str) -> None:
    image, way = OTHER_AXES[name]
    sweep("Resize", image, target=target, batches=(0, 2), **way)


@pytest.mark.parametrize(
    ("image", "scales"),
    [
        ("float32[n,3,7,20,5]", (1.0, 2.0, 1.0, 1.0, 2.0)),  # axes far apart
        ("float32[n,3,7]", (1.0, 1.0, 2.0**20)),  # a table of taps with 7,340,032 entries
    ],
)
def test_some_run_on_the_reference(image: str, scales: tuple[float, ...]) -> None:
    graph = single_node("Resize", tensor(image), scales=scales)
    assert select(Request(graph.nodes[0], graph.constants, kernel("Relu", "float32[n]").target)) is None
