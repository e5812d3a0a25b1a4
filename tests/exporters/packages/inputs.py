"""Inputs that resemble training data: a page with writing, a photograph, a voice, tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def _random(*seed: int) -> np.random.Generator:
    return np.random.default_rng((7, *seed))


def page(n: int, height: int, width: int) -> Floats:
    """White pages with lines of dark strokes, [n, 3, height, width], 0 to 1."""
    random = _random(n, height, width)
    pages = np.full((n, height, width), 0.95) + random.normal(0, 0.01, (n, height, width))
    for image in pages:
        pitch = max(height // 6, 12)
        for top in range(pitch // 4, max(height - pitch // 2, pitch // 4 + 1), pitch):
            left = width // 20
            while left < width * 0.9:
                tall, thick = int(random.integers(3, pitch // 2 + 2)), int(random.integers(1, max(pitch // 8, 2) + 1))
                if random.random() < 0.8:
                    image[top : top + tall, left : left + thick] = random.uniform(0.05, 0.3)
                    image[top + tall // 2 : top + tall // 2 + thick, left : left + pitch // 4] = 0.15
                left += int(random.integers(thick + 2, pitch // 2 + 4))
    return np.repeat(pages[:, None].clip(0, 1), 3, axis=1).astype(np.float32)


def photo(n: int, height: int, width: int) -> Floats:
    """Soft shapes in colours with some noise, [n, 3, height, width], 0 to 1."""
    random = _random(n, height, width, 1)
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    images = np.zeros((n, 3, height, width))
    for image in images:
        image += random.uniform(0.2, 0.8, (3, 1, 1)) + random.uniform(-0.2, 0.2, (3, 1, 1)) * y
        for _ in range(8):
            centre, size = random.uniform(0, 1, 2), random.uniform(0.05, 0.3)
            inside = 1 / (1 + np.exp(40 * (np.hypot(y - centre[0], x - centre[1]) - size)))
            image += random.uniform(-0.5, 0.5, (3, 1, 1)) * inside
    return (images + random.normal(0, 0.02, images.shape)).clip(0, 1).astype(np.float32)


def voice(n: int, samples: int, rate: int = 16000) -> Floats:
    """Syllables of a voice that glides, and pauses with some noise, [n, samples], -1 to 1."""
    random, time = _random(n, samples, rate, 2), np.arange(samples) / rate
    sounds = np.zeros((n, samples))
    for sound in sounds:
        pitch = random.uniform(90, 220) * (1 + 0.1 * np.sin(2 * np.pi * 0.8 * time))
        phase = 2 * np.pi * np.cumsum(pitch) / rate
        for harmonic in range(1, 20):
            formant = np.exp(-(((harmonic * pitch - random.uniform(400, 900)) / 600) ** 2)) + 0.3 / harmonic
            sound += formant * np.sin(harmonic * phase + random.uniform(0, 6))
        sound *= np.clip(np.sin(2 * np.pi * 3 * time + random.uniform(0, 6)) + 0.3, 0, 1)
        sound /= np.abs(sound).max() + 1e-6
        sound *= 0.6
    return (sounds + random.normal(0, 0.003, sounds.shape)).clip(-1, 1).astype(np.float32)


def spectra(*shape: int) -> Floats:
    """Logarithms of energies by band as a front end scales them, about -1 to 2: smooth in time."""
    random = _random(*shape, 3)
    values = random.normal(0, 1, shape)
    for axis in range(1, len(shape)):
        values = values + 0.7 * np.roll(values, 1, axis)
    return (0.4 + 0.4 * values).astype(np.float32)


def ids(highest: int, *shape: int) -> NDArray[np.int64]:
    """Token ids from 1 to `highest`; low ones are more frequent."""
    return (1 + (highest * _random(highest, *shape).random(shape) ** 3).astype(np.int64)).clip(1, highest)


def kept(n: int, steps: int) -> NDArray[np.bool_]:
    """A mask of tokens: all tokens of the first sequence, and fewer of each further one."""
    lengths = np.maximum(steps - np.arange(n) * max(steps // (2 * n), 1), 1)
    return np.arange(steps) < lengths[:, None]


def numbers(*shape: int) -> Floats:
    """Normally distributed numbers."""
    return _random(*shape, 4).normal(0, 1, shape).astype(np.float32)


def zeros(*shape: int) -> Floats:
    return np.zeros(shape, np.float32)
