"""Checks models that declare independent rows: rows alone, in another order, and among others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import lathe
from tests.fuzz.graphs.generate import Case
from tests.fuzz.graphs.values import FLOATS, Array


class Differs(Exception):
    """A row changed. `kind` names the change of the batch that caused it."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def check_batching(
    session: lathe.Session, cases: Sequence[Case], tolerance: Callable[[Array, Array], Array | float]
) -> None:
    """Raise Differs if a row of a batch depends on the other rows or on their number."""
    for case in cases:
        feeds = {name: case.feeds[name] for name in session.inputs}
        fixed = {name: case.feeds[name] for name in session.defaults if name in case.feeds}
        whole = session.run({**feeds, **fixed})
        allowed = {name: tolerance(array, case.shadows[name]) for name, array in whole.items()}
        order = np.array([*range(0, case.rows, 2), *range(1, case.rows, 2)])[::-1]  # not a rotation
        _compare("in another order", session.run({**_taken(feeds, order), **fixed}), _taken(whole, order), allowed)
        for row in {0, case.rows // 2, case.rows - 1}:
            alone = np.array([row])
            _compare("alone", session.run({**_taken(feeds, alone), **fixed}), _taken(whole, alone), allowed)
            others = np.array([*range(case.rows), row, row])
            got = _taken(session.run({**_taken(feeds, others), **fixed}), np.array([case.rows + 1]))
            _compare("among more", got, _taken(whole, alone), allowed)


def _taken(arrays: dict[str, Any], rows: Array) -> dict[str, Any]:
    return {name: np.ascontiguousarray(array[rows]) for name, array in arrays.items()}


def _compare(kind: str, got: dict[str, Any], want: dict[str, Any], allowed: dict[str, Any]) -> None:
    for name, array in want.items():
        if got[name].shape != array.shape:
            raise Differs(kind, f"{name}: {got[name].shape}, expected {array.shape}")
        if array.dtype not in FLOATS:
            if not np.array_equal(got[name], array):
                raise Differs(kind, f"{name}: {got[name].ravel()[:5]}, expected {array.ravel()[:5]}")
            continue
        off = np.abs(got[name].astype(np.float64) - array.astype(np.float64))
        if not (off <= allowed[name]).all():
            raise Differs(kind, f"{name}: off by {off.max():.3g}, allowed {np.max(allowed[name]):.3g}")
