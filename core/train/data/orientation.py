"""The EXIF orientation of image files, for training data and for the pipeline step `decode_image`."""

from __future__ import annotations

from typing import Any

_TAG = 274
_TRANSPOSITIONS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


def orientation_of(image: Any) -> int:
    """The orientation of the stored pixels of an open Pillow image, 1 to 8; 1 (upright) if the file has no valid one.

    1 for TIFF files too, which Pillow turns itself. An error of Pillow if a PNG file cannot be decoded.
    """
    if image.format == "TIFF":
        return 1
    if image.format == "PNG":
        image.load()  # the EXIF data may follow the pixels
    try:
        found = image.getexif().get(_TAG, 1)
    except (
        Exception
    ):  # Pillow raises exceptions of many types for damaged EXIF data, which do not matter for the pixels
        return 1
    return int(found) if found in _TRANSPOSITIONS else 1


def is_rotated(orientation: int) -> bool:
    """Whether width and height of the stored pixels are exchanged."""
    return orientation >= 5


def upright(image: Any, orientation: int) -> Any:
    """The image turned and mirrored as its orientation demands."""
    if orientation not in _TRANSPOSITIONS:
        return image
    from PIL import Image

    return image.transpose(Image.Transpose[_TRANSPOSITIONS[orientation]])
