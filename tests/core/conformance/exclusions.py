"""Cases of ONNX's backend test suite that Lathe does not pass, one by one, each with its reason.

A case is listed only if it cannot pass, or if it needs a feature that Lathe lacks. A test fails when one of them
passes.
"""

from __future__ import annotations

_CODEC = "ImageDecoder reads the lossless formats only: JPEG, JPEG 2000 and WebP need codecs that Lathe does not have"
_DRAWN = "expects what NumPy's global generator happened to draw; ONNX fixes no generator"

EXCLUSIONS: dict[str, str] = {
    "test_dft_inverse_opset19": "expects what NumPy's transform in float32 leaves of an exact 0: 2e-7, not within 1e-7",
    "test_image_decoder_decode_jpeg2k_rgb": _CODEC,
    "test_image_decoder_decode_jpeg_bgr": _CODEC,
    "test_image_decoder_decode_jpeg_grayscale": _CODEC,
    "test_image_decoder_decode_jpeg_rgb": _CODEC,
    "test_image_decoder_decode_webp_rgb": _CODEC,
    "test_loop16_seq_none": "the runner takes len() of an expected element of rank 0, which no result can satisfy",
}

# These run, but draw other random numbers than the suite. A test checks element types and shapes.
RANDOM: dict[str, str] = {
    "test_bernoulli": _DRAWN,
    "test_bernoulli_double": _DRAWN,
    "test_bernoulli_double_expanded": _DRAWN,
    "test_bernoulli_expanded": _DRAWN,
    "test_bernoulli_seed": _DRAWN,
    "test_bernoulli_seed_expanded": _DRAWN,
}

REASONS = EXCLUSIONS | RANDOM
