"""Copies on GPUs: tiled transposes, parts of Concat, Split and Pad, every element size."""

from __future__ import annotations

import numpy as np
import pytest

from lathe.core.ir.types import DType
from tests.core.cuda.gpu_kernel import GpuKernel, compiles, sweep


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool", "uint8"])
@pytest.mark.parametrize("shape", ["n,3", "n,33", "n,17,7"])
def test_transposes(dtype: str, shape: str) -> None:
    sweep("Transpose", f"{dtype}[{shape}]", perm=tuple(reversed(range(shape.count(",") + 1))))


def test_images_become_channels_last() -> None:
    kernel = sweep("Transpose", "float32[n,5,9,33]", perm=(0, 2, 3, 1), batches=(0, 1, 2))
    [(_, tiling)] = kernel.call.spec.pieces
    assert tiling.loops == ()  # of 5 channels; squares are for longer lines
    [(_, tiling)] = GpuKernel("Transpose", "float32[n,64,9,33]", perm=(0, 2, 3, 1)).call.spec.pieces
    assert tiling.sizes == (32, 32)
    sweep("Transpose", "float32[n,34,9,5]", perm=(0, 2, 3, 1), batches=(0, 1, 2))


def test_every_offer_agrees() -> None:
    for rank in range(GpuKernel("Transpose", "float32[n,40,33]", perm=(0, 2, 1)).offers):
        sweep("Transpose", "float32[n,40,33]", perm=(0, 2, 1), rank=rank, batches=(0, 3))


def test_concat_and_split() -> None:
    sweep("Concat", "float32[n,3]", "float32[n,17]", "float32[n,1]", axis=1)
    sweep("Concat", "float32[n,3]", "float32[5,3]", "float32[n,3]", axis=0)
    sweep("Split", "float32[n,20]", outputs=3, axis=1, split=(3, 10, 7))


def test_slices() -> None:
    sweep("Slice", "float32[n,20,3]", starts=(17,), ends=(2,), steps=(-3,), axes=(1,))


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect"])
def test_pads(mode: str) -> None:
    value = {"constant_value": np.float32(1.5)} if mode == "constant" else {}
    sweep("Pad", "float32[n,4,5]", pads=(0, 2, 1, 0, 3, 2), mode=mode, **value)


def test_blocks_expand_tile() -> None:
    sweep("DepthToSpace", "float32[n,8,3,5]", blocksize=2, batches=(0, 2))
    sweep("Tile", "float32[n,3,2]", repeats=(1, 2, 3))
    sweep("Flatten", "float32[n,3,2]", axis=1)


@pytest.mark.parametrize("to", [None, DType.BFLOAT16, DType.FLOAT16])
@pytest.mark.parametrize("block", [1, 2, 3])
def test_packed_images(block: int, to: DType | None) -> None:
    attributes = {"channels": 4, "block": block, "to": to}
    sweep("PackImage", "float32[n,3,6,12]", **attributes)
    sweep("PackImage", "float32[n,6,12,3]", layout="NHWC", **attributes)
    sweep("PackImage", "bfloat16[n,5,6,12]", **{**attributes, "channels": 6})


def test_packed_images_without_added_channels() -> None:
    sweep("PackImage", "float32[n,3,8,4]", channels=3, block=4)
    for rank in range(GpuKernel("PackImage", "float32[n,3,40,28]", channels=4, block=4).offers):
        sweep("PackImage", "float32[n,3,40,28]", channels=4, block=4, rank=rank, batches=(0, 3))


def test_compiles() -> None:
    compiles("PackImage", "float32[n,3,224,224]", channels=4, block=2, to=DType.BFLOAT16)
    compiles("Transpose", "float16[n,64,56,56]", perm=(0, 2, 3, 1))
    compiles("Concat", "float32[n,3]", "float32[n,17]", axis=1)
    compiles("Pad", "uint8[n,4,5]", pads=(0, 2, 1, 0, 3, 2))
    compiles("Transpose", "int64[n,3]", perm=(1, 0))
