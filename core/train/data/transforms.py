"""Data augmentation: random changes of images on the host, in training only.

Each transform is a table of a recipe and a function of batches, float32 [N, C, H, W] to the same type. The change of a
row depends only on the random numbers of the row (`RowRandoms`), not on order, batch size or threads.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from lathe.core.section import Section
from lathe.core.train.data.image_sampling import Grid, bilinear
from lathe.core.train.data.philox import RowRandoms

Images: TypeAlias = NDArray[np.float32]

_Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
_Factors: TypeAlias = Annotated[
    tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]], Field(strict=False)
]


class Augment(Section):
    """The base class of transforms."""

    kind: str

    def apply(self, images: Images, randoms: RowRandoms, stream: int) -> Images:
        """The transformed images. `randoms` has one row per image; `stream` selects independent random numbers."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `apply`")


class Flip(Augment):
    """Random flip: mirrors some images."""

    kind: Literal["flip"] = Field(default="flip", description="Random flip: mirror some images.")
    axis: Literal["horizontal", "vertical"] = Field(
        default="horizontal", description="`horizontal` swaps left and right, `vertical` top and bottom."
    )
    probability: _Share = Field(default=0.5, description="Probability that an image is mirrored.")

    def apply(self, images: Images, randoms: RowRandoms, stream: int) -> Images:
        chosen = randoms.uniform(stream, 1)[:, 0] < self.probability
        flipped = images[..., ::-1] if self.axis == "horizontal" else images[..., ::-1, :]
        return np.where(chosen[:, None, None, None], flipped, images)


class Crop(Augment):
    """Random crop: pads the image and cuts out a window of the original size."""

    kind: Literal["crop"] = Field(
        default="crop", description="Random crop: pad the image and cut out a window of the original size."
    )
    padding: int = Field(ge=1, le=1024, description="Padding on each side, in pixels.")
    fill: float = Field(default=0.0, description="Value of the padding.")

    def apply(self, images: Images, randoms: RowRandoms, stream: int) -> Images:
        n, _, height, width = images.shape
        margin = (self.padding, self.padding)
        padded = np.pad(images, ((0, 0), (0, 0), margin, margin), constant_values=np.float32(self.fill))
        starts = (randoms.uniform(stream, 2) * (2 * self.padding + 1)).astype(np.intp)
        rows = starts[:, :1] + np.arange(height)
        columns = starts[:, 1:] + np.arange(width)
        windows = padded[np.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        return np.ascontiguousarray(np.moveaxis(windows, 3, 1))


class Affine(Augment):
    """Random affine transformation about the center, with bilinear interpolation."""

    kind: Literal["affine"] = Field(
        default="affine",
        description="Random rotation, scaling and shear about the center of the image, then a random shift.",
    )
    degrees: float = Field(default=0.0, ge=0, le=180, description="Largest rotation in degrees, in both directions.")
    shift: _Share = Field(default=0.0, description="Largest shift as a share of height and width, in both directions.")
    scale: _Factors = Field(default=(1.0, 1.0), description="Smallest and largest scale factor.")
    shear: float = Field(
        default=0.0, ge=0, lt=90, description="Largest shear along the rows in degrees, in both directions."
    )
    fill: float = Field(default=0.0, description="Value of pixels from outside the image.")

    def apply(self, images: Images, randoms: RowRandoms, stream: int) -> Images:
        height, width = images.shape[2:]
        angle, shear, down, right, factor = (2 * randoms.uniform(stream, 5) - 1).T
        low, high = self.scale
        factor = np.float32((low + high) / 2) + factor * np.float32((high - low) / 2)
        matrix = inverse_matrices(
            angle * np.float32(np.deg2rad(self.degrees)), shear * np.float32(np.deg2rad(self.shear)), factor
        )
        offset = np.stack([down * np.float32(self.shift * height), right * np.float32(self.shift * width)], axis=1)
        return bilinear(images, Grid(matrix, offset), np.float32(self.fill))


class Noise(Augment):
    """Adds Gaussian noise."""

    kind: Literal["noise"] = Field(default="noise", description="Gaussian noise on every value.")
    sigma: float = Field(gt=0, description="Standard deviation of the noise, in the units of the stored data.")

    def apply(self, images: Images, randoms: RowRandoms, stream: int) -> Images:
        noise = randoms.normal(stream, images[0].size).reshape(images.shape)
        return images + np.float32(self.sigma) * noise


class Cutout(Augment):
    """Cutout (T. DeVries and G. Taylor, 2017): overwrites a square, which is clipped at the border of the image."""

    kind: Literal["cutout"] = Field(default="cutout", description="Cutout: overwrite a square at a random position.")
    size: int = Field(ge=1, le=4096, description="Height and width of the square, in pixels.")
    fill: float = Field(default=0.0, description="Value of the square.")
    probability: _Share = Field(default=1.0, description="Probability that an image gets a square.")

    def apply(self, images: Images, randoms: RowRandoms, stream: int) -> Images:
        height, width = images.shape[2:]
        down, right, chance = randoms.uniform(stream, 3).T
        inside = self._covered_pixels(down, height)[:, :, None] & self._covered_pixels(right, width)[:, None, :]
        inside &= (chance < self.probability)[:, None, None]
        return np.where(inside[:, None], np.float32(self.fill), images)

    def _covered_pixels(self, place: NDArray[np.float32], size: int) -> NDArray[np.bool_]:
        """bool [N, size]: which of the `size` pixels along an axis the square of each image covers.

        `place` [N] is the position of the square's center as a share of the axis, from 0 to below 1.
        """
        start = (place * size).astype(np.int64)[:, None] - self.size // 2
        pixels = np.arange(size)
        return (start <= pixels) & (pixels < start + self.size)


class Light(Augment):
    """Random brightness and contrast: x -> x * factor + level."""

    kind: Literal["light"] = Field(default="light", description="Random brightness and contrast.")
    brightness: float = Field(
        default=0.0,
        ge=0,
        description="Largest change of brightness in both directions, in the units of the stored data.",
    )
    contrast: _Factors = Field(default=(1.0, 1.0), description="Smallest and largest contrast factor.")

    def apply(self, images: Images, randoms: RowRandoms, stream: int) -> Images:
        level, factor = randoms.uniform(stream, 2).T[:, :, None, None, None]
        low, high = self.contrast
        return images * (low + factor * np.float32(high - low)) + (2 * level - 1) * np.float32(self.brightness)


Transform: TypeAlias = Annotated[Flip | Crop | Affine | Noise | Cutout | Light, Field(discriminator="kind")]


def inverse_matrices(
    angle: NDArray[np.float32], shear: NDArray[np.float32], factor: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Matrices [N, 2, 2] from positions in the result to positions in the source, (down, right) from the center.

    `angle` and `shear` are in radians; all arguments are float32 [N].
    The result is the source sheared along its rows, then scaled, then rotated counter-clockwise.
    """
    cos, sin, tan = np.cos(angle) / factor, np.sin(angle) / factor, np.tan(shear)
    down = np.stack([cos, sin], axis=1)
    right = np.stack([-sin, cos], axis=1) - tan[:, None] * down
    return np.stack([down, right], axis=1)
