"""Splits: exact shares, stratified by class, reproducible."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold, train_test_split

from lathe.core.errors import DataError
from lathe.core.train.data import Examples, folds, from_arrays, select, split


def labelled(labels: object) -> Examples:
    y = np.asarray(labels)
    return select(from_arrays({"x": np.arange(len(y) * 2.0).reshape(-1, 2), "y": y}))


DIGITS = labelled(load_digits().target)


@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_stratified_as_scikit_learn_does(seed: int) -> None:
    parts = split(DIGITS, held_out=0.2, seed=seed)
    train, test = train_test_split(DIGITS.targets, test_size=len(parts.test), stratify=DIGITS.targets, random_state=0)
    assert sorted([*parts.train, *parts.test]) == list(range(1797)) and len(parts.validation) == 0
    assert abs(np.bincount(DIGITS.targets[parts.test]) - np.bincount(test)).max() <= 1
    assert len(parts.train) == len(train)


def test_three_parts_and_their_sizes() -> None:
    parts = split(DIGITS, held_out=0.2, validation=0.1, seed=3)
    assert [len(rows) for rows in (parts.train, parts.validation, parts.test)] == [1258, 180, 359]
    assert len(set(parts.train) | set(parts.validation) | set(parts.test)) == 1797
    plain = split(DIGITS, held_out=0.2, validation=0.1, seed=3, stratified=False)
    assert len(plain.test) == 359 and not np.array_equal(plain.test, parts.test)


def test_seeds_decide() -> None:
    assert np.array_equal(split(DIGITS, seed=7).test, split(DIGITS, seed=7).test)
    assert not np.array_equal(split(DIGITS, seed=7).test, split(DIGITS, seed=8).test)
    assert split(labelled([0, 1] * 10), seed=1, held_out=0.3).test.tolist() == [3, 4, 5, 9, 12, 14]  # pinned


def test_rare_classes_stay_in_training() -> None:
    parts = split(labelled([0] * 50 + [1]), held_out=0.2)
    assert 50 in parts.train


def test_splits_given_by_the_files_are_used() -> None:
    y = np.arange(30) % 3
    dataset = from_arrays({"x": np.zeros((30, 2)), "y": y})
    parts = split(select(replace(dataset, parts={"train": range(20), "test": range(20, 30)})), 0.5, 0.25)
    assert parts.test.tolist() == list(range(20, 30)) and len(parts.validation) == 5 and len(parts.train) == 15


def test_no_part_of_the_files_is_trained_on_by_accident() -> None:
    dataset = replace(from_arrays({"x": np.zeros((30, 2)), "y": np.arange(30) % 3}), parts={"validation": range(6)})
    parts = split(select(dataset), 0.25)
    assert parts.validation.tolist() == list(range(6)) and len(parts.test) == 6
    assert sorted([*parts.train, *parts.test]) == list(range(6, 30))


def test_folds_test_each_row_once_with_even_classes() -> None:
    parts = folds(DIGITS, 5, seed=1)
    assert sorted(np.concatenate([part.test for part in parts])) == list(range(1797))
    theirs = [test for _, test in StratifiedKFold(5).split(np.zeros(1797), DIGITS.targets)]
    for part, test in zip(parts, theirs, strict=True):
        assert abs(np.bincount(DIGITS.targets[part.test]) - np.bincount(DIGITS.targets[test])).max() <= 1
        assert not np.intersect1d(part.train, part.test).size


@pytest.mark.parametrize(("held_out", "validation"), [(1.0, 0.0), (0.5, 0.5), (-0.1, 0.0), (float("nan"), 0.0)])
def test_invalid_shares_are_refused(held_out: float, validation: float) -> None:
    with pytest.raises(DataError, match="held_out and validation: expected 0 or more with a sum below 1"):
        split(DIGITS, held_out, validation)


def test_a_split_without_training_rows_is_refused() -> None:
    with pytest.raises(DataError, match="no rows are left to train on"):
        split(labelled([0]), held_out=0.9)
