"""Which extents operators need to be equal. Every extent of every operator case is tried: one that type inference does
not let be any other number has to be noted as one that must be equal to others."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import LatheError
from core.ir.dim import Dim, symbol, symbols
from core.ir.equation import solved
from core.ops.inference import infer_graph
from core.ops.meeting import Met, met_in
from tests.core.ops.cases import CASES, Case
from tests.core.ops.harness import graph_of

OTHERS = (101, 8 * 9 * 25 * 49)  # extents that no case has: a prime, and one that numbers of groups divide

# Operator and input -> why its extents are no matter of equality.
NO_EQUALITY = {
    ("GatherND", 1): "the last extent of the indices is a number of axes",
    ("ScatterND", 1): "the last extent of the indices is a number of axes",
    ("Reshape", 0): "the shape copies this extent",
}


def _is_one_number(case: Case, index: int, axis: int) -> bool:
    """Whether inference refuses all other extents there."""
    for other in OTHERS:
        shape = [*case.inputs[index].shape]
        shape[axis] = other
        try:
            graph_of(case, {index: tuple(shape)})
            return False
        except LatheError:
            continue
    return True


def _met(case: Case, index: int, axis: int) -> Met | None:
    """What meets where that extent is a symbol; None where the operator takes numbers alone."""
    shape: list[Dim] = [*case.inputs[index].shape]
    shape[axis] = symbol("m")
    try:
        graph = graph_of(case, {index: tuple(shape)})
    except LatheError:
        return None
    return met_in(graph, infer_graph(graph))


def _extents() -> list[Any]:
    arrays = [(case, index, array) for case in CASES for index, array in enumerate(case.inputs) if array is not None]
    places = [
        (case, index, axis)
        for case, index, array in arrays
        for axis in range(array.ndim)
        if index not in case.param_indices and (case.op, index) not in NO_EQUALITY
    ]
    return [pytest.param(*place, id=f"{place[0].label}-{place[1]}-{place[2]}") for place in places]


def test_extents_that_must_be_one_number_are_noted() -> None:
    noted = 0
    for case, index, axis in (each.values for each in _extents()):
        if not _is_one_number(case, index, axis) or (met := _met(case, index, axis)) is None:
            continue
        noted += 1
        pairs, extent = (*met.equal, *met.broadcast), case.inputs[index].shape[axis]
        answers = [solved(*pair, lambda name: name == "m") for pair in pairs]
        assert ("m", extent) in answers or (extent == 1 and pairs), f"{case.label}: axis {axis} of input {index}: {met}"
    assert noted > 300


@pytest.mark.parametrize("op", ["Add", "Where", "Expand"])
def test_what_broadcasts_may_be_one(op: str) -> None:
    """Extents of operands that broadcast are not noted as ones without which no run succeeds."""
    for case, index, axis in (each.values for each in _extents()):
        if case.op == op and (met := _met(case, index, axis)) is not None:
            assert not any(symbols(dim) for pair in met.equal for dim in pair)
