"""Which rows are for training, which for choosing, which for the final judgement: deterministic by seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from core.errors import DataError
from core.train.data.dataset import Rows
from core.train.data.examples import Examples
from core.train.data.philox import Randoms

_SPLIT_STREAM = 0x5B117  # splits have random numbers of their own


@dataclass(frozen=True)
class Split:
    """Row numbers, each row in one of the three; ascending."""

    train: Rows
    validation: Rows
    test: Rows


def split(
    examples: Examples, held_out: float = 0.2, validation: float = 0.0, stratified: bool = True, seed: int = 0
) -> Split:
    """Set aside a `held_out` share of the rows for testing and a `validation` share for looking at while training.

    A test or validation part that the files set apart themselves stays, whatever its share. `stratified` gives each
    class its share (to the row: largest remainders) when the target counts classes. DataError when nothing would be
    left to train on.
    """
    if not (0 <= held_out < 1 and 0 <= validation < 1 and held_out + validation < 1):
        raise DataError(f"shares of {held_out} and {validation} are held out, expected 0 or more and below 1 together")
    taken = {name: np.arange(rows.start, rows.stop) for name, rows in examples.parts.items()}
    train = taken.pop("train", None)
    if train is None:
        train = np.setdiff1d(np.arange(len(examples)), np.concatenate([np.arange(0), *taken.values()]))
    shuffled = Randoms(seed, 0, train).order(_SPLIT_STREAM)
    for name, share in (("test", held_out), ("validation", validation)):
        if name not in taken:
            part = _share(examples, shuffled, round(share * len(train)), stratified)
            taken[name] = np.sort(part)
            shuffled = shuffled[~np.isin(shuffled, part)]
    if not len(shuffled):
        raise DataError("no rows are left to train on", file=examples.dataset.name)
    return Split(np.sort(shuffled), taken["validation"], taken["test"])


def folds(examples: Examples, count: int, stratified: bool = True, seed: int = 0) -> list[Split]:
    """`count` splits of all rows, each row being tested once."""
    if not 2 <= count <= len(examples):
        raise DataError(f"{count} folds of {len(examples)} rows, expected 2 folds at least and a row for each")
    shuffled = Randoms(seed, 0, np.arange(len(examples))).order(_SPLIT_STREAM)
    if stratified and examples.classes and examples.targets.ndim == 1:
        shuffled = shuffled[np.argsort(examples.targets[shuffled], kind="stable")]
    tests = [np.sort(shuffled[start::count]) for start in range(count)]
    everything, nothing = np.arange(len(examples)), np.arange(0)
    return [Split(np.setdiff1d(everything, test), nothing, test) for test in tests]


def _share(examples: Examples, shuffled: Rows, count: int, stratified: bool) -> Rows:
    """The first `count` of the shuffled rows, or so many of them that every class has its share."""
    if not (stratified and examples.classes and examples.targets.ndim == 1):
        return shuffled[:count]
    labels = examples.targets[shuffled]
    sizes = np.bincount(labels, minlength=len(examples.classes))
    together = np.argsort(labels, kind="stable")
    place = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # of each row within its class
    return shuffled[together[place < np.repeat(_quotas(sizes, count), sizes)]]


def _quotas(sizes: Rows, count: int) -> Rows:
    """`count` dealt out in proportion to `sizes`: the whole parts, then one each to the largest remainders."""
    exact = sizes * (count / max(sizes.sum(), 1))
    quotas = np.floor(exact).astype(np.int64)
    largest = np.argsort(quotas - exact, kind="stable")
    quotas[largest[: count - int(quotas.sum())]] += 1
    return quotas
