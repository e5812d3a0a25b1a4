"""A result may not overwrite memory that the same kernel still reads, through a view or through another operand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lathe.core.check.plans import check_plan
from lathe.core.check.switch import CHECK_VARIABLE
from lathe.core.errors import PlanError
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph, Value
from lathe.core.ir.types import Dim, DType, TensorType
from lathe.core.kernels.call import In, Out
from lathe.core.plan.plan import PlannedGraph
from tests.core.check.cases import CPU, F32, GPU, Case, N, case, written
from tests.core.check.faults import moved, with_operand

Write = Callable[[Builder, Value], Value]


def add() -> Graph:
    graph = Graph("body")
    b = Builder(graph)
    scalar = TensorType(DType.FLOAT32, ())
    graph.outputs = [b("Add", b.input("product", scalar), b.input("extra", scalar))]
    return graph


def part(b: Builder, h: Value, start: int, end: int, step: int = 1) -> Value:
    return b("Slice", h, starts=(start,), ends=(end,), axes=(1,), steps=(step,))


def minus_the_first_token(b: Builder, h: Value) -> Value:
    return b("Sub", h, part(b, h, 0, 1))


def minus_a_token(b: Builder, h: Value) -> Value:
    return b("Sub", h, b("Unsqueeze", b("Gather", h, b.constant(np.array(2)), axis=1), axes=(1,)))


def minus_its_mirror_image(b: Builder, h: Value) -> Value:
    return b("Sub", h, part(b, h, -1, -100, -1))


def at_least_the_first(b: Builder, h: Value) -> Value:
    first = part(b, h, 0, 1)
    return b("Where", b("Greater", h, first), h, first)


def product_of_a_part_and_a_residual(b: Builder, h: Value) -> Value:
    weight = b.constant(np.ones((32, 64), np.float32))
    return b("FusedMatMul", part(b, h, 0, 32), weight, h, epilogue=add())


def elements_scattered_over_themselves(b: Builder, h: Value) -> Value:
    return b("ScatterElements", h, b.constant(np.zeros((4, 8), np.int64)), h, axis=0)


def rows_scattered_over_themselves(b: Builder, h: Value) -> Value:
    return b("ScatterND", h, b.constant(np.array([[3], [2], [1], [0]])), h)


GRAPHS: list[tuple[Write, tuple[Dim, ...]]] = [
    (minus_the_first_token, (N, 5, 16)),
    (minus_a_token, (N, 5, 16)),
    (minus_its_mirror_image, (N, 5, 16)),
    (at_least_the_first, (N, 8)),
    (product_of_a_part_and_a_residual, (N, 64)),
    (elements_scattered_over_themselves, (4, 8)),
    (rows_scattered_over_themselves, (4, 8)),
]
each_graph = pytest.mark.parametrize(("write", "shape"), GRAPHS, ids=[write.__name__ for write, _ in GRAPHS])
each_target = pytest.mark.parametrize("target", [CPU, GPU], ids=["cpu", "gpu"])


def graph_of(write: Write, shape: tuple[Dim, ...]) -> Graph:
    return written(lambda b, x: [b("Neg", write(b, b("Exp", x)))], *shape)


def in_place(made: Case) -> PlannedGraph:
    """The plan in which the second-to-last step writes its result over its operand `exp`."""
    index = len(made.plan.steps) - 2
    (place, call), (_, last) = made.planned.calls[index:]
    node = made.graph.nodes[place]
    source = next(k for k, value in enumerate(node.inputs) if value is not None and value.name == "exp")
    target = made.plan.steps[index].operands[call.operands.index(In(source))]
    changed = with_operand(made, (index, call.operands.index(Out())), target)
    return with_operand(Case(made.name, made.graph, changed), (index + 1, last.operands.index(In(0))), target)


@each_target
@each_graph
def test_a_result_over_an_operand_that_is_still_read_is_found(
    write: Write, shape: tuple[Dim, ...], target: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, "0")
    made = case("in place", graph_of(write, shape), target=target)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"\(writes %.*and so does step \d .*\(reads %"):
        check_plan(made.graph, in_place(made), made.target)


@each_target
@each_graph
def test_the_planner_makes_no_such_plan(write: Write, shape: tuple[Dim, ...], target: object) -> None:
    made = case("planned", graph_of(write, shape), target=target)  # type: ignore[arg-type]
    check_plan(made.graph, made.planned, made.target)


def test_a_result_over_an_operand_that_is_read_in_step_is_accepted() -> None:
    made = case("pointwise", written(lambda b, x: [b("Neg", b("Mul", h := b("Exp", x), h))], N, 16))
    check_plan(made.graph, in_place(made), made.target)
    rows = case("rows", written(lambda b, x: [b("Neg", b("Softmax", b("Exp", x)))], N, 16))
    check_plan(rows.graph, in_place(rows), rows.target)


def test_a_result_over_a_smaller_operand_or_one_element_further_is_found() -> None:
    made = case("broadcast", written(lambda b, x: [b("Neg", b("Add", h := b("Exp", x), part(b, h, 0, 16)))], N, 16))
    further = made.plan.steps[0].operands[-1]
    wrong = with_operand(made, (1, len(made.plan.steps[1].operands) - 1), moved(further, b=4))
    with pytest.raises(PlanError):
        check_plan(made.graph, wrong, made.target)


def test_plans_are_checked_only_with_the_switch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Graph] = []
    monkeypatch.setattr("lathe.core.check.plans.check_plan", lambda graph, *_: seen.append(graph))
    graph = written(lambda b, x: [b("Exp", x)], N, 4)
    monkeypatch.setenv(CHECK_VARIABLE, "0")
    case("off", graph)
    assert seen == []
    monkeypatch.setenv(CHECK_VARIABLE, "1")
    case("on", graph)
    assert seen == [graph]
    assert graph.inputs[0].dtype is F32
