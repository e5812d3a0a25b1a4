"""Random models whose extents are clamped, run by code for any sizes, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

import lathe
from lathe.core.errors import FeedError
from tests.core.clamped_nets import ClampedNet, feeds
from tests.onnx_runtime import REFUSALS, plain_session

SIZES = [(1, 1), (2, 2), (2, 3), (1, 5), (3, 6), (2, 7), (1, 19), (2, 20), (2, 21), (1, 50)]  # rows, length
QUICK, ALL = 24, 240


def has_whole_code(seed: int, batched: bool = True) -> bool:
    """Whether the model of this seed has code for any sizes.

    Checks that the session gives ONNX Runtime's results, refuses what it refuses, and does not run in parts."""
    data = ClampedNet(seed, batched).model().SerializeToString()
    oracle = plain_session(data)
    with lathe.compile(lathe.load(data), threads=1, tune="off") as session:
        for size in SIZES:
            given = feeds(*size) if batched else feeds(size[1])
            try:
                wanted = oracle.run(None, given)
            except REFUSALS:
                with pytest.raises(FeedError):
                    session.run(given)
                continue
            for (name, got), want in zip(session.run(given).items(), wanted, strict=True):
                assert got.shape == want.shape, f"{name} of {size}"
                np.testing.assert_allclose(got, want, 1e-4, 1e-4, err_msg=f"{name} of {size}")
        assert not session.description.in_parts
        return bool(session.description.any_size)


@pytest.mark.parametrize("seeds", [range(first, first + 6) for first in range(0, QUICK, 6)], ids=str)
@pytest.mark.sample(4)
def test_clamped_extents(seeds: range) -> None:
    """The other models fit only one length, for example if a table of 6 rows is added to x."""
    assert sum(map(has_whole_code, seeds)) >= 3


@pytest.mark.parametrize("seeds", [range(first, first + 6) for first in range(0, QUICK, 6)], ids=str)
@pytest.mark.sample(4)
def test_clamped_numbers_of_rows(seeds: range) -> None:
    """The length is the leading dimension: code is for any length, or for one."""
    for seed in seeds:
        has_whole_code(seed, batched=False)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(first, first + 12) for first in range(QUICK, ALL, 12)], ids=str)
def test_more_clamped_extents(seeds: range) -> None:
    assert sum(map(has_whole_code, seeds)) >= 6
    for seed in seeds:
        has_whole_code(seed, batched=False)
