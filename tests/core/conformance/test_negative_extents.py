"""Inference accepts an extent below 0, or raises a Lathe error: a branch that is not taken may have one.

For example, the extent 8 - n is -1 for a batch of 9 rows.
"""

from __future__ import annotations

from contextlib import suppress

import pytest

import lathe
from lathe.core.errors import LatheError
from lathe.core.ir.dim import Dim
from lathe.core.ir.graph import Graph, Value
from lathe.core.ir.types import TensorType
from lathe.core.ops.opdef.inference import forget_types, infer_graph
from tests.core.conformance.models import suite_models

_LARGEST = 200_000  # bytes of a model: larger models are whole networks, whose operators occur in smaller ones


@pytest.mark.slow
def test_every_model_of_the_suite() -> None:
    tried = 0
    for name, case in suite_models().items():
        if len(data := case.read()) > _LARGEST:
            continue
        with suppress(LatheError):  # excluded cases do not load
            graph = lathe.load(data)
            for index, value in enumerate(graph.inputs):
                for axis in range(len(_extents(value))):
                    check(name, graph.clone(), index, axis)
                    tried += 1
    assert tried > 8000


def check(name: str, graph: Graph, index: int, axis: int) -> None:
    """Check that inference accepts -1 as one extent of an input, or raises an error of Lathe."""
    forget_types(graph)
    value = graph.inputs[index]
    shape = _extents(value)
    value.type = TensorType(value.dtype, (*shape[:axis], -1, *shape[axis + 1 :]))
    try:
        infer_graph(graph)
    except LatheError:
        pass
    except Exception as error:
        pytest.fail(f"{name}: {value.name} is {value.type}: {type(error).__name__}: {error}")


def _extents(value: Value) -> tuple[Dim, ...]:
    return value.type.shape or () if isinstance(value.type, TensorType) else ()
