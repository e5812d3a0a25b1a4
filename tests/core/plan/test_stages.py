"""Steps of one stage may run in any order or at once: running them in reverse gives the same results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.codegen.target import host
from lathe.core.compiler import pipeline
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph, State, Value
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.plan.plan import Plan, Region, Segment, Step
from lathe.core.plan.planner import make_plan
from lathe.core.train import step
from lathe.core.train.training_step import losses, optimizers
from tests.core.random_nets import Net, feeds

N = symbol("n")
Write = Callable[[Builder, Value], list[Value]]


def runs(plan: Plan) -> list[list[Step]]:
    """The steps of each stage."""
    found: list[list[Step]] = []
    for segment in (entry for entry in plan.schedule if isinstance(entry, Segment)):
        begins = True
        for each in plan.steps[segment.first : segment.last]:
            found += [[]] if begins else []
            found[-1].append(each)
            begins = each.has_barrier
    return found


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Compiles everything with the steps of each stage in reverse; the list holds the plans before the reversal."""
    seen: list[Plan] = []
    build = pipeline.build

    def reversed_build(*args: Any) -> Any:
        compiled = build(*args)
        seen.append(compiled.plan)
        stages = [[replace(each, has_barrier=False) for each in stage[::-1]] for stage in runs(compiled.plan)]
        steps = [each for *others, last in stages for each in (*others, replace(last, has_barrier=True))]
        return replace(compiled, plan=replace(compiled.plan, steps=tuple(steps)))

    monkeypatch.setattr(pipeline, "build", reversed_build)
    return seen


def written(write: Write) -> Graph:
    graph = Graph("g")
    builder = Builder(graph)
    graph.outputs = write(builder, builder.input("x", TensorType(DType.FLOAT32, (N, 64))))
    return graph


def sizes(write: Write, threads: int = 2) -> list[int]:
    """The number of steps of each stage."""
    return [len(stage) for stage in runs(make_plan(written(write), host(), threads).plan)]


def weight(b: Builder, seed: int) -> Value:
    return b.constant(np.random.default_rng(seed).standard_normal((64, 64)).astype(np.float32) / 8)


def branches(b: Builder, x: Value) -> list[Value]:
    left, right = b("MatMul", x, weight(b, 0)), b("MatMul", x, weight(b, 1))
    return [b("Mul", left, right)]


def test_products_of_one_operand_share_a_stage() -> None:
    assert sizes(branches) == [2, 1]


def test_on_one_thread_every_step_is_a_stage() -> None:
    assert sizes(branches, threads=1) == [1, 1, 1]


def test_a_chain_has_no_stages() -> None:
    def chain(b: Builder, x: Value) -> list[Value]:
        return [b("MatMul", b("Softmax", b("MatMul", x, weight(b, 0))), weight(b, 1))]

    assert sizes(chain) == [1, 1, 1]


def test_parts_of_one_tensor_are_written_side_by_side() -> None:
    def joined(b: Builder, x: Value) -> list[Value]:
        return [b("Softmax", b("Concat", b("MatMul", x, weight(b, 0)), b("MatMul", x, weight(b, 1)), axis=1))]

    assert sizes(joined) == [2, 1]


def test_a_state_is_not_overwritten_beside_a_reader() -> None:
    graph = Graph("g")
    builder = Builder(graph)
    x = builder.input("x", TensorType(DType.FLOAT32, (64, 64)))
    old = Value("s", TensorType(DType.FLOAT32, (64, 64)))
    graph.states = [State(old, old, np.zeros((64, 64), np.float32))]
    graph.outputs = [builder("MatMul", old, x)]
    graph.states[0].update = builder("Add", old, x)
    plan = make_plan(graph, host(), 2).plan
    assert not plan.copies  # the sum overwrites the product's operand
    assert [len(stage) for stage in runs(plan)] == [1, 1]


def test_a_value_read_by_a_neighbour_is_not_written_in_place() -> None:
    def shared(b: Builder, x: Value) -> list[Value]:
        made = b("MatMul", x, weight(b, 0))
        return [b("Concat", b("Relu", made), b("MatMul", made, weight(b, 1)), axis=0)]

    for rows in (1, 5):
        x = np.random.default_rng(rows).standard_normal((rows, 64)).astype(np.float32)
        graph = written(shared)
        session = lathe.compile(graph, threads=2, optimize=False, tune="off")
        (want,) = lathe.interpret(graph, {"x": x}).values()
        (got,) = session.run({"x": x}).values()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.sample(3)
def test_random_graphs_run_backwards(seed: int, backwards: list[Plan]) -> None:
    rng = np.random.default_rng(seed)
    graph = Net(lambda below: int(rng.integers(below))).grow(25)
    session = lathe.compile(graph, threads=2, tune="off")
    for batch in (1, 5):
        given = feeds(graph, batch, seed)
        got, want = session.run(given), lathe.interpret(graph, given)
        for name, expected in want.items():
            np.testing.assert_allclose(got[name], expected, rtol=1e-3, atol=1e-3)
    assert backwards
    for plan in backwards:
        assert_apart(plan)


def assert_apart(plan: Plan) -> None:
    """Check that buffers with overlapping lifetimes are disjoint."""

    def bytes_of(region: Region, n: int) -> range:
        return range(region.offset.at(n), region.offset.at(n) + region.size.at(n))

    for one, other in combinations(plan.regions, 2):
        if one.first <= other.last and other.first <= one.last:
            for n in (1, 3):
                first, second = bytes_of(one, n), bytes_of(other, n)
                assert first.stop <= second.start or second.stop <= first.start, (one, other)


def test_a_training_step_runs_backwards(backwards: list[Plan]) -> None:
    """Its gradients and updates depend on each other in few places; states are written in place beside readers."""

    def net(b: Builder, x: Value) -> list[Value]:
        hidden = b("Relu", b("MatMul", x, weight(b, 0)))
        return [b("MatMul", b("Relu", b("MatMul", hidden, weight(b, 1))), weight(b, 2))]

    rng = np.random.default_rng(0)
    given = {"x": rng.standard_normal((500, 64)).astype(np.float32), "target": rng.integers(0, 64, 500)}
    trained = [step(written(net), losses.CrossEntropy(), optimizers.Adam(1e-2), threads=t) for t in (1, 2)]
    for _ in range(3):
        apart, together = (float(each.run(given)["loss"]) for each in trained)
        assert together == pytest.approx(apart, rel=1e-5)
    for name, array in trained[0].live_parameters.items():
        np.testing.assert_allclose(trained[1].live_parameters[name], array, rtol=1e-4, atol=1e-6)
    assert max(len(stage) for stage in runs(backwards[-1])) > 1
