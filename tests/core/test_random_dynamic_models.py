"""Random models of sequences in dynamic-shape code, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

import lathe
from tests.core.random_dynamic_models import SizedNet
from tests.onnx_runtime import plain_session

SIZES = [(1, 1, 1), (2, 5, 3), (1, 17, 33), (3, 40, 2), (5, 1, 20), (2, 64, 16)]  # rows, length, other length
QUICK, ALL = 24, 300


def agrees(seed: int, threads: int) -> bool:
    """Compare with ONNX Runtime. True if the model has dynamic-shape code."""
    data = SizedNet(seed).model().SerializeToString()
    oracle = plain_session(data)
    with lathe.compile(lathe.load(data), threads=threads, tune="off", new_shapes="wait") as session:
        sized = bool(session.description.any_size)
        for sizes in SIZES if sized else SIZES[1:3]:
            feeds = SizedNet.feeds(*sizes)
            for (name, got), want in zip(session.run(feeds).items(), oracle.run(None, feeds), strict=True):
                assert got.shape == want.shape, f"{name} of {sizes}"
                room = 2e-4 * float(np.abs(want).max(initial=1.0))
                np.testing.assert_allclose(got, want, rtol=2e-4, atol=room, err_msg=f"{name} of {sizes}")
        return sized


@pytest.mark.sample(4)
@pytest.mark.parametrize("seeds", [range(first, first + 6) for first in range(0, QUICK, 6)], ids=str)
def test_random_sizes(seeds: range) -> None:
    assert sum(agrees(seed, 1 + seed % 2) for seed in seeds) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(first, first + 12) for first in range(QUICK, ALL, 12)], ids=str)
def test_more_random_sizes(seeds: range) -> None:
    assert sum(agrees(seed, 1 + seed % 2) for seed in seeds) >= 6
