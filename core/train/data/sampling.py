"""Images read at places between their pixels, a whole batch at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Places at once: their temporaries stay in the cache, and below what malloc asks of the system each time.
_MOST_AT_ONCE = 1 << 14


class Grid(NamedTuple):
    """Where each image is read: place p (down, right) of the result shows place matrix @ (p - offset), both relative to
    the middle."""

    matrix: NDArray[np.float32]  # [N, 2, 2]
    offset: NDArray[np.float32]  # [N, 2]


def bilinear(images: NDArray[np.float32], grid: Grid, fill: np.float32) -> NDArray[np.float32]:
    """The images [N, C, H, W] as the grid shows them; pixels outside are `fill`, also those next to the border between
    which and an inner one a place lies."""
    n, _, height, width = images.shape
    result = np.empty_like(images)
    step = max(_MOST_AT_ONCE // (height * width), 1)
    for start in range(0, n, step):
        some = slice(start, start + step)
        result[some] = _bilinear(images[some], Grid(grid.matrix[some], grid.offset[some]), fill)
    return result


def _bilinear(images: NDArray[np.float32], grid: Grid, fill: np.float32) -> NDArray[np.float32]:
    n, channels, height, width = images.shape
    padded = np.full((n, height + 3, width + 3, channels), fill, np.float32)
    padded[:, 1:-2, 1:-2] = images.transpose(0, 2, 3, 1)
    down, right = _places(grid, height, width)
    top, left = np.floor(down), np.floor(right)
    below, beside = (down - top)[..., None], (right - left)[..., None]
    stride = width + 3
    corner = ((top + 1) * stride + (left + 1)).astype(np.int32)
    corner += (np.arange(n, dtype=np.int32) * ((height + 3) * stride))[:, None]
    pixels = padded.reshape(-1, channels)
    upper = _between(pixels, corner, beside)
    upper += below * (_between(pixels, corner + stride, beside) - upper)
    return upper.reshape(n, height, width, channels).transpose(0, 3, 1, 2)


def _places(grid: Grid, height: int, width: int) -> tuple[Any, Any]:
    """Down and right of the places to be read, each [N, H * W], drawn in to just outside the image."""
    middle = np.array([(height - 1) / 2, (width - 1) / 2], np.float32)
    down = (np.arange(height, dtype=np.float32) - middle[0])[None, :, None] - grid.offset[:, :1, None]
    right = (np.arange(width, dtype=np.float32) - middle[1])[None, None, :] - grid.offset[:, 1:, None]
    places = []
    for row, size in ((0, height), (1, width)):
        place = grid.matrix[:, row, :1, None] * down + grid.matrix[:, row, 1:, None] * right
        place += middle[row]
        places.append(np.clip(place, -1, size, out=place).reshape(len(place), -1))
    return places[0], places[1]


def _between(pixels: Any, corner: Any, beside: Any) -> Any:
    """Between the pixels at `corner` and those right of them: [N, H * W, C]."""
    left = pixels.take(corner, axis=0)
    right = pixels.take(corner + 1, axis=0)
    right -= left
    right *= beside
    right += left
    return right
