"""States are updated in place if their old value is dead, and copied otherwise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import lathe
from lathe.core.ir.graph import Graph, State, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.kernels.target import Target
from lathe.core.ops.opdef.terms import Term, Writer
from lathe.core.plan.planner import make_plan

F32 = DType.FLOAT32
TARGET = Target("avx2", "x86_64-unknown-linux-gnu", "haswell", "", 32, 16)


def with_state(build: Callable[[Term, Term], tuple[Term, Term]]) -> Graph:
    """A graph of x and the state s, each 4 x 4; `build` returns an output and the next state."""
    graph = Graph("g")
    writer = Writer(graph)
    x = writer.input("x", TensorType(F32, (4, 4)))
    state = Value("s", TensorType(F32, (4, 4)))
    graph.states = [State(state, state, np.arange(16, dtype=np.float32).reshape(4, 4))]
    output, update = build(x, writer.term(state))
    graph.outputs, graph.states[0].update = [output.value], update.value
    return graph


def read_later(x: Term, s: Term) -> tuple[Term, Term]:
    moved = s + x
    return moved @ s, moved


def also_an_output(x: Term, s: Term) -> tuple[Term, Term]:
    moved = s + x
    return moved, moved


IN_PLACE: dict[str, Callable[[Term, Term], tuple[Term, Term]]] = {
    "its own elements": lambda x, s: (x * s, s + x),
    "written after the last read": lambda x, s: ((x @ s).op("Relu"), x @ x),
    "a view of the result": lambda x, s: (x * 2, (s * x).reshape((16,)).reshape((4, 4))),
}
COPIED: dict[str, Callable[[Term, Term], tuple[Term, Term]]] = {
    "read later": read_later,
    "elements of other places": lambda x, s: (x * 2, x @ s),
    "broadcast": lambda x, s: (x * 2, s.slice(0, 0, 1) + x),
    "the result is an output": also_an_output,
    "not computed": lambda x, s: (x + s, x),
}


@pytest.mark.parametrize("build", IN_PLACE.values(), ids=IN_PLACE)
def test_states_are_updated_in_place(build: Callable[[Term, Term], tuple[Term, Term]]) -> None:
    assert make_plan(with_state(build), TARGET).plan.copies == ()
    assert_right(build)


@pytest.mark.parametrize("build", COPIED.values(), ids=COPIED)
def test_states_are_copied_if_the_old_value_is_read_later(build: Callable[[Term, Term], tuple[Term, Term]]) -> None:
    plan = make_plan(with_state(build), TARGET).plan
    assert plan.states[0].base in [base for _, base in plan.copies]
    assert_right(build)


def assert_right(build: Callable[[Term, Term], tuple[Term, Term]]) -> None:
    """Check three runs of a session against the interpreter on the same graph."""
    graph = with_state(build)
    session = lathe.compile(graph, threads=1)
    for run in range(3):
        x = np.random.default_rng(run).uniform(-1, 1, (4, 4)).astype(np.float32)
        copy = with_state(build)
        copy.states[0].initial = graph.states[0].initial
        copy.outputs.append(copy.states[0].update)
        expected = list(lathe.interpret(copy, {"x": x}).values())
        found = next(iter(session.run({"x": x}).values()))
        np.testing.assert_allclose(found, expected[0], 1e-5, 1e-5, err_msg=f"run {run}")
        graph.states[0].initial = expected[-1]  # also the first result, if the update is the output
