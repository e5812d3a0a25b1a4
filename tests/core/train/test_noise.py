"""Dropout's bits: even, independent of each other, and a function of the key alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from lathe.core.ir.graph import Graph, Value
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.ops.opdef.terms import Term, Writer
from lathe.core.reference import interpret
from lathe.core.train import step
from lathe.core.train.training_step import losses, optimizers, random_numbers


def drawn(key: int, salt: int, shape: tuple[Any, ...], **sizes: int) -> Any:
    """Random bits, uint32 of `shape`; `sizes` are the values of its symbols."""
    graph = Graph("bits")
    writer = Writer(graph)
    like = writer.input("like", TensorType(DType.FLOAT32, shape))
    found = random_numbers.random_bits(writer, writer.input("key", TensorType(DType.UINT32, ())), salt, like.shape)
    graph.outputs = [found.value]
    like_array = np.zeros([sizes.get(str(dim), dim) for dim in shape], np.float32)
    return interpret(graph, {"like": like_array, "key": np.array(key, np.uint32)})[found.value.name]


def test_bits_are_even_and_uncorrelated() -> None:
    bits = drawn(7, 1, (64, 5, 31))
    each = (bits.reshape(-1, 1) >> np.arange(32, dtype=np.uint32)) & 1
    assert abs(each.mean(0) - 0.5).max() < 0.02  # 9,920 draws: four standard deviations
    assert len(np.unique(bits)) > bits.size - 5
    other = [drawn(8, 1, (64, 5, 31)), drawn(7, 2, (64, 5, 31)), np.roll(bits, 1, 0), np.roll(bits, 1, 2)]
    for another in other:
        assert abs(np.corrcoef(bits.ravel(), another.ravel())[0, 1]) < 0.04


def test_a_symbolic_axis_is_counted_like_a_static_one() -> None:
    static, symbolic = drawn(3, 1, (symbol("n"), 6), n=9), drawn(3, 1, (symbol("n"), symbol("m")), n=9, m=6)
    assert static.shape == symbolic.shape == (9, 6)
    np.testing.assert_array_equal(static, symbolic)
    np.testing.assert_array_equal(static[:4], drawn(3, 1, (symbol("n"), 6), n=4))


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.9])
def test_dropout_drops_its_share_in_native_code(ratio: float) -> None:
    outputs = [dropping(ratio, seed=5).run(feeds())["y"] for _ in range(2)]
    np.testing.assert_array_equal(*outputs)
    assert abs((outputs[0] == 0).mean() - ratio) < 0.02
    np.testing.assert_allclose(outputs[0][outputs[0] != 0], 1 / (1 - ratio), 1e-6)


def test_every_run_seed_and_node_has_independent_bits() -> None:
    learner = dropping(0.5, seed=0)
    first, second = (learner.run(feeds())["y"] == 0 for _ in range(2))
    other = dropping(0.5, seed=1).run(feeds())["y"] == 0
    again = dropping(0.5, seed=0)
    again.load_state(learner.state(), runs=1)
    np.testing.assert_array_equal(second, again.run(feeds())["y"] == 0)
    for one, two in ((first, second), (first, other)):
        assert 0.45 < (one == two).mean() < 0.55
    twice = dropping(0.5, seed=0, times=2).run(feeds())["y"]
    assert abs((twice != 0).mean() - 0.25) < 0.02
    assert "FALLBACK" not in learner.explain()


@pytest.mark.parametrize(
    ("op", "attrs", "mean", "deviation"),
    [
        ("RandomUniformLike", {"low": 1.0, "high": 3.0}, 2.0, 1 / np.sqrt(3)),
        ("RandomNormalLike", {"mean": -1.0, "scale": 2.0}, -1.0, 2.0),
        ("RandomNormal", {"shape": (64, 80)}, 0.0, 1.0),
    ],
)
def test_random_operators_draw_new_numbers_in_every_run(
    op: str, attrs: dict[str, Any], mean: float, deviation: float
) -> None:
    """Random operators in the model itself, as in a variational autoencoder."""

    def learner() -> Any:
        graph = Graph("noise")
        writer = Writer(graph)
        x = writer.input("x", TensorType(DType.FLOAT32, (64, 80)))
        drawn = writer.term(writer.emit(op, [x.value] if op.endswith("Like") else [], attrs)[0])
        y = drawn + x * writer.array(np.zeros(80, np.float32), name="w")
        y.value.name = "y"
        graph.outputs = [y.value]
        return step(graph, losses.MeanSquaredError(), optimizers.SGD(0.0), keep_outputs=True, threads=1)

    one, other = learner(), learner()
    first, second = (one.run(feeds())["y"] for _ in range(2))
    np.testing.assert_array_equal(first, other.run(feeds())["y"])
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.05
    np.testing.assert_allclose([first.mean(), first.std()], [mean, deviation], atol=0.06 * deviation)
    if "Normal" in op:  # kurtosis
        assert abs((((first - mean) / deviation) ** 4).mean() - 3) < 0.3
    assert "FALLBACK" not in one.explain()


_SEEDS = (None, None, None, 1.0, 2.0, 3.0, 0.25, -1.0)
_NOISE: Mapping[str, Callable[[Writer, Term, Mapping[str, Any]], Value]] = {
    "dropout": lambda writer, x, seed: writer.emit("Dropout", [x.value], seed)[0],
    "uniform": lambda writer, x, seed: writer.emit("RandomUniform", [], {"shape": (64, 80), **seed})[0],
    "normal": lambda writer, x, seed: writer.emit("RandomNormal", [], {"shape": (64, 80), **seed})[0],
    "uniform like": lambda writer, x, seed: writer.emit("RandomUniformLike", [x.value], seed)[0],
    "normal like": lambda writer, x, seed: writer.emit("RandomNormalLike", [x.value], seed)[0],
}


@pytest.mark.slow
def test_all_random_operators_of_a_graph_are_independent() -> None:
    """Neither their numbers are correlated nor the distances of these from the mean; seeds are of single nodes."""
    graph = Graph("noise")
    writer = Writer(graph)
    x = writer.input("x", TensorType(DType.FLOAT32, (64, 80)))
    seeds = [{} if seed is None else {"seed": seed + 10 * kind} for kind in range(len(_NOISE)) for seed in _SEEDS]
    emits = [emit for emit in _NOISE.values() for _ in _SEEDS]
    drawn = [writer.term(emit(writer, x, seed)) for emit, seed in zip(emits, seeds, strict=True)]
    y = writer.term(writer.emit("Concat", [one.value for one in drawn], {"axis": 1})[0])
    y = y + writer.array(np.zeros(80 * len(drawn), np.float32), name="w")
    y.value.name = "y"
    graph.outputs = [y.value]
    learner = step(graph, losses.MeanSquaredError(), optimizers.SGD(0.0), keep_outputs=True, threads=1)
    x_and_target = {"x": np.ones((64, 80), np.float32), "target": np.zeros((64, 80 * len(drawn)), np.float32)}
    numbers = np.stack([part.ravel() for part in np.split(learner.run(x_and_target)["y"], len(drawn), 1)])
    distances = abs(numbers - numbers.mean(1, keepdims=True))
    correlations = np.corrcoef(np.concatenate([numbers, distances[numbers.min(1) != 0]]))  # distances of masks are 1
    own = np.eye(len(correlations), dtype=bool)
    uniform_or_normal = np.flatnonzero(numbers.min(1) != 0)
    own[uniform_or_normal, len(numbers) + np.arange(len(uniform_or_normal))] = True  # of one node: not our subject
    assert abs(correlations[~(own | own.T)]).max() < 0.08  # six standard deviations of 5,120 numbers


def feeds() -> dict[str, Any]:
    return {"x": np.ones((64, 80), np.float32), "target": np.zeros((64, 80), np.float32)}


def dropping(ratio: float, seed: int, times: int = 1) -> Any:
    """A training step with rate 0, whose output y is x after dropout."""
    graph = Graph("dropout")
    writer = Writer(graph)
    y = writer.input("x", TensorType(DType.FLOAT32, (symbol("n"), 80))) * writer.array(
        np.ones(80, np.float32), name="w"
    )
    for _ in range(times):
        y = y.op("Dropout", writer.array(np.float32(ratio)))
    y.value.name = "y"
    graph.outputs = [y.value]
    loss, optimizer = losses.MeanSquaredError(), optimizers.SGD(0.0)
    return step(graph, loss, optimizer, keep_outputs=True, seed=seed, threads=1)
