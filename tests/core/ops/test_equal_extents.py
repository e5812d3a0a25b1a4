"""The extents that operators need to be equal, checked on every extent of every operator case.

An extent for which type inference refuses other values must be recorded as equal to others.
"""

from __future__ import annotations

from typing import Any

import pytest

from lathe.core.errors import LatheError
from lathe.core.ir.dim import Dim, symbol, symbols
from lathe.core.ir.equation import solve
from lathe.core.ops.opdef.equal_extents import MeetingExtents, meeting_extents
from lathe.core.ops.opdef.inference import infer_graph
from tests.core.ops.cases import CASES, Case
from tests.core.ops.harness import graph_of

OTHERS = (101, 8 * 9 * 25 * 49)  # extents that no case has: a prime, and one that numbers of groups divide

# Operator and input -> why its extents need not equal others.
NO_EQUALITY = {
    ("GatherND", 1): "the last extent of the indices is a number of axes",
    ("ScatterND", 1): "the last extent of the indices is a number of axes",
    ("Reshape", 0): "the shape copies this extent",
}


def _is_one_number(case: Case, index: int, axis: int) -> bool:
    """True if inference refuses the extents in `OTHERS` for this axis."""
    for other in OTHERS:
        shape = [*case.inputs[index].shape]
        shape[axis] = other
        try:
            graph_of(case, {index: tuple(shape)})
            return False
        except LatheError:
            continue
    return True


def _met(case: Case, index: int, axis: int) -> MeetingExtents | None:
    """The recorded equal extents if this extent is a symbol; None if the operator accepts only numbers."""
    shape: list[Dim] = [*case.inputs[index].shape]
    shape[axis] = symbol("m")
    try:
        graph = graph_of(case, {index: tuple(shape)})
    except LatheError:
        return None
    return meeting_extents(graph, infer_graph(graph))


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
        answers = [solve(*pair, lambda name: name == "m") for pair in pairs]
        assert ("m", extent) in answers or (extent == 1 and pairs), f"{case.label}: axis {axis} of input {index}: {met}"
    assert noted > 300


@pytest.mark.parametrize("op", ["Add", "Where", "Expand"])
def test_extents_that_broadcast_may_be_1(op: str) -> None:
    """Extents of operands that broadcast are not recorded as required to be equal."""
    for case, index, axis in (each.values for each in _extents()):
        if case.op == op and (met := _met(case, index, axis)) is not None:
            assert not any(symbols(dim) for pair in met.equal for dim in pair)
