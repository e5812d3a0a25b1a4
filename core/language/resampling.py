"""`resampled`: sound at another rate, by a low-pass filter."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Sound = NDArray[np.float32]

_ZEROS = 32  # zero crossings of the sinc on each side: the pass band ends 5 % below the lower of the two limits
_BETA = 10.0  # of the Kaiser window: the stop band is about 100 dB down
_PASSED = 0.95  # of the lower of the two Nyquist frequencies
_BLOCK = 1 << 19  # outputs in a block, so that intermediate arrays stay small


def resampled(sound: Sound, rate: int, wanted: int) -> Sound:
    """Sound [samples] of `rate` samples per second as float32 [samples] of `wanted` per second.

    Each result is the convolution of the sound, with silence around it, and a sinc in a Kaiser window whose cut-off is
    at 0.95 of the lower Nyquist frequency (Smith: Digital Audio Resampling).
    """
    if rate == wanted or not len(sound):
        return sound.astype(np.float32)
    divisor = math.gcd(rate, wanted)
    phases, stride = wanted // divisor, rate // divisor
    filters = _filters(phases, stride)
    reach = filters.shape[1] // 2
    count = -(-len(sound) * phases // stride)
    padded = np.zeros(len(sound) + 2 * reach + 2, np.float32)
    padded[reach : reach + len(sound)] = sound
    windows = np.lib.stride_tricks.sliding_window_view(padded, filters.shape[1])
    found = np.empty(count, np.float32)
    for phase in range(min(phases, count)):
        results = found[phase::phases]
        places = windows[phase * stride // phases :: stride]
        for start in range(0, len(results), _BLOCK):
            results[start : start + _BLOCK] = places[start : min(start + _BLOCK, len(results))] @ filters[phase]
    return found


def _filters(phases: int, stride: int) -> NDArray[np.float32]:
    """The filter of each phase, [phases, taps]: of outputs whose place lies phase * stride / phases after an input."""
    cut = _PASSED * min(1.0, phases / stride)  # relative to the Nyquist frequency of the inputs
    reach = math.ceil(_ZEROS / cut)
    offsets = np.arange(-reach, reach + 1)
    distances = offsets[None, :] - (np.arange(phases) * stride % phases / phases)[:, None]
    inside = np.clip(1 - (distances / (reach + 1)) ** 2, 0, None)
    found = cut * np.sinc(cut * distances) * np.i0(_BETA * np.sqrt(inside)) / np.i0(_BETA)
    return found.astype(np.float32)
