"""Random networks, seeded: passes must not change the interpreter's results."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lathe.core.ir.build import Builder
from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Graph, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.passes.pipeline import Options, optimize, optimizing_passes
from lathe.core.passes.proofs.rows import rows
from lathe.core.reference import interpret
from tests.core.passes.case_files import feeds

Step = Callable[["RandomNet"], Value]


class RandomNet:
    """Grows a graph over images [n, C, 4, 4], matrices [n, k] and tokens [n, t, k]."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.graph = Graph("random")
        self.b = Builder(self.graph)
        n = symbol("n")
        self.values = [
            self.b.input("image", TensorType(DType.FLOAT32, (n, 3, 4, 4))),
            self.b.input("tokens", TensorType(DType.FLOAT32, (n, 4, 6))),
        ]

    def grow(self, steps: int) -> Graph:
        for _ in range(steps):
            self.values.append(STEPS[self.rng.integers(len(STEPS))](self))
        made = self.values[2:]
        self.graph.outputs = [self.b("Identity", value) for value in made[-2:]] + made[:1]
        return self.graph

    def pick(self, rank: int | None = None) -> Value:
        fitting = [value for value in self.values if rank is None or len(value.shape) == rank]
        return fitting[self.rng.integers(len(fitting))]

    def weight(self, *shape: int) -> Value:
        return self.b.constant(self.rng.standard_normal(shape).astype(np.float32) * 0.5)

    def channels(self, value: Value, axis: int = 1) -> int:
        size = value.shape[axis]
        assert isinstance(size, int)
        return size


def _conv(net: RandomNet) -> Value:
    x = net.pick(4)
    w = net.weight(4, net.channels(x), 3, 3)
    bias = net.weight(4) if net.rng.integers(2) else None
    return net.b("Conv", x, w, bias, pads=(1, 1, 1, 1))


def _batch_norm(net: RandomNet) -> Value:
    x = net.pick(4)
    c = net.channels(x)
    variance = net.b.constant(net.rng.uniform(0.5, 2, c).astype(np.float32))
    return net.b("BatchNormalization", x, net.weight(c), net.weight(c), net.weight(c), variance)


def _activation(net: RandomNet) -> Value:
    return net.b(str(net.rng.choice(["Relu", "Sigmoid", "Tanh", "Erf", "Neg", "HardSwish"])), net.pick())


def _twin(net: RandomNet) -> Value:
    x = net.pick()
    partners = [value for value in net.values if value.type == x.type]
    return net.b(str(net.rng.choice(["Add", "Sub", "Mul", "Max"])), x, partners[net.rng.integers(len(partners))])


def _constant(net: RandomNet) -> Value:
    x = net.pick()
    shape = [size if isinstance(size, int) and net.rng.integers(2) else 1 for size in x.shape[1:]]
    c = net.weight(*shape[int(net.rng.integers(len(shape) + 1)) :])
    pair = (x, c) if net.rng.integers(2) else (c, x)
    return net.b(str(net.rng.choice(["Add", "Sub", "Mul"])), *pair)


def _transpose(net: RandomNet) -> Value:
    x = net.pick()
    perm = (0, *(1 + int(axis) for axis in net.rng.permutation(len(x.shape) - 1)))
    return net.b("Transpose", x, perm=perm)


def _back_and_forth(net: RandomNet) -> Value:
    x = net.pick(3)
    inner = net.b("Relu", net.b("Transpose", x, perm=(0, 2, 1)))
    return net.b("Transpose", inner, perm=(0, 2, 1))


def _softmax(net: RandomNet) -> Value:
    x = net.pick()
    return net.b("Softmax", x, axis=int(net.rng.integers(1, len(x.shape))))


def _reduce(net: RandomNet) -> Value:
    x = net.pick()
    axes = tuple(int(axis) for axis in net.rng.permutation(np.arange(1, len(x.shape)))[: net.rng.integers(1, 3)])
    return net.b(str(net.rng.choice(["ReduceMean", "ReduceMax"])), x, axes=axes, keepdims=1)


def _spatial(net: RandomNet) -> Value:
    x = net.pick(4)
    if net.rng.integers(2):
        return net.b("GlobalAveragePool", x)
    return net.b("MaxPool", x, kernel_shape=(1, 1), strides=(1, 1))


def _concat(net: RandomNet) -> Value:
    x = net.pick(4)
    return net.b("Concat", x, x, axis=int(net.rng.integers(1, 4)))


def _slice(net: RandomNet) -> Value:
    x = net.pick()
    return net.b("Slice", x, starts=(0,), ends=(1,), axes=(int(net.rng.integers(1, len(x.shape))),))


def _flat_product(net: RandomNet) -> Value:
    x = net.pick(4)
    flat = net.b("Flatten", x, axis=1)
    return net.b("Gemm", flat, net.weight(5, net.channels(flat)), net.weight(5), transB=1)


def _product(net: RandomNet) -> Value:
    x = net.pick()
    return net.b("MatMul", x, net.weight(net.channels(x, -1), 6))


def _gram(net: RandomNet) -> Value:
    x = net.pick(3)
    scores = net.b("MatMul", x, net.b("Transpose", x, perm=(0, 2, 1)))
    return net.b("Div", scores, net.b.constant(np.float32(2.5)))


STEPS: list[Step] = [
    _conv, _conv, _batch_norm, _activation, _activation, _twin, _twin, _constant, _constant, _transpose,
    _back_and_forth, _softmax, _reduce, _spatial, _concat, _slice, _flat_product, _product, _gram,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_optimized_graphs_give_the_same_results(seed: int) -> None:
    graph = RandomNet(seed).grow(steps=14)
    optimized, _ = optimize(graph, Options(channels_last=seed % 4 != 0))
    given = feeds(graph, seed)
    expected, got = interpret(graph, given), interpret(optimized, given)
    assert list(got) == list(expected)
    for name, array in expected.items():
        scale = float(np.abs(array).max()) or 1.0
        np.testing.assert_allclose(got[name] / scale, array / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_the_random_networks_are_independent(seed: int) -> None:
    assert rows(RandomNet(seed).grow(steps=14)).batchable


@pytest.mark.parametrize("seed", range(20))
def test_optimizing_twice_changes_little(seed: int) -> None:
    once, _ = optimize(RandomNet(seed).grow(steps=14))
    twice, _ = optimize(once)
    assert len(twice.nodes) <= len(once.nodes)


@pytest.mark.parametrize("seed", range(30))
def test_a_pass_that_reports_no_change_changes_nothing(seed: int) -> None:
    """Such a graph is not verified once more."""
    graph = RandomNet(seed).grow(steps=14)
    for step in optimizing_passes(
        Options(integers=seed % 2 == 0, precision="bfloat16" if seed % 3 == 0 else "float32")
    ):
        graph.remove_dead()  # every pass may do this
        before = str(graph)
        if not step.run(graph).changed:
            assert str(graph) == before, step.name
