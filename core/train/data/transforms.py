"""Augmentation: images changed at random on the host, in training only.

Every transform is a table of a recipe and a function of whole batches, float32 [N, C, H, W] to the same. What happens
to a row is decided by its random numbers alone (`Randoms`), so that order, batches and threads do not matter.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from core.train.data.philox import Randoms
from core.train.data.sampling import Grid, bilinear
from core.train.section import Section

Images: TypeAlias = NDArray[np.float32]

_Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
_Factors: TypeAlias = Annotated[
    tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]], Field(strict=False)
]


class Augment(Section):
    """Family base. `stream` tells the random numbers of one step from those of the others."""

    kind: str

    def apply(self, images: Images, randoms: Randoms, stream: int) -> Images:
        """The images changed: a new array, or the one given when nothing changes. `randoms` has a row per image."""
        raise NotImplementedError(f"{type(self).__name__} changes nothing")


class Flip(Augment):
    """Some images mirrored."""

    kind: Literal["flip"] = Field(default="flip", description="Some images mirrored.")
    axis: Literal["horizontal", "vertical"] = Field(
        default="horizontal", description="Left and right change sides, or top and bottom."
    )
    probability: _Share = Field(default=0.5, description="The share of the images that are mirrored.")

    def apply(self, images: Images, randoms: Randoms, stream: int) -> Images:
        chosen = randoms.uniform(stream, 1)[:, 0] < self.probability
        flipped = images[..., ::-1] if self.axis == "horizontal" else images[..., ::-1, :]
        return np.where(chosen[:, None, None, None], flipped, images)


class Crop(Augment):
    """A window of the image's own size, out of the image with a margin around it."""

    kind: Literal["crop"] = Field(
        default="crop", description="A window somewhere in the image with a margin around it."
    )
    padding: int = Field(ge=1, le=1024, description="Width of the margin, in pixels.")
    fill: float = Field(default=0.0, description="Value of the margin's pixels.")

    def apply(self, images: Images, randoms: Randoms, stream: int) -> Images:
        n, _, height, width = images.shape
        margin = (self.padding, self.padding)
        padded = np.pad(images, ((0, 0), (0, 0), margin, margin), constant_values=np.float32(self.fill))
        starts = (randoms.uniform(stream, 2) * (2 * self.padding + 1)).astype(np.intp)
        rows = starts[:, :1] + np.arange(height)
        columns = starts[:, 1:] + np.arange(width)
        picked = padded[np.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        return np.ascontiguousarray(np.moveaxis(picked, 3, 1))


class Affine(Augment):
    """Images turned, moved, scaled and sheared about their middle; bilinear between pixels."""

    kind: Literal["affine"] = Field(
        default="affine", description="Images turned, moved, scaled and sheared about their middle."
    )
    degrees: float = Field(default=0.0, ge=0, le=180, description="Turned by up to this much either way.")
    shift: _Share = Field(default=0.0, description="Moved by up to this share of height and width, each way.")
    scale: _Factors = Field(default=(1.0, 1.0), description="Scaled by a factor between these.")
    shear: float = Field(
        default=0.0, ge=0, lt=90, description="Sheared along the rows by up to this many degrees either way."
    )
    fill: float = Field(default=0.0, description="Value of what comes in from outside.")

    def apply(self, images: Images, randoms: Randoms, stream: int) -> Images:
        height, width = images.shape[2:]
        angle, shear, down, right, factor = (2 * randoms.uniform(stream, 5) - 1).T
        low, high = self.scale
        factor = np.float32((low + high) / 2) + factor * np.float32((high - low) / 2)
        matrix = inverse(
            angle * np.float32(np.deg2rad(self.degrees)), shear * np.float32(np.deg2rad(self.shear)), factor
        )
        offset = np.stack([down * np.float32(self.shift * height), right * np.float32(self.shift * width)], axis=1)
        return bilinear(images, Grid(matrix, offset), np.float32(self.fill))


class Noise(Augment):
    """Normal noise on every number."""

    kind: Literal["noise"] = Field(default="noise", description="Normal noise on every number.")
    sigma: float = Field(gt=0, description="Its standard deviation, in the units of the data as they are stored.")

    def apply(self, images: Images, randoms: Randoms, stream: int) -> Images:
        noise = randoms.normal(stream, images[0].size).reshape(images.shape)
        return images + np.float32(self.sigma) * noise


class Cutout(Augment):
    """A square of the image overwritten (T. DeVries and G. Taylor, 2017); at the border, what of it lies inside."""

    kind: Literal["cutout"] = Field(default="cutout", description="A square somewhere in the image overwritten.")
    size: int = Field(ge=1, le=4096, description="Its height and width, in pixels.")
    fill: float = Field(default=0.0, description="What it is overwritten with.")
    probability: _Share = Field(default=1.0, description="The share of the images to which it happens.")

    def apply(self, images: Images, randoms: Randoms, stream: int) -> Images:
        height, width = images.shape[2:]
        down, right, chance = randoms.uniform(stream, 3).T
        inside = self._covered(down, height)[:, :, None] & self._covered(right, width)[:, None, :]
        inside &= (chance < self.probability)[:, None, None]
        return np.where(inside[:, None], np.float32(self.fill), images)

    def _covered(self, place: NDArray[np.float32], size: int) -> NDArray[np.bool_]:
        """Which of `size` pixels the square covers, whose middle lies on any of them: [N, size]."""
        start = (place * size).astype(np.int64)[:, None] - self.size // 2
        pixels = np.arange(size)
        return (start <= pixels) & (pixels < start + self.size)


class Light(Augment):
    """Brightness and contrast changed: x -> x * factor + level."""

    kind: Literal["light"] = Field(default="light", description="Brightness and contrast changed.")
    brightness: float = Field(
        default=0.0, ge=0, description="Added or taken away, up to this much, in the units of the data."
    )
    contrast: _Factors = Field(default=(1.0, 1.0), description="Factor, between these.")

    def apply(self, images: Images, randoms: Randoms, stream: int) -> Images:
        level, factor = randoms.uniform(stream, 2).T[:, :, None, None, None]
        low, high = self.contrast
        return images * (low + factor * np.float32(high - low)) + (2 * level - 1) * np.float32(self.brightness)


Transform: TypeAlias = Annotated[Flip | Crop | Affine | Noise | Cutout | Light, Field(discriminator="kind")]


def inverse(angle: NDArray[np.float32], shear: NDArray[np.float32], factor: NDArray[np.float32]) -> NDArray[np.float32]:
    """From places in the result to places in the source, as [N, 2, 2] over (down, right), relative to the middle.

    The result is the source sheared along its rows, then scaled, then turned (counter-clockwise as seen).
    """
    cos, sin, tan = np.cos(angle) / factor, np.sin(angle) / factor, np.tan(shear)
    down = np.stack([cos, sin], axis=1)
    right = np.stack([-sin, cos], axis=1) - tan[:, None] * down
    return np.stack([down, right], axis=1)
