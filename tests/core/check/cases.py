"""Plans of many kinds with their graphs, for tests of the plan checker. Their code is never run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx.parser

import lathe
from lathe.core.codegen.target import x86_64_v3
from lathe.core.compiler.description import describe
from lathe.core.compiler.options import make_options
from lathe.core.compiler.symbol_binding import bind
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph, State, Value
from lathe.core.ir.types import Dim, DType, TensorType, symbol
from lathe.core.kernels.call import KernelCall
from lathe.core.kernels.target import GpuTarget, Target
from lathe.core.passes.pipeline import optimize
from lathe.core.plan.plan import Plan, PlannedGraph
from lathe.core.plan.planner import make_plan
from lathe.core.runtime.device import simulated  # noqa: F401  (registers the kernels of the simulated device)
from lathe.core.train import step
from lathe.core.train.training_step import losses, optimizers
from tests.core.expert_models import ExpertModel
from tests.core.random_nets import Net

N = symbol("n")
F32 = DType.FLOAT32
CPU = x86_64_v3()
GPU = GpuTarget(device="simulated")
Write = Callable[[Builder, Value], list[Value]]


@dataclass(frozen=True)
class Case:
    """A plan and the graph that it was made for."""

    name: str
    graph: Graph
    planned: PlannedGraph
    target: Target | GpuTarget = CPU

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    def but(self, **changes: object) -> PlannedGraph:
        """The planned graph with these fields of its plan changed."""
        return replace(self.planned, plan=replace(self.plan, **changes))  # type: ignore[arg-type]

    def calls(self, index: int, call: KernelCall) -> tuple[tuple[int, KernelCall], ...]:
        """The calls of all steps, with another call for one step."""
        found = list(self.planned.calls)
        found[index] = (found[index][0], call)
        return tuple(found)


def written(write: Write, *shape: Dim) -> Graph:
    """The graph that `write` builds from an input of this shape."""
    graph = Graph("g")
    builder = Builder(graph)
    graph.outputs = write(builder, builder.input("x", TensorType(F32, shape)))
    return graph


def case(name: str, graph: Graph, threads: int = 1, target: Target | GpuTarget = CPU) -> Case:
    return Case(name, graph, make_plan(graph, target, threads), target)


def optimized(graph: Graph) -> Graph:
    """The graph as the compiler passes it to the planner."""
    found, _ = optimize(bind(graph, describe(graph, make_options()).batching, ()))
    return found


@functools.cache
def random_net(seed: int, threads: int) -> Case:
    rng = np.random.default_rng(seed)
    graph = Net(lambda below: int(rng.integers(below))).grow(18)
    return case(f"net {seed}, {threads} threads", optimized(graph), threads)


@functools.cache
def joined(threads: int = 1, target: Target | GpuTarget = CPU) -> Case:
    """Views of parts of tensors, and tensors concatenated from parts."""

    def net(b: Builder, x: Value) -> list[Value]:
        h = b("Exp", x)
        first, second = b.emit("Split", h, outputs=2, axis=1, split=(16, 16))
        both = b("Concat", b("Relu", first), b("Mul", first, second), b("Neg", second), axis=1)
        middle = b("Slice", both, starts=(16,), ends=(32,), axes=(1,))
        return [b("Softmax", b("Concat", b("Abs", middle), b("Tanh", both), axis=1)), b("Sigmoid", h)]

    return case(f"joined, {threads} threads, {target.device}", written(net, N, 32), threads, target)


@functools.cache
def branches(threads: int) -> Case:
    """Independent products, and a residual connection."""
    rng = np.random.default_rng(0)

    def net(b: Builder, x: Value) -> list[Value]:
        weights = [b.constant(rng.standard_normal((64, 64)).astype(np.float32)) for _ in range(4)]
        left, right = b("MatMul", x, weights[0]), b("MatMul", x, weights[1])
        both = b("Mul", left, right)
        more = b("Add", b("MatMul", both, weights[2]), both)
        return [b("Tanh", b("MatMul", b("Softmax", more), weights[3]))]

    return case(f"branches, {threads} threads", optimized(written(net, N, 64)), threads)


@functools.cache
def ladder() -> Case:
    """Products and sums that differ only in sizes, so that they share code."""
    rng = np.random.default_rng(0)

    def net(b: Builder, x: Value) -> list[Value]:
        found = []
        for depth in range(64, 144, 16):
            given = b.input(f"x{depth}", TensorType(F32, (N, depth))) if found else x
            moved = b("Exp", b("Mul", given, b.constant(rng.standard_normal(depth).astype(np.float32))))
            found.append(b("MatMul", moved, b.constant(rng.standard_normal((depth, 16)).astype(np.float32))))
        return [b("Softmax", b("Tanh", each)) for each in found]

    return case("ladder", optimized(written(net, N, 64)))


@functools.cache
def images() -> Case:
    """A chain with cut points: large images, then rows."""
    rng = np.random.default_rng(0)

    def net(b: Builder, x: Value) -> list[Value]:
        for out, given in ((16, 8), (24, 16)):
            weight = b.constant(rng.standard_normal((out, given, 3, 3)).astype(np.float32))
            x = b("Relu", b("Conv", x, weight, pads=(1, 1, 1, 1)))
        rows = b("Flatten", b("GlobalAveragePool", x))
        return [b("Softmax", b("MatMul", rows, b.constant(rng.standard_normal((24, 10)).astype(np.float32))))]

    return case("images", optimized(written(net, N, 8, 14, 14)))


@functools.cache
def with_fallback() -> Case:
    """A graph whose middle node runs on its reference operator."""

    def net(b: Builder, x: Value) -> list[Value]:
        h = b("Exp", x)
        sums = b("Det", h)
        return [b("Mul", b("Relu", h), b("Unsqueeze", sums, axes=(1, 2))), b("Reshape", h, shape=(-1, 2, 8))]

    return case("fallback", written(net, N, 4, 4))


@functools.cache
def trained(threads: int, target: Target | GpuTarget = CPU) -> Case:
    """A training step, whose states are updated in place."""
    rng = np.random.default_rng(0)

    def net(b: Builder, x: Value) -> list[Value]:
        first, second = (b.constant(rng.standard_normal((16, 16)).astype(np.float32)) for _ in range(2))
        return [b("MatMul", b("Relu", b("MatMul", x, first)), second)]

    made = step(written(net, N, 16), losses.CrossEntropy(), optimizers.Adam(1e-2))._graphs[True]
    return case(f"training, {threads} threads, {target.device}", optimized(made), threads, target)


def states() -> Case:
    """Two states that exchange their values, which needs copies."""
    graph = Graph("g")
    b = Builder(graph)
    x = b.input("x", TensorType(F32, (4, 4)))
    one, two = (Value(name, TensorType(F32, (4, 4))) for name in ("one", "two"))
    zero = np.zeros((4, 4), np.float32)
    graph.states = [State(one, two, zero), State(two, one, zero)]
    graph.outputs = [b("MatMul", b("Add", one, x), two)]
    return case("states", graph)


@functools.cache
def loop() -> Case:
    """A Loop that carries a value, captures another, and stacks a third."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[n,4] x, float[n,4] h0) => (float[n,4] h, float[m,n,4] ys) <float[4,4] W, int64 M = {5}, bool go = {1}> {
        h, ys = Loop (M, go, h0) <body = b (int64 i, bool c, float[n,4] hin) => (bool again, float[n,4] hout,
        float[n,4] y) {
            p = MatMul(hin, W)
            s = Softmax(p)
            q = MatMul(s, W)
            r = Add(q, x)
            hout = Tanh(r)
            y = Mul(hout, hin)
            again = Identity(c)
        }>
    }"""
    text = text.replace("float[4,4] W", f"float[4,4] W = {{{', '.join(['0.5'] * 16)}}}")
    return case("loop", optimized(lathe.load(onnx.parser.parse_model(text).SerializeToString())))


@functools.cache
def experts() -> Case:
    """Four experts, each a MapSelected that gathers the rows of two sources."""
    graph = lathe.load(ExpertModel(4, 2, 8, 12).model()).clone({"length": 3})
    return case("experts", optimized(graph), threads=2)


def all_cases() -> list[Case]:
    nets = [random_net(seed, 1 + seed % 2) for seed in range(8)]
    return [
        *nets, joined(), joined(2), joined(target=GPU), branches(1), branches(2), ladder(), images(), with_fallback(),
        trained(1), trained(2), trained(1, GPU), states(), loop(),
        experts(),
    ]  # fmt: skip
