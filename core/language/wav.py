"""`read_wav`: sound in a WAV file."""

from __future__ import annotations

import io
import wave

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import FeedError

# Samples per second. A file says any rate, and resampling has a filter for each phase: 16,000 filters of 800 numbers
# of 191,999 samples per second. Multiples of 25 need at most 640 filters. A low rate would make a small file long.
_RATES = range(8_000, 192_001, 25)
_CHANNELS = 32


def read_wav(content: bytes | bytearray | memoryview) -> tuple[NDArray[np.float32], int]:
    """The mean of all channels, float32 [samples] of -1 to 1, and the samples per second.

    PCM of 8 bits without sign, and of 16, 24 and 32 bits. FeedError for another or a damaged file.
    """
    try:
        with wave.open(io.BytesIO(content)) as file:
            channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            frames = file.readframes(file.getnframes())
    except (wave.Error, EOFError, ValueError, OverflowError, RuntimeError) as error:
        raise FeedError(f"expected a WAV file of PCM: {error or 'it ends too early'}") from None
    if rate not in _RATES or not 1 <= channels <= _CHANNELS or width not in (1, 2, 3, 4):
        raise FeedError(
            f"expected 1 to {_CHANNELS} channels of 8 to 32 bits, and {_RATES[0]} to {_RATES[-1]} samples per second, "
            f"a multiple of {_RATES.step}, got {channels} channels of {8 * width} bits and {rate} samples"
        )
    count = len(frames) // (channels * width)
    samples = _floats(frames[: count * channels * width], width)
    return samples.reshape(count, channels).mean(1, dtype=np.float32), rate


def _floats(content: bytes, width: int) -> NDArray[np.float32]:
    """Samples of `width` bytes as numbers of -1 to 1."""
    if width == 1:
        return np.frombuffer(content, np.uint8).astype(np.float32) * np.float32(1 / 128) - np.float32(1)
    if width != 3:
        return np.frombuffer(content, f"<i{width}").astype(np.float32) * np.float32(2.0 ** (1 - 8 * width))
    upper = np.zeros((len(content) // 3, 4), np.uint8)  # of 32 bits the upper 24
    upper[:, 1:] = np.frombuffer(content, np.uint8).reshape(-1, 3)
    return upper.view("<i4")[:, 0].astype(np.float32) * np.float32(2.0**-31)
