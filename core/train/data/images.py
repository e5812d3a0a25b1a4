"""Image files, through Pillow, in folders named by their class (`cat/1.jpg`), or part and class (`train/cat/1.jpg`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from core.ir.types import DType
from core.train.data.dataset import ArraySource, Column, Dataset, Rows, Source, Values, joined
from core.train.data.extra import pillow
from core.train.data.given import Given
from core.train.data.members import DAMAGE, Members, part_of

MOST_PIXELS = 1 << 25  # of one image as it is stored
_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "PPM", "TIFF")
_GRAY = ("1", "L", "LA", "I;16")

_Result = TypeVar("_Result")


def is_images(members: Members) -> bool:
    """Whether there are files named as images are."""
    return any(_is_image(name) for name in members.names)


def open_images(given: Given, members: Members) -> Dataset:
    """Columns `image`, uint8 [height, width, 1 or 3], and `label`, the number of the folder in the order of names.

    All images have the size of the first one unless `given.image_size` says another; they are gray when the first is.
    """
    if not is_images(members):
        raise given.error("holds no images")
    places = _places(given, [name for name in members.names if _is_image(name)])
    codes = {label: code for code, label in enumerate(sorted({place.label for place in places}))}
    reader = _Reader.of(given, members, places[0].name)
    datasets = {}
    for part in sorted({place.part for place in places}, key=("", "train", "validation", "test").index):
        own = [place for place in places if place.part == part]
        labels = np.array([codes[place.label] for place in own], np.int64)
        sources: dict[str, Source] = {
            "image": ImageSource(reader, tuple(place.name for place in own)),
            "label": ArraySource(Column("label", DType.INT64, classes=tuple(codes)), labels),
        }
        datasets[part] = Dataset(given.name, sources, given.digest, "images")
    return joined(given.name, datasets, given.digest)


@dataclass(frozen=True)
class _Place:
    name: str
    part: str
    label: str


def _places(given: Given, names: Sequence[str]) -> list[_Place]:
    """Part and class of every image. DataError when the folders do not say them for all alike."""
    places, tops = [], dict[tuple[str, ...], str]()
    for name in names:
        *folders, label = name.split("/")[:-1] or [""]
        if not label:
            raise given.error(f"'{name}' lies in no folder, whose name would be its class")
        part = part_of(folders[-1]) if folders else None
        tops.setdefault((*folders[: -1 if part else None], "*" if part else ""), name)
        places.append(_Place(name, part or "", label))
    if len(tops) > 1:
        one, other, *_ = tops.values()
        raise given.error(f"'{one}' and '{other}': expected class/image or part/class/image for all alike")
    return places


@dataclass(frozen=True)
class ImageSource:
    """Images that are decoded when their rows are asked for."""

    reader: _Reader
    names: tuple[str, ...]

    @property
    def column(self) -> Column:
        return Column("image", DType.UINT8, (*self.reader.size, 1 if self.reader.gray else 3), "HWC")

    def __len__(self) -> int:
        return len(self.names)

    def take(self, rows: Rows) -> Values:
        taken = np.empty((len(rows), *self.column.shape), np.uint8)
        for place, row in enumerate(rows.tolist()):
            taken[place] = self.reader.pixels(self.names[row])
        return taken


@dataclass(frozen=True)
class _Reader:
    """Reads images into pixels of one size."""

    given: Given
    members: Members
    size: tuple[int, int]
    gray: bool

    @classmethod
    def of(cls, given: Given, members: Members, first: str) -> _Reader:
        """Size and number of channels from the first image."""
        probe = cls(given, members, (0, 0), False)
        size, mode = probe._opened(first, lambda image: (_turned_size(image), image.mode))
        return cls(given, members, given.image_size or size, mode in _GRAY)

    def pixels(self, name: str) -> Values:
        """[height, width, channels]. DataError, naming the file, for what is no image or has another size."""
        return self._opened(name, self._decoded)

    def _decoded(self, image: Any) -> Values:
        size = _turned_size(image)
        if self.given.image_size is None and size != self.size:
            wanted = f"{self.size[0]} x {self.size[1]}"
            raise ValueError(f"{size[0]} x {size[1]} pixels, the first image {wanted}; `image_size` brings all to one")
        if size != self.size and image.format == "JPEG":
            least = max(self.size)  # either side: the image may lie on its side
            image.draft(None, (least, least))  # decodes at a fraction of the size where that is enough
        image = pillow().ImageOps.exif_transpose(image.convert("L" if self.gray else "RGB"))
        if size != self.size:
            image = image.resize(self.size[::-1], pillow().Image.Resampling.BILINEAR)
        return np.asarray(image).reshape(*self.size, -1)

    def _opened(self, name: str, then: Callable[[Any], _Result]) -> _Result:
        library = pillow().Image
        try:
            with self.members.open(name) as file, library.open(file, formats=_FORMATS) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise ValueError(f"{image.height} x {image.width} pixels, at most {MOST_PIXELS}")
                return then(image)
        except (*DAMAGE, ValueError, SyntaxError, library.DecompressionBombError) as error:
            raise self.given.error(f"'{name}' cannot be read: {error}", "image") from None


def _turned_size(image: Any) -> tuple[int, int]:
    """Height and width as the camera's orientation (EXIF tag 274) shows the image."""
    across = image.getexif().get(274, 1) in (5, 6, 7, 8)
    return (image.width, image.height) if across else (image.height, image.width)


def _is_image(name: str) -> bool:
    return name.lower().endswith(_SUFFIXES)
