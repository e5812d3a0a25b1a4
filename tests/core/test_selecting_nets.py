"""Random models of rows that masks select, against ONNX Runtime: they have kernels alone, and their rows share runs."""

from __future__ import annotations

import numpy as np
import pytest

import lathe
from tests.core.selecting_nets import SelectingNet, feeds
from tests.onnx_runtime import plain_session

SIZES = [(1, 1), (2, 5), (3, 7), (5, 2)]  # rows, length
QUICK, ALL = 24, 240


def agrees(seed: int) -> None:
    data = SelectingNet(seed).model().SerializeToString()
    oracle = plain_session(data)
    with lathe.compile(lathe.load(data), threads=1 + seed % 2, tune="off", new_shapes="wait") as session:
        assert session.description.batching.batchable, session.description.batching.reason
        for size in SIZES:
            given = feeds(*size, seed=seed)
            np.testing.assert_allclose(session.run(given)["y"], oracle.run(None, given)[0], 1e-4, 1e-4)
        assert "dynamic-shape code serves" in session.explain() and "FALLBACK" not in session.explain()


@pytest.mark.sample(2)
@pytest.mark.parametrize("seeds", [range(first, first + 6) for first in range(0, QUICK, 6)], ids=str)
def test_selected_rows(seeds: range) -> None:
    for seed in seeds:
        agrees(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(first, first + 12) for first in range(QUICK, ALL, 12)], ids=str)
def test_more_selected_rows(seeds: range) -> None:
    for seed in seeds:
        agrees(seed)
