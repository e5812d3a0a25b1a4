"""Splits rows into training, validation and test, deterministically by seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lathe.core.errors import DataError
from lathe.core.train.data.dataset import Rows
from lathe.core.train.data.examples import Examples
from lathe.core.train.data.philox import RowRandoms

_SPLIT_STREAM = 0x5B117  # the stream of random numbers for splits


@dataclass(frozen=True)
class Split:
    """The row numbers of each part, ascending. The parts are disjoint."""

    train: Rows
    validation: Rows
    test: Rows


def split(
    examples: Examples, held_out: float = 0.2, validation: float = 0.0, stratified: bool = True, seed: int = 0
) -> Split:
    """Split the rows: a share `held_out` for the test, a share `validation` for validation, the rest for training.

    A test or validation part that the files define themselves is used instead; the shares are those of the training
    part, or of all rows that are in no such part. With `stratified` each class has about the same share in each part
    (largest remainder method), if the target is one class per row. DataError for a negative share, for shares whose
    sum is 1 or more, or if no rows are left for training.
    """
    if not (0 <= held_out < 1 and 0 <= validation < 1 and held_out + validation < 1):
        expected = "expected 0 or more with a sum below 1"
        raise DataError(f"held_out and validation: {expected}, got {held_out} and {validation}")
    parts = {name: np.arange(rows.start, rows.stop) for name, rows in examples.parts.items()}
    train = parts.pop("train", None)
    if train is None:
        train = np.setdiff1d(np.arange(len(examples)), np.concatenate([np.arange(0), *parts.values()]))
    shuffled = RowRandoms(seed, 0, train).order(_SPLIT_STREAM)
    for name, share in (("test", held_out), ("validation", validation)):
        if name not in parts:
            part = _share(examples, shuffled, round(share * len(train)), stratified)
            parts[name] = np.sort(part)
            shuffled = shuffled[~np.isin(shuffled, part)]
    if not len(shuffled):
        raise DataError("no rows are left to train on", file=examples.dataset.name)
    return Split(np.sort(shuffled), parts["validation"], parts["test"])


def folds(examples: Examples, count: int, stratified: bool = True, seed: int = 0) -> list[Split]:
    """`count` splits of all rows for cross-validation: each row is in the test part of exactly one split.

    Validation parts are empty, and parts of the files are ignored. With `stratified` each class is spread evenly.
    DataError unless `count` is from 2 to the number of rows.
    """
    if not 2 <= count <= len(examples):
        raise DataError(f"folds: expected 2 to {len(examples)} (the number of rows), got {count}")
    shuffled = RowRandoms(seed, 0, np.arange(len(examples))).order(_SPLIT_STREAM)
    if stratified and examples.classes and examples.targets.ndim == 1:
        shuffled = shuffled[np.argsort(examples.targets[shuffled], kind="stable")]
    tests = [np.sort(shuffled[start::count]) for start in range(count)]
    everything, nothing = np.arange(len(examples)), np.arange(0)
    return [Split(np.setdiff1d(everything, test), nothing, test) for test in tests]


def _share(examples: Examples, shuffled: Rows, count: int, stratified: bool) -> Rows:
    """The first `count` of the shuffled rows; with `stratified` the first ones of each class in proportion."""
    if not (stratified and examples.classes and examples.targets.ndim == 1):
        return shuffled[:count]
    labels = examples.targets[shuffled]
    sizes = np.bincount(labels, minlength=len(examples.classes))
    together = np.argsort(labels, kind="stable")
    place = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # of each row within its class
    return shuffled[together[place < np.repeat(_quotas(sizes, count), sizes)]]


def _quotas(sizes: Rows, count: int) -> Rows:
    """Integers in proportion to `sizes` that add up to `count`, by the largest remainder method."""
    exact = sizes * (count / max(sizes.sum(), 1))
    quotas = np.floor(exact).astype(np.int64)
    largest = np.argsort(quotas - exact, kind="stable")
    quotas[largest[: count - int(quotas.sum())]] += 1
    return quotas
