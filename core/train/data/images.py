"""Image files, read with Pillow, in folders per class (`cat/1.jpg`) or per part and class (`train/cat/1.jpg`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from lathe.core.ir.types import DType
from lathe.core.train.data.dataset import ArraySource, Column, Dataset, Rows, Source, Values, join_parts
from lathe.core.train.data.location import Location
from lathe.core.train.data.members import DAMAGE_ERRORS, Members, part_of
from lathe.core.train.data.optional_packages import pillow
from lathe.core.train.data.orientation import is_rotated, orientation_of, upright

MAX_PIXELS = 1 << 25  # most pixels of a stored image
_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "PPM", "TIFF")
_GRAY = ("1", "L", "LA", "I;16")

_Result = TypeVar("_Result")


def is_images(members: Members) -> bool:
    """Whether some file has the suffix of an image format."""
    return any(_is_image(name) for name in members.names)


def open_images(location: Location, members: Members) -> Dataset:
    """A dataset of the columns `image`, uint8 [height, width, 1 or 3], and `label`, int64: the index of the class.

    The classes are the names of the folders, in order. The size is `image_size`, by default that of the first image,
    which all others must have. If the first image is grayscale, all become grayscale, otherwise all become RGB. An
    EXIF orientation is applied, a damaged one is ignored. If the folders name only one part, the dataset has no parts,
    and that folder is no class all the same. DataError without images, for folders that do not fit (see
    `_image_files`), or for a first image that cannot be read; the others are decoded by `take`.
    """
    if not is_images(members):
        raise location.error("holds no images")
    files = _image_files(location, [name for name in members.names if _is_image(name)])
    codes = {label: code for code, label in enumerate(sorted({place.label for place in files}))}
    reader = _Reader.of(location, members, files[0].name)
    datasets = {}
    for part in sorted({place.part for place in files}, key=("", "train", "validation", "test").index):
        own = [place for place in files if place.part == part]
        labels = np.array([codes[place.label] for place in own], np.int64)
        sources: dict[str, Source] = {
            "image": ImageSource(reader, tuple(place.name for place in own)),
            "label": ArraySource(Column("label", DType.INT64, classes=tuple(codes)), labels),
        }
        datasets[part] = Dataset(location.name, sources, location.digest, "images")
    return join_parts(location.name, datasets, location.digest)


@dataclass(frozen=True)
class _ImageFile:
    name: str
    part: str
    label: str


def _image_files(location: Location, names: Sequence[str]) -> list[_ImageFile]:
    """The name, part and class of every image, from its folders; the part is "" if no folder names one.

    The class is the innermost folder, the part the folder around it. DataError if an image is in no folder, if only
    some images have a part, or if they differ in the folders around part and class.
    """
    files, tops = [], dict[tuple[str, ...], str]()
    for name in names:
        *folders, label = name.split("/")[:-1] or [""]
        if not label:
            raise location.error(f"'{name}': expected a folder with the name of its class")
        part = part_of(folders[-1]) if folders else None
        tops.setdefault((*folders[: -1 if part else None], "*" if part else ""), name)
        files.append(_ImageFile(name, part or "", label))
    if len(tops) > 1:
        one, other, *_ = tops.values()
        raise location.error(f"'{one}' and '{other}': expected class/image for all images, or part/class/image for all")
    return files


@dataclass(frozen=True)
class ImageSource:
    """A column of images that are decoded when `take` reads them."""

    reader: _Reader
    names: tuple[str, ...]

    @property
    def column(self) -> Column:
        return Column("image", DType.UINT8, (*self.reader.size, 1 if self.reader.gray else 3), "HWC")

    def __len__(self) -> int:
        return len(self.names)

    def take(self, rows: Rows) -> Values:
        batch = np.empty((len(rows), *self.column.shape), np.uint8)
        for place, row in enumerate(rows.tolist()):
            batch[place] = self.reader.pixels(self.names[row])
        return batch


@dataclass(frozen=True)
class _Reader:
    """Decodes images to one size and number of channels."""

    location: Location
    members: Members
    size: tuple[int, int]
    gray: bool

    @classmethod
    def of(cls, location: Location, members: Members, first: str) -> _Reader:
        """A reader with the channels of the image `first`, and with its size unless `location` has an `image_size`."""
        probe = cls(location, members, (0, 0), False)
        size, mode = probe._with_image(first, lambda image: (_oriented_size(image), image.mode))
        return cls(location, members, location.image_size or size, mode in _GRAY)

    def pixels(self, name: str) -> Values:
        """The pixels of an image, uint8 [height, width, channels].

        DataError if the image cannot be read or, without `image_size`, has another size than the first one.
        """
        return self._with_image(name, self._decode)

    def _decode(self, image: Any) -> Values:
        size = _oriented_size(image)
        if self.location.image_size is None and size != self.size:
            first_size = f"{self.size[0]} x {self.size[1]}"
            raise ValueError(
                f"{size[0]} x {size[1]} pixels, the first image has {first_size}; `image_size` resizes all"
            )
        if size != self.size and image.format == "JPEG":
            longest_side = max(self.size)  # for both sides, since EXIF may rotate the image by 90 degrees
            image.draft(
                None, (longest_side, longest_side)
            )  # decodes at 1/2, 1/4 or 1/8 of the size if the result is large enough
        image = upright(image.convert("L" if self.gray else "RGB"), orientation_of(image))
        if size != self.size:
            image = image.resize(self.size[::-1], pillow().Image.Resampling.BILINEAR)
        return np.asarray(image).reshape(*self.size, -1)

    def _with_image(self, name: str, use: Callable[[Any], _Result]) -> _Result:
        library = pillow().Image
        try:
            with self.members.open(name) as file, library.open(file, formats=_FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise ValueError(f"{image.height} x {image.width} pixels, expected at most {MAX_PIXELS}")
                return use(image)
        except (*DAMAGE_ERRORS, ValueError, SyntaxError, library.DecompressionBombError) as error:
            raise self.location.error(f"'{name}' cannot be read: {error}", "image") from None


def _oriented_size(image: Any) -> tuple[int, int]:
    """Height and width after the rotation that the EXIF orientation demands."""
    return (image.width, image.height) if is_rotated(orientation_of(image)) else (image.height, image.width)


def _is_image(name: str) -> bool:
    return name.lower().endswith(_SUFFIXES)
