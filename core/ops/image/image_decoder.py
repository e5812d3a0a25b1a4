"""ImageDecoder: decodes an image file to pixels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.image.image_files import decode
from lathe.core.ops.opdef.registry import Call, Infer, OpDef, register

_FORMATS = ("RGB", "BGR", "Grayscale")
_LUMA = np.array([19595, 38470, 7471])  # ITU-R BT.601, in 65536ths


@register
class ImageDecoder(OpDef):
    """An image file decoded to uint8 [height, width, 3], or [height, width, 1] in gray: PNG, BMP, PNM or plain TIFF.

    FeedError for a damaged file, and for other formats (`image_files.py`).
    """

    inputs = "encoded_stream"
    outputs = "image"
    attrs = {"pixel_format": "RGB"}
    zero_gradient = "bytes have no gradients"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        if c.dtype(0) is not DType.UINT8 or (c.shape(0) is not None and c.tensor(0).rank != 1):
            c.fail(f"encoded_stream is {c.tensor(0)}, expected bytes: uint8 of rank 1")
        if c.attr("pixel_format") not in _FORMATS:
            c.fail(f"pixel_format is {c.attr('pixel_format')!r}, expected one of {', '.join(_FORMATS)}")
        channels = 1 if c.attr("pixel_format") == "Grayscale" else 3
        return [TensorType(DType.UINT8, (c.fresh_dim("height"), c.fresh_dim("width"), channels))]

    def reference(self, c: Call, data: Array) -> Array:
        try:
            pixels = decode(data.tobytes())
        except (ValueError, NotImplementedError) as error:
            c.fail(str(error))
        if c.attr("pixel_format") == "Grayscale":
            return ((pixels @ _LUMA + 0x8000) >> 16).astype(np.uint8)[..., None]
        return np.ascontiguousarray(pixels if c.attr("pixel_format") == "RGB" else pixels[..., ::-1])
