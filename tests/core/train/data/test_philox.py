"""Philox4x32-10 against its authors' known answers, and the distributions made from it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import kstest

from lathe.core.train.data.philox import RowRandoms, philox

# kat_vectors of Random123: counter, key, answer
KNOWN = [
    ([0] * 4, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, 0xFFFFFFFFFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        0x299F31D0A4093822,
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: list[int], key: int, answer: list[int]) -> None:
    assert philox(key, np.array(counter, np.uint64)).tolist() == answer


def test_numbers_of_a_row_do_not_depend_on_other_rows() -> None:
    rows = np.arange(1000)
    whole = RowRandoms(3, 1, rows)
    some = RowRandoms(3, 1, rows[[7, 500, 2]])
    np.testing.assert_array_equal(some.uniform(2, 5), whole.uniform(2, 5)[[7, 500, 2]])
    np.testing.assert_array_equal(whole.uniform(2, 9)[:, :5], whole.uniform(2, 5))
    for other in (RowRandoms(4, 1, rows), RowRandoms(3, 2, rows)):
        assert not np.intersect1d(other.uniform(2, 5), whole.uniform(2, 5)).size > 5
    assert not np.array_equal(whole.uniform(1, 5), whole.uniform(2, 5))


def test_distributions() -> None:
    randoms = RowRandoms(11, 0, np.arange(2000))
    assert kstest(randoms.uniform(0, 7).ravel(), "uniform").pvalue > 1e-3
    assert kstest(randoms.normal(0, 7).ravel(), "norm").pvalue > 1e-3
    assert sorted(randoms.order(4).tolist()) == list(range(2000))
