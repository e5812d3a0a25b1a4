"""Windows over images: where a block of output pixels meets its input."""

from __future__ import annotations

from dataclasses import dataclass

from core.kernels.catalog.cuda.image import Image
from core.kernels.catalog.pool import Window
from core.kernels.cuda.nest import split
from core.kernels.cuda.product import joined
from core.kernels.cuda.source import Writer, scaled, total


@dataclass(frozen=True, slots=True)
class Taps:
    """A block of elements of the image: their offsets without channels, and which lie inside (None: all)."""

    offset: str
    mask: str | None


class Windows:
    """The windows of some output pixels, numbered along batch and spatial axes by `pixels`, a block or a number."""

    def __init__(self, w: Writer, image: Image, pixels: str) -> None:
        self._w, self._image = w, image
        batch, *places = split(w, pixels, (image.batch, *image.counts))
        self._batch = w.let(scaled(batch, image.batch_step) or "0", "image")
        self._origins = [_origin(w, place, window) for place, window in zip(places, image.windows, strict=True)]

    def at(self, place: str | tuple[int, ...]) -> Taps:
        """The elements at one place of the windows: a number for all axes together as an expression, or one for each
        axis."""
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
        return Taps(w.let(total(offsets), "at"), joined(*masks))

    def within_padding(self, place: tuple[int, ...]) -> str | None:
        """Where one place of the windows lies in the image or its padding: a last window may reach further (None: all
        do)."""
        masks = [
            f"({origin} + {step * window.dilation} < {window.size + window.after})"
            for origin, step, window in zip(self._origins, place, self._image.windows, strict=True)
            if (window.count - 1) * window.stride + step * window.dilation >= window.size + window.before + window.after
        ]
        return joined(*masks)


class Reach:
    """The windows over some places, numbered along batch and spatial axes by `places`: for each place of a window, the
    window that meets the image there. The image that is read has a pixel for each window."""

    def __init__(self, w: Writer, image: Image, places: str) -> None:
        self._w, self._image = w, image
        batch, *axes = split(w, places, (image.batch, *image.sizes))
        self._batch = w.let(scaled(batch, image.batch_step) or "0", "image")
        self._places = [
            w.let(f"{axis} + {window.before}", "place") if window.before else axis
            for axis, window in zip(axes, image.windows, strict=True)
        ]

    def at(self, place: str | tuple[int, ...]) -> Taps:
        """The pixels of the windows that have these elements at this place, and where there are such windows."""
        windows, mask = self.windows_at(place)
        return Taps(self._w.let(self.offset(windows), "at"), mask)

    def offset(self, windows: list[str]) -> str:
        """The pixels of windows, without channels."""
        steps = [scaled(each, stride) for each, stride in zip(windows, self._image.steps, strict=True)]
        return total([self._batch, *steps])

    def windows_at(self, place: str | tuple[int, ...]) -> tuple[list[str], str | None]:
        """Along each axis, the number of the window; and where there is one (None: everywhere)."""
        w, image = self._w, self._image
        found, masks = [], []
        for axis, step, window in zip(self._places, _axes(w, place, image), image.windows, strict=True):
            moved = scaled(step, window.dilation)
            before = axis if moved is None else w.let(f"{axis} - {moved}", "before")
            number = before if window.stride == 1 else w.let(f"{before} // {window.stride}", "window")
            even = "" if window.stride == 1 else f" & ({before} % {window.stride} == 0)"
            found.append(number)
            if (window.kernel, window.stride, window.before) == (1, 1, 0) and window.count == window.size:
                continue  # each place is a window
            masks.append(w.let(f"({before} >= 0) & ({number} < {window.count}){even}", "inside"))
        return found, joined(*masks)


def _axes(w: Writer, place: str | tuple[int, ...], image: Image) -> list[str]:
    """A place of a window along every axis: its number along all of them may be an expression."""
    return split(w, place, image.kernel) if isinstance(place, str) else [str(each) for each in place]


def pixel_offset(w: Writer, image: Image, pixels: str) -> str:
    """Where pixels lie in an image that has one for each window, without channels."""
    batch, *places = split(w, pixels, (image.batch, *image.counts))
    steps = [scaled(place, stride) for place, stride in zip(places, image.steps, strict=True)]
    return total([scaled(batch, image.batch_step), *steps])


def _origin(w: Writer, place: str, window: Window) -> str:
    """Where a window begins along one axis."""
    moved = scaled(place, window.stride) or "0"
    return w.let(f"{moved} - {window.before}" if window.before else moved, "origin")
