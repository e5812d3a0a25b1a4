"""All operator cases, compiled, equal the reference operators, with or without a kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lathe
from tests.core.ops.cases import CASES, Case
from tests.core.ops.harness import graph_of, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_compiled_like_interpreted(case: Case) -> None:
    graph = graph_of(case)
    results = lathe.compile(graph, threads=1).run({v.name: case.inputs[int(v.name[1:])] for v in graph.inputs})
    for value, expected in zip(graph.outputs, map(np.asarray, run(graph, case.inputs)), strict=True):
        ours = results[value.name]
        assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
        if expected.dtype == object:
            assert ours.tolist() == expected.tolist()
        else:
            np.testing.assert_allclose(_wide(ours), _wide(expected), max(case.tolerance, 2e-5), 1e-5)


def _wide(array: Any) -> Any:
    """float64, so that element types which NumPy lacks compare too."""
    return array if array.dtype.kind == "c" else array.astype(np.float64)
