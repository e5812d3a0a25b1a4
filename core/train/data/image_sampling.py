"""Samples images at positions between their pixels, for a whole batch at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Positions per call: the temporaries then fit in the cache, and are below malloc's mmap threshold.
_CHUNK_POSITIONS = 1 << 14


class Grid(NamedTuple):
    """An affine map per image: pixel p = (down, right) of the result is sampled at matrix @ (p - offset).

    Both positions are relative to the center of the image.
    """

    matrix: NDArray[np.float32]  # [N, 2, 2]
    offset: NDArray[np.float32]  # [N, 2]


def bilinear(images: NDArray[np.float32], grid: Grid, fill: np.float32) -> NDArray[np.float32]:
    """The images [N, C, H, W] sampled at the positions of the grid with bilinear interpolation.

    Pixels outside an image have the value `fill`, and positions at the border interpolate with them.
    """
    n, _, height, width = images.shape
    result = np.empty_like(images)
    step = max(_CHUNK_POSITIONS // (height * width), 1)
    for start in range(0, n, step):
        some = slice(start, start + step)
        result[some] = _bilinear(images[some], Grid(grid.matrix[some], grid.offset[some]), fill)
    return result


def _bilinear(images: NDArray[np.float32], grid: Grid, fill: np.float32) -> NDArray[np.float32]:
    n, channels, height, width = images.shape
    padded = np.full((n, height + 3, width + 3, channels), fill, np.float32)
    padded[:, 1:-2, 1:-2] = images.transpose(0, 2, 3, 1)
    down, right = _positions(grid, height, width)
    top, left = np.floor(down), np.floor(right)
    below, beside = (down - top)[..., None], (right - left)[..., None]
    stride = width + 3
    corner = ((top + 1) * stride + (left + 1)).astype(np.int32)
    corner += (np.arange(n, dtype=np.int32) * ((height + 3) * stride))[:, None]
    pixels = padded.reshape(-1, channels)
    upper = _interpolate(pixels, corner, beside)
    upper += below * (_interpolate(pixels, corner + stride, beside) - upper)
    return upper.reshape(n, height, width, channels).transpose(0, 3, 1, 2)


def _positions(grid: Grid, height: int, width: int) -> tuple[Any, Any]:
    """The positions to sample, down and right, each [N, H * W], clipped to one pixel outside the image."""
    center = np.array([(height - 1) / 2, (width - 1) / 2], np.float32)
    down = (np.arange(height, dtype=np.float32) - center[0])[None, :, None] - grid.offset[:, :1, None]
    right = (np.arange(width, dtype=np.float32) - center[1])[None, None, :] - grid.offset[:, 1:, None]
    positions = []
    for row, size in ((0, height), (1, width)):
        position = grid.matrix[:, row, :1, None] * down + grid.matrix[:, row, 1:, None] * right
        position += center[row]
        positions.append(np.clip(position, -1, size, out=position).reshape(len(position), -1))
    return positions[0], positions[1]


def _interpolate(pixels: Any, corner: Any, beside: Any) -> Any:
    """Linear interpolation between the pixels at index `corner` and the next index: [N, H * W, C].

    `beside`: the weight of the pixel at the next index, from 0 to 1.
    """
    left = pixels.take(corner, axis=0)
    right = pixels.take(corner + 1, axis=0)
    right -= left
    right *= beside
    right += left
    return right
