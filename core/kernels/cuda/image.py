"""Offsets and masks of sliding windows over images, for blocks of pixels in a GPU kernel."""

from __future__ import annotations

from dataclasses import dataclass

from lathe.core.kernels.cuda.nest import split
from lathe.core.kernels.cuda.product import join_masks
from lathe.core.kernels.cuda.source import Writer, scaled, total
from lathe.core.kernels.shared.cuda_image import Image
from lathe.core.kernels.shared.window import Window


@dataclass(frozen=True, slots=True)
class Taps:
    """Expressions for a block of pixels: their offsets in elements, to which the caller adds the channel's, and a mask.

    The mask is true for pixels inside the image; None if all are.
    """

    offset: str
    mask: str | None


class Windows:
    """The windows of a block of output pixels.

    `pixels` is an expression for their row-major numbers over batch and spatial axes, a block or a scalar.
    """

    def __init__(self, w: Writer, image: Image, pixels: str) -> None:
        self._w, self._image = w, image
        batch, *places = split(w, pixels, (image.batch, *image.counts))
        self._batch = w.let(scaled(batch, image.batch_step) or "0", "image")
        self._origins = [_origin(w, place, window) for place, window in zip(places, image.windows, strict=True)]

    def at(self, place: str | tuple[int, ...]) -> Taps:
        """The image pixels that the windows have at one of their places.

        The place is an expression for its row-major number in the window, or one number per axis.
        """
        image, w = self._image, self._w
        steps = _axes(w, place, image)
        offsets: list[str | None] = [self._batch]
        masks: list[str | None] = []
        for origin, step, window, stride in zip(self._origins, steps, image.windows, image.steps, strict=True):
            moved = scaled(step, window.dilation)
            index = origin if moved is None else w.let(f"{origin} + {moved}", "at")
            offsets.append(scaled(index, stride))
            if window.inside != (0, window.count):
                masks.append(w.let(f"({index} >= 0) & ({index} < {window.size})", "inside"))
        return Taps(w.let(total(offsets), "at"), join_masks(*masks))

    def within_padding(self, place: tuple[int, ...]) -> str | None:
        """A mask of the windows whose given place lies in the image or its padding; None if all do.

        The last windows may reach beyond the padding.
        """
        masks = [
            f"({origin} + {step * window.dilation} < {window.size + window.after})"
            for origin, step, window in zip(self._origins, place, self._image.windows, strict=True)
            if (window.count - 1) * window.stride + step * window.dilation >= window.size + window.before + window.after
        ]
        return join_masks(*masks)


class CoveringWindows:
    """The windows that cover given pixels of an image, for transposed convolutions and gradients.

    `places` is an expression for the row-major numbers of these pixels over batch and spatial axes. For each place of a
    window there is at most one window that has the pixel there. The image that is read has one pixel per window.
    """

    def __init__(self, w: Writer, image: Image, places: str) -> None:
        self._w, self._image = w, image
        batch, *axes = split(w, places, (image.batch, *image.sizes))
        self._batch = w.let(scaled(batch, image.batch_step) or "0", "image")
        self._places = [
            w.let(f"{axis} + {window.before}", "place") if window.before else axis
            for axis, window in zip(axes, image.windows, strict=True)
        ]

    def at(self, place: str | tuple[int, ...]) -> Taps:
        """The pixels that belong to the windows which have the given pixels at `place`; masked where there is none."""
        windows, mask = self.windows_at(place)
        return Taps(self._w.let(self.offset(windows), "at"), mask)

    def offset(self, windows: list[str]) -> str:
        """The expression of the offsets of the pixels that belong to `windows`, their numbers along each axis.

        The caller adds the channel's offset.
        """
        steps = [scaled(each, stride) for each, stride in zip(windows, self._image.steps, strict=True)]
        return total([self._batch, *steps])

    def windows_at(self, place: str | tuple[int, ...]) -> tuple[list[str], str | None]:
        """The number of the window along each axis, and a mask of where there is a window (None: everywhere)."""
        w, image = self._w, self._image
        found, masks = [], []
        for axis, step, window in zip(self._places, _axes(w, place, image), image.windows, strict=True):
            moved = scaled(step, window.dilation)
            before = axis if moved is None else w.let(f"{axis} - {moved}", "before")
            number = before if window.stride == 1 else w.let(f"{before} // {window.stride}", "window")
            even = "" if window.stride == 1 else f" & ({before} % {window.stride} == 0)"
            found.append(number)
            if (window.kernel, window.stride, window.before) == (1, 1, 0) and window.count == window.size:
                continue  # each place has a window
            masks.append(w.let(f"({before} >= 0) & ({number} < {window.count}){even}", "inside"))
        return found, join_masks(*masks)


def _axes(w: Writer, place: str | tuple[int, ...], image: Image) -> list[str]:
    """Expressions for the coordinates of a window place, which is its row-major number as text, or one int per axis."""
    return split(w, place, image.kernel) if isinstance(place, str) else [str(each) for each in place]


def pixel_offset(w: Writer, image: Image, pixels: str) -> str:
    """The expression of the offsets of pixels in an image with one pixel per window, without the channel's offset."""
    batch, *places = split(w, pixels, (image.batch, *image.counts))
    steps = [scaled(place, stride) for place, stride in zip(places, image.steps, strict=True)]
    return total([scaled(batch, image.batch_step), *steps])


def _origin(w: Writer, place: str, window: Window) -> str:
    """The first image place of a window along one axis; it may lie in the padding."""
    moved = scaled(place, window.stride) or "0"
    return w.let(f"{moved} - {window.before}" if window.before else moved, "origin")
