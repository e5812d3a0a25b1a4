"""Decodes image files to pixel arrays of one size, with Pillow (the extra `image`)."""

from __future__ import annotations

from io import BytesIO
from typing import Annotated, Literal

import numpy as np
from PIL import Image, UnidentifiedImageError
from pydantic import Field

from lathe.core.train.data.orientation import orientation_of, upright
from lathe.server.datatypes import to_bytes
from lathe.server.errors import BadRequest
from lathe.server.pipelines.builtins.base import HostStep, Options, StepRequest
from lathe.server.pipelines.definition import BadPipeline
from lathe.server.types import Array, Tensors, TensorSpec

FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
}

_LARGEST = 1 << 30  # most bytes of decoded pixels per request

Side = Annotated[int, Field(ge=1, le=16384)]
Size = Annotated[tuple[Side, Side], Field(strict=False)]  # height, width


class ImageOptions(Options):
    """Options of `decode_image`."""

    color: Literal["RGB", "L"] = "RGB"
    resize: Side | Size | None = None  # one number: the length of the shorter side
    crop: Size | None = None  # centred, after resizing
    filter: Literal["nearest", "bilinear", "bicubic", "lanczos", "box"] = "bilinear"
    max_pixels: Annotated[int, Field(ge=1)] = 1 << 25  # per file, decoded or resized; checked before decoding

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the result; -1 if they depend on the file (no `crop`, and no `resize` to a size)."""
        return self.crop or (self.resize if isinstance(self.resize, tuple) else (-1, -1))


def decode_image(request: StepRequest) -> DecodeImage:
    """The step `image` BYTES [n, 1] -> `pixels` UINT8 [n, height, width, 1 or 3]; raises BadPipeline.

    The EXIF orientation of a file is applied, as in training; a damaged one is ignored.
    """
    options = request.read(ImageOptions)
    if options.crop and isinstance(options.resize, tuple) and any(map(int.__gt__, options.crop, options.resize)):
        raise BadPipeline(
            f"options.crop: expected at most the size after resizing, {options.resize}, got {options.crop}"
        )
    return DecodeImage(options)


class DecodeImage(HostStep):
    """Decodes, converts to `color`, applies the EXIF orientation, resizes (with Pillow's antialiasing) and crops."""

    def __init__(self, options: ImageOptions) -> None:
        channels = 3 if options.color == "RGB" else 1
        super().__init__(
            [TensorSpec("image", "BYTES", (-1, 1))], [TensorSpec("pixels", "UINT8", (-1, *options.size, channels))]
        )
        self._options = options

    def execute(self, inputs: Tensors) -> Tensors:
        """Decode the rows; raises BadRequest naming the row that is not an image, too large or too small.

        Also raises it if the rows have different sizes after resizing and cropping.
        """
        decoded = self._decode_all(inputs["image"].ravel().tolist())
        if len({pixels.shape for pixels in decoded}) > 1:
            raise BadRequest(f"image: expected rows of one size, got {sorted({pixels.shape for pixels in decoded})}")
        return {"pixels": np.stack(decoded) if decoded else np.zeros((0, *self._empty_shape), np.uint8)}

    def _decode_all(self, files: list[str | bytes]) -> list[Array]:
        decoded, nbytes = list[Array](), 0
        for row, item in enumerate(files):
            decoded.append(self._decode(row, to_bytes(item)))
            nbytes += decoded[-1].nbytes
            if nbytes > _LARGEST:
                raise BadRequest(f"image {row}: expected images of at most {_LARGEST} bytes of pixels together")
        return decoded

    @property
    def _empty_shape(self) -> tuple[int, ...]:
        return tuple(max(0, size) for size in self.outputs[0].shape[1:])

    def _decode(self, row: int, data: bytes) -> Array:
        try:
            with Image.open(BytesIO(data), formats=FORMATS) as image:
                if image.width * image.height > self._options.max_pixels:
                    raise BadRequest(
                        f"image {row}: expected at most {self._options.max_pixels} pixels, "
                        f"got {image.width} x {image.height}"
                    )
                turned = upright(image.convert(self._options.color), orientation_of(image))
                pixels = np.asarray(self._resize_and_crop(row, turned))
        except BadRequest:
            raise
        except UnidentifiedImageError as error:
            raise BadRequest(f"image {row}: expected one of {', '.join(FORMATS)}, got something else") from error
        except Exception as error:  # the decoders raise exceptions of many types
            raise BadRequest(f"image {row}: it cannot be decoded ({type(error).__name__})") from error
        return pixels.reshape(*pixels.shape[:2], -1)

    def _resize_and_crop(self, row: int, image: Image.Image) -> Image.Image:
        options = self._options
        if options.resize is not None:
            target = _target_size(image, options.resize)
            self._check_target(row, image, target)
            image = image.resize(target, FILTERS[options.filter])
        if options.crop is None:
            return image
        height, width = options.crop
        if height > image.height or width > image.width:
            raise BadRequest(f"image {row}: expected at least {width} x {height}, got {image.width} x {image.height}")
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return image.crop((left, top, left + width, top + height))

    def _check_target(self, row: int, image: Image.Image, target: tuple[int, int]) -> None:
        """Raise BadRequest if resizing the image of this row to `target` (width, height) needs more than `max_pixels`.

        That counts the result, and the intermediate between the horizontal and the vertical pass.
        """
        width, height = target
        if width * max(height, image.height) > self._options.max_pixels:
            raise BadRequest(
                f"image {row}: expected at most {self._options.max_pixels} pixels while it is resized, "
                f"got {image.width} x {image.height} to become {width} x {height}"
            )


def _target_size(image: Image.Image, resize: int | tuple[int, int]) -> tuple[int, int]:
    """Return the width and height after resizing: `resize` is (height, width), or the length of the shorter side."""
    if isinstance(resize, tuple):
        return resize[1], resize[0]
    shorter = min(image.width, image.height)
    return max(1, round(image.width * resize / shorter)), max(1, round(image.height * resize / shorter))
