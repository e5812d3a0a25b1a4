"""WAV files against samples computed by hand, and changes of the rate against tones."""

from __future__ import annotations

import io
import tracemalloc
import wave

import numpy as np
import pytest
from scipy.signal import resample_poly

from lathe.core.errors import FeedError
from lathe.core.language.resampling import resampled
from lathe.core.language.wav import read_wav


def wav(samples: np.ndarray, width: int = 2, rate: int = 16_000, channels: int = 1) -> bytes:
    """Whole numbers [frames * channels] as PCM."""
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        numbers = samples + 128 if width == 1 else samples
        file.writeframes(b"".join(int(each).to_bytes(width, "little", signed=width > 1) for each in numbers))
    return content.getvalue()


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_every_width(width: int) -> None:
    most = 1 << 8 * width - 1
    samples = np.array([0, 1, -1, most // 2, -most, most - 1])
    found, rate = read_wav(wav(samples, width, 44_100))
    np.testing.assert_allclose(found, samples / most, 1e-6, 1e-9)
    assert rate == 44_100 and found.dtype == np.float32


def test_channels_become_their_mean() -> None:
    found, _ = read_wav(wav(np.array([100, 300, -8, 8, 5, 6]), channels=2))
    np.testing.assert_allclose(found * 32768, [200, 0, 5.5])


def test_files_that_end_early() -> None:
    whole = wav(np.arange(100))
    assert len(read_wav(whole[:-51])[0]) == 74
    for content in (b"", b"RIFF", whole[:30], b"OggS" + whole):
        with pytest.raises(FeedError, match="expected a WAV file of PCM"):
            read_wav(content)


def test_impossible_headers() -> None:
    header = bytearray(wav(np.arange(8)))
    wanted = "8000 to 192000 samples per second, a multiple of 25, got 1 channels of 16 bits and"
    for rate in (5, 7_975, 191_999, 192_025):
        header[24:28] = rate.to_bytes(4, "little")
        with pytest.raises(FeedError, match=f"{wanted} {rate} samples"):
            read_wav(header)


@pytest.mark.parametrize("rate", [8_000, 11_025, 191_975])
def test_resampling_takes_little_memory(rate: int) -> None:
    """For each rate that a file may have, also those that share few divisors with 16,000."""
    sound, found = read_wav(wav(np.zeros(1000), rate=rate))
    tracemalloc.start()
    try:
        resampled(sound, found, 16_000)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_file_of_floats_is_refused() -> None:
    header = bytearray(wav(np.arange(8)))
    header[20:22] = (3).to_bytes(2, "little")  # numbers with a fraction
    with pytest.raises(FeedError, match="expected a WAV file of PCM: unknown format: 3"):
        read_wav(header)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 47_999])
def test_tones_below_both_limits_stay(rate: int) -> None:
    tone = np.sin(2 * np.pi * 1_234.5 * np.arange(rate) / rate).astype(np.float32)
    found = resampled(tone, rate, 16_000)
    expected = np.sin(2 * np.pi * 1_234.5 * np.arange(16_000) / 16_000)
    assert found.shape == (16_000,) and found.dtype == np.float32
    np.testing.assert_allclose(found[200:-200], expected[200:-200], 0, 2e-4)


def test_tones_above_the_new_limit_vanish() -> None:
    tone = np.sin(2 * np.pi * 9_000 * np.arange(44_100) / 44_100).astype(np.float32)
    assert np.abs(resampled(tone, 44_100, 16_000)[200:-200]).max() < 1e-3


def test_low_noise_is_that_of_scipy() -> None:
    rng = np.random.default_rng(0)
    slow = resample_poly(rng.normal(0, 1, 1_000), 12, 1)  # below 2 kHz of 24 kHz
    found = resampled(slow.astype(np.float32), 48_000, 16_000)
    np.testing.assert_allclose(found[200:-200], resample_poly(slow, 1, 3)[200 : len(found) - 200], 0, 5e-3)


def test_the_same_rate_changes_nothing() -> None:
    tone = np.arange(5, dtype=np.float32)
    np.testing.assert_array_equal(resampled(tone, 16_000, 16_000), tone)
    assert resampled(tone[:0], 8_000, 16_000).shape == (0,)
