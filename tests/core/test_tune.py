"""The tuner: its measurements, when it changes its choice, and that its record makes a compilation reproducible."""

from __future__ import annotations

import itertools
import json
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.codegen.target import host, plain
from lathe.core.compiler import compile as compile_module
from lathe.core.compiler import symbol_binding, tuner
from lathe.core.compiler.description import describe
from lathe.core.compiler.options import make_options
from lathe.core.compiler.tuner import Choices, Problem, Record
from lathe.core.errors import ArtifactError
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.kernels.call import KernelCall, KernelSpec
from lathe.core.kernels.cpu import object_for
from lathe.core.passes.pipeline import optimize
from lathe.core.runtime.host import trial
from lathe.core.runtime.host.trial import host_bench

BATCHES = (1, 8)


def product(depth: int = 256, columns: int = 200) -> Graph:
    """[n, depth] times a constant matrix."""
    graph = Graph("product")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (symbol("n"), 16, depth)))
    w = b.constant(np.random.default_rng(0).standard_normal((depth, columns), np.float32), "w")
    graph.outputs = [b("MatMul", x, w)]
    return graph


def image() -> Graph:
    """A 3x3 and a 1x1 convolution."""
    graph = Graph("image")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (symbol("n"), 32, 13, 14)))
    rng = np.random.default_rng(0)
    for kernel, channels in ((3, 48), (1, 40)):
        w = b.constant(rng.standard_normal((channels, x.shape[1], kernel, kernel)).astype(np.float32), "w")
        x = b("Conv", x, w, pads=(kernel // 2,) * 4)
    graph.outputs = [x]
    return graph


def problems(graph: Graph) -> list[Problem]:
    """The tuner's problems for the graph, as the compiler plans it."""
    batching = describe(graph, make_options(threads=1)).batching
    optimized, _ = optimize(symbol_binding.bind(graph, batching, ()))
    return tuner.worthwhile_problems(tuner.problems(optimized, host(), 1, BATCHES).values())


def compiled(spec: KernelSpec) -> bytes:
    return object_for(spec, host())


BENCH = host_bench(compiled)


class Clock:
    """A fake of `Trial`: all candidates take 1 s, except the second, whose times are those of the script."""

    script: tuple[float, ...] = ()

    def __init__(self, call: KernelCall, *_: object) -> None:
        self.call = call
        self.times = itertools.cycle(self.script)

    def seconds(self) -> float:
        return next(self.times) if self.call is Clock.second else 1.0

    def settled(self, call: KernelCall) -> KernelCall:
        return call

    second: KernelCall | None = None


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("script", "wins"),
    [((0.5,), True), ((0.99,), False), ((0.9, 0.9, 0.9, 9.0), True), ((1.1, 1.1, 1.1, 0.1), False), ((2.0,), False)],
    ids=["faster", "hardly faster", "faster but for outliers", "slower but for outliers", "slower"],
)
def test_a_challenger_needs_a_clear_lead(
    monkeypatch: pytest.MonkeyPatch, script: tuple[float, ...], wins: bool
) -> None:
    (problem,) = problems(product())
    monkeypatch.setattr(trial, "Trial", Clock)
    monkeypatch.setattr(Clock, "script", script)
    monkeypatch.setattr(Clock, "second", problem.calls[1])
    assert tuner.fastest(problem, BENCH) is problem.calls[1 if wins else 0]


def test_real_measurements_pick_one_of_the_candidates() -> None:
    (problem,) = problems(product())
    findings = tuner.tune([problem], {}, inf, BENCH)
    assert findings.keys() == {problem.key} and findings[problem.key] in {c.spec.symbol for c in problem.calls}
    assert tuner.tune([problem], findings, inf, BENCH) == {}  # nothing left to find


def test_a_budget_limits_the_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    found = problems(image())
    assert len(found) == 2 and found[0].work > found[1].work
    now = itertools.count()
    monkeypatch.setattr(tuner.time, "perf_counter", lambda: float(next(now)))
    monkeypatch.setattr(tuner, "fastest", lambda problem, *_: problem.calls[-1])
    assert tuner.tune(found, {}, 2.5, BENCH).keys() == {found[0].few.key}


def test_late_measurements_end_after_the_fewest_rounds() -> None:
    turns: list[int] = []

    class Turn:
        def seconds(self) -> float:
            turns.append(1)
            return 1.0

    trials: list[Any] = [Turn(), Turn()]
    for end, rounds in ((0.0, 3), (inf, 7)):
        turns.clear()
        assert tuner._speedups(trials, end, 0) == [1.0, 1.0]
        assert len(turns) == 2 * rounds


def test_equal_nodes_are_one_problem_and_small_ones_none() -> None:
    graph = product(columns=256)
    b = Builder(graph)
    again = b("MatMul", b("Relu", graph.outputs[0]), b.constant(np.ones((256, 256), np.float32), "w2"))
    graph.outputs = [b("Relu", again)]
    assert len(problems(graph)) == 1
    assert problems(product(8, 8)) == []


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 0), (3, 0), (0, 32)])
def test_nothing_is_measured_where_there_are_no_channels(inputs: int, outputs: int, kernel: int) -> None:
    """Kernels are written for extents of at least one; the reference answers."""
    graph = Graph("empty")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (symbol("n"), inputs, 8, 8)))
    graph.outputs = [b("Conv", x, b.constant(np.zeros((outputs, inputs, kernel, kernel), np.float32), "w"))]
    session = lathe.compile(graph, threads=1, tune="full")
    (result,) = session.run({"x": np.ones((2, inputs, 8, 8), np.float32)}).values()
    np.testing.assert_array_equal(result, np.zeros((2, outputs, 9 - kernel, 9 - kernel), np.float32))


@pytest.mark.sample(2)
@pytest.mark.parametrize("graph", [product(), image()], ids=lambda graph: graph.name)
def test_every_candidate_computes_the_same(graph: Graph, tmp_path: Path) -> None:
    found = problems(graph)
    (x,) = graph.inputs
    feeds = {"x": np.random.default_rng(1).standard_normal(x.tensor.evaluate({"n": 3})).astype(np.float32)}
    (want,) = lathe.interpret(graph, feeds).values()
    for index in range(max(len(problem.calls) for problem in found)):
        chosen = [problem.calls[min(index, len(problem.calls) - 1)] for problem in found]
        findings = {problem.key: call.spec.symbol for problem, call in zip(found, chosen, strict=True)}
        options = make_options(threads=1, cache_dir=tmp_path, findings=findings)
        with compile_module.compile_uncached(graph, options) as session:
            assert all(call.spec.summary in session.explain() for call in chosen)
            (got,) = session.run(feeds).values()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_the_findings_of_an_artifact_reproduce_it(tmp_path: Path) -> None:
    graph = image()
    found = problems(graph)
    findings = {problem.key: problem.calls[-1].spec.symbol for problem in found}
    record = Record(tmp_path / "cache" / "tuning", host())
    record.add(findings)
    first, second = tmp_path / "first.lathe", tmp_path / "second.lathe"
    compile_module.compile_to(first, graph, make_options(threads=1, cache_dir=tmp_path / "cache", tune=0.001))
    assert tuner.read_findings(first) == findings
    again = make_options(threads=1, cache_dir=tmp_path / "other", findings=tuner.read_findings(first))
    compile_module.compile_to(second, graph, again)
    assert first.read_bytes() == second.read_bytes()


def test_without_tuning_only_given_findings_count(tmp_path: Path) -> None:
    graph = product()
    (problem,) = problems(graph)
    record = Record(tmp_path, host())
    record.add({problem.key: problem.calls[1].spec.symbol})
    for seconds, expected in ((0.0, problem.calls[0]), (0.001, problem.calls[1])):
        chosen = tuner.choices(graph, host(), make_options(threads=1, tune=seconds), record, BENCH)(problem.request)
        assert chosen is not None and chosen.spec == expected.spec


def test_recorded_choices_that_no_longer_exist_are_ignored() -> None:
    (problem,) = problems(product())
    choices = Choices({problem.key: "lathe_gemm_of_another_release"}, BATCHES)
    assert choices(problem.request) == problem.calls[0] and choices.used == {}


def test_a_record_accumulates_and_a_damaged_one_is_ignored(tmp_path: Path) -> None:
    record = Record(tmp_path / "tuning", host())
    assert record.read() == {}
    record.add({"a": "x"})
    record.add({"b": "y"})
    assert Record(tmp_path / "tuning", host()).read() == {"a": "x", "b": "y"}
    assert Record(tmp_path / "tuning", plain()).read() == {}
    assert [path.name for path in (tmp_path / "tuning").iterdir()] == [record.path.name]
    content = json.loads(record.path.read_text())
    content["findings"]["a"] = "z"
    record.path.write_text(json.dumps(content))
    assert record.read() == {}


def test_findings_are_only_read_from_artifacts(tmp_path: Path) -> None:
    (tmp_path / "no.lathe").write_text("{}")
    with pytest.raises(ArtifactError, match="is not a compiled model"):
        lathe.compile(product(), record=tmp_path / "no.lathe")


@pytest.mark.parametrize("wrong", ["most", -1, float("nan")])
def test_a_budget_is_a_level_or_seconds(wrong: str | float) -> None:
    with pytest.raises(ValueError, match="expected 'off', 'default', 'full' or seconds"):
        lathe.compile(product(), tune=wrong)  # type: ignore[arg-type]


def test_a_loss_of_a_decisive_family_holds_for_unmeasured_kernels() -> None:
    graph = Graph("products")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (symbol("n"), 128, 384)))
    w = [b.constant(np.ones(shape, np.float32)) for shape in ((384, 512), (512, 384))]
    graph.outputs = [b("MatMul", b("MatMul", x, w[0]), w[1])]
    optimized, _ = optimize(symbol_binding.bind(graph, describe(graph, make_options(threads=1)).batching, ()))
    known = tuner.problems(optimized, host().without_tiles, 1, BATCHES)
    measured, other = known.values()
    assert [problem.calls[0].spec.family for problem in known.values()] == ["strassen", "strassen"]
    for winner, family in ((measured.calls[1], "gemm"), (measured.calls[0], "strassen")):
        findings = {measured.key: winner.spec.finding}
        picks = Choices(
            findings, BATCHES, problems=known, beaten_families=tuner.beaten_families(known.values(), findings)
        )
        chosen = picks(other.request)
        assert chosen is not None and chosen.spec.family == family
        assert (other.key in picks.used) == (family == "gemm")
