"""The front end of Whisper: sound as a log-mel spectrogram, as the library Transformers computes it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lathe.core.errors import FeedError
from lathe.core.nn.module import Module
from lathe.core.nn.parameter import Buffer
from lathe.core.nn.tensor import Tensor, cat, tensor

RATE = 16_000  # samples per second
STEP = 160  # samples from one frame to the next
_LENGTH = 400  # samples in a frame
_FLOOR = 1e-10  # of the energy in a band
_RANGE = 8.0  # decades below the loudest band of a spectrogram; weaker bands get this value

# The mel scale of Slaney (1998): linear up to 1,000 Hz, logarithmic above.
_LINEAR_HZ = 200 / 3  # per mel
_CORNER_HZ = 1000.0
_CORNER_MEL = _CORNER_HZ / _LINEAR_HZ
_PER_LOG = 27 / math.log(6.4)  # mels per unit of the natural logarithm


class LogMel(Module):
    """Sound of 16 kHz, float32 [batch, samples], as log-mel spectrograms, float32 [batch, bands, samples / 160].

    Power spectra of frames of 400 samples (periodic Hann window, a frame in every 160 samples, reflected at both ends)
    become energies of `bands` triangular bands up to 8 kHz. Their decimal logarithms are at most 8 below the highest
    one of the same spectrogram, and are finally increased by 4 and divided by 4.
    """

    def __init__(self, bands: int) -> None:
        self.window = Buffer((0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_LENGTH) / _LENGTH)).astype(np.float32))
        self.filters = Buffer(mel_filters(bands).astype(np.float32))

    def forward(self, audio: Tensor) -> Tensor:
        self.expect(audio.ndim == 2, "sound [batch, samples]", audio)
        frames = _frames(audio) * self.window
        spectra = frames.unsqueeze(-1).op("DFT", None, tensor(2), onesided=1)
        energies = (spectra * spectra).sum(-1) @ self.filters
        logs = energies.clamp(min=_FLOOR).log() * (1 / math.log(10))
        logs = logs.op("Max", logs.amax((1, 2), keepdim=True) - _RANGE)
        return ((logs + 4.0) * 0.25).transpose(1, 2)


def _frames(audio: Tensor) -> Tensor:
    """The frames of a sound, [batch, samples] -> [batch, samples / 160, 400]: joined from pieces of 160 samples."""
    half, count = _LENGTH // 2, audio.extent(1) // STEP
    padded = audio.op("Pad", tensor([0, half, 0, half]), mode="reflect")
    pieces = padded[:, : (count + 2) * STEP].reshape(audio.shape[0], count + 2, STEP)
    return cat([pieces[:, :-2], pieces[:, 1:-1], pieces[:, 2:, : _LENGTH - 2 * STEP]], -1)


def mel_filters(bands: int) -> NDArray[np.float64]:
    """The share of each of 201 frequencies up to 8 kHz in each band: [201, bands]; all bands have the same area."""
    frequencies = np.linspace(0, RATE / 2, _LENGTH // 2 + 1)
    edges = _hertz(np.linspace(0, _mels(RATE / 2), bands + 2))
    below, peak, above = edges[:-2], edges[1:-1], edges[2:]
    rising = (frequencies[:, None] - below) / (peak - below)
    falling = (above - frequencies[:, None]) / (above - peak)
    return np.asarray(np.maximum(0, np.minimum(rising, falling)) * 2 / (above - below))


def _mels(hertz: float) -> float:
    return _CORNER_MEL + math.log(hertz / _CORNER_HZ) * _PER_LOG


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    above = _CORNER_HZ * np.exp((np.maximum(mels, _CORNER_MEL) - _CORNER_MEL) / _PER_LOG)
    return np.where(mels < _CORNER_MEL, mels * _LINEAR_HZ, above)


def padded_audio(audio: ArrayLike, samples: int) -> NDArray[np.float32]:
    """Sound of one channel as float32 [1, samples]: cut to that length, or followed by silence.

    FeedError for an array that is not of rank 1, or has other elements than floats.
    """
    array = np.asarray(audio)
    if array.ndim != 1 or array.dtype.kind != "f":
        raise FeedError(f"audio: expected floats [samples] of one channel, got {array.dtype}{list(array.shape)}")
    result = np.zeros((1, samples), np.float32)
    result[0, : len(array)] = array[:samples]
    return result
