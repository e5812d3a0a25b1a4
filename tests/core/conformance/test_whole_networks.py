"""The nine whole networks of ONNX's suite, with random weights, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

import lathe
from tests.core.conformance.random_weights import NAMES, image, with_random_weights
from tests.core.conformance.round_trip import answers

QUICK = ["test_squeezenet"]
_TOLERANCE = 1e-4  # of the largest output


def check(name: str) -> None:
    model = with_random_weights(name)
    data, feeds = model.SerializeToString(), image(model)
    (want,) = answers(data, feeds)
    with lathe.compile(data, threads=2, max_batch=1, tune="off") as session:
        (got,) = session.run(feeds).values()
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert np.std(want) > 1e-3 * np.abs(want).max() > 0, "the outputs tell nothing"
    np.testing.assert_allclose(got, want, rtol=0, atol=_TOLERANCE * np.abs(want).max())


def test_all_networks_are_here() -> None:
    assert len(NAMES) == 9


@pytest.mark.parametrize("name", QUICK)
def test_a_network(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in QUICK])
def test_a_large_network(name: str) -> None:
    check(name)
