"""Regions of images resampled to bins, inside the images, across their borders and of no numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.errors import FeedError
from lathe.core.ir.types import DType
from lathe.core.kernels.call import Status
from lathe.core.kernels.target import Target
from tests.core.kernels.sweep import kernel, normal
from tests.core.small_models import assert_like_onnx_runtime, model
from tests.core.targets import each_target

_MODES = [
    {"sampling_ratio": 2, "output_height": 7, "output_width": 7, "spatial_scale": 0.25},
    {"sampling_ratio": 0, "output_height": 3, "output_width": 5, "spatial_scale": 0.5},
    {"sampling_ratio": 1, "output_height": 1, "output_width": 1, "spatial_scale": 1.0},
    {"sampling_ratio": 3, "output_height": 2, "output_width": 9, "spatial_scale": 0.125},
]


def regions(count: int, size: float = 40.0) -> Any:
    """Random regions: some reach beyond an image of `size` or lie outside of it, some have a negative extent."""
    rng = np.random.default_rng(count)
    return rng.uniform(-0.3 * size, 1.3 * size, (count, 4)).astype(np.float32)


@pytest.mark.sample(5, native=True)
@each_target
@pytest.mark.parametrize("attrs", _MODES, ids=str)
@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("transform", ["half_pixel", "output_half_pixel"])
def test_regions(target: Target, attrs: dict[str, Any], mode: str, transform: str) -> None:
    compiled = kernel(
        "RoiAlign", "float32[3,n+1,9,11]", "float32[n,4]", "int64[n]",
        target=target, mode=mode, coordinate_transformation_mode=transform, **attrs,
    )  # fmt: skip
    for count, threads in ((0, 1), (1, 2), (9, 3), (17, 1)):
        x, images = normal(DType.FLOAT32, (3, count + 1, 9, 11)), np.arange(count) % 3
        boxes = np.sort(regions(count).reshape(-1, 2, 2), axis=1).reshape(-1, 4) if count % 2 else regions(count)
        compiled.check(x, boxes, images, threads=threads, rtol=1e-4, atol=1e-5)
        assert compiled.status == Status.OK


@each_target
def test_invalid_regions(target: Target) -> None:
    """NaN gives zeros; an image index out of range and a region of too many samples are refused."""
    operands = ("float32[2,3,8,8]", "float32[n,4]", "int64[n]")
    compiled = kernel("RoiAlign", *operands, target=target, output_height=2, output_width=2, sampling_ratio=0)
    x, good = normal(DType.FLOAT32, (2, 3, 8, 8)), np.float32([[1, 1, 5, 6]])
    (found,) = compiled(x, np.full((1, 4), np.nan, np.float32), np.zeros(1, np.int64))
    assert compiled.status == Status.OK
    np.testing.assert_array_equal(found, np.zeros_like(found))
    for image in (-1, 2, 2**40):
        compiled(x, good, np.array([image]))
        assert compiled.status == Status.INDEX_OUT_OF_RANGE
    compiled(x, np.float32([[0, 0, 1e30, 4]]), np.zeros(1, np.int64))
    assert compiled.status == Status.INDEX_OUT_OF_RANGE


@pytest.mark.parametrize("sizes", ["2,5,20,17", "N,C,H,W"])
@pytest.mark.parametrize("ratio", [0, 2])
def test_like_onnx_runtime(sizes: str, ratio: int) -> None:
    attrs = f'output_height = 5, output_width = 4, sampling_ratio = {ratio}, spatial_scale = 0.5, mode = "avg"'
    data = model(
        f"float[{sizes}] x, float[R,4] regions, int64[R] images => float[] y",
        f"y = RoiAlign <{attrs}> (x, regions, images)",
    )
    boxes = np.sort(regions(7).reshape(-1, 2, 2), axis=1).reshape(-1, 4)
    feeds = {"x": normal(DType.FLOAT32, (2, 5, 20, 17)), "regions": boxes, "images": np.arange(7) % 2}
    assert_like_onnx_runtime(data, feeds)
    with lathe.compile(data, threads=1, tune="off") as session:
        session.run(feeds)
        assert "FALLBACK" not in session.explain()
        with pytest.raises(FeedError, match="out of range"):
            session.run({**feeds, "images": np.full(7, 2)})
