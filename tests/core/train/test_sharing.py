"""Several training steps over the same parameters, and evaluation during training."""

from __future__ import annotations

import numpy as np
import pytest

from lathe.core.errors import FeedError, LatheError
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.ops.opdef.terms import Term, Writer
from lathe.core.reference import interpret
from lathe.core.train import TrainStep, step
from lathe.core.train.training_step import losses, optimizers
from lathe.core.train.training_step.live_model import LiveModel
from tests.core.train.models import batch, convolutional, perceptron, weight

F32 = DType.FLOAT32


@pytest.mark.parametrize("model", [perceptron, convolutional], ids=lambda model: model.__name__)
def test_an_evaluation_follows_the_weights(model: object) -> None:
    graph: Graph = model()  # type: ignore[operator]
    learner = step(graph, losses.CrossEntropy(), optimizers.Adam(0.02), average=0.9, threads=1)
    now, average = LiveModel(learner), LiveModel(learner, averaged=True)
    for number in range(3):
        learner.run(batch(graph, 16, seed=number))
        feeds = batch(graph, 19, seed=100 + number)
        for evaluation, trained in ((now, learner.graph()), (average, learner.graph(averaged=True))):
            found = evaluation.run(feeds)
            (name,) = [value.name for value in graph.outputs]
            expected = interpret(trained, {"x": feeds["x"]})[name]
            np.testing.assert_allclose(found[name], expected, 1e-4, 1e-5)
            logs = expected - np.log(np.exp(expected).sum(1, keepdims=True))
            picked = logs[np.arange(19), feeds["target"]]
            np.testing.assert_allclose(found["loss"], -picked.mean(), 1e-4)
    with pytest.raises(FeedError, match="input 'target' is missing"):
        now.run({"x": feeds["x"]})


def generator(writer: Writer, z: Term) -> Term:
    return z.op("Gemm", weight(writer, "g.w", 2, 2), weight(writer, "g.b", 2), transB=1)


def discriminator(writer: Writer, x: Term) -> Term:
    hidden = x.op("Gemm", weight(writer, "d.w1", 16, 2), weight(writer, "d.b1", 16), transB=1).op("Tanh")
    return hidden.op("Gemm", weight(writer, "d.w2", 1, 16), weight(writer, "d.b2", 1), transB=1)


def graph_of(*parts: object, name: str) -> Graph:
    graph = Graph(name)
    writer = Writer(graph)
    term = writer.input("x", TensorType(F32, (symbol("n"), 2)))
    for part in parts:
        term = part(writer, term)  # type: ignore[operator]
    graph.outputs = [term.value]
    return graph


def test_a_gan_trains_with_two_steps() -> None:
    """A generative adversarial net (I. Goodfellow et al., 2014) of two steps learns where points lie."""
    loss, rng = losses.BinaryCrossEntropy(), np.random.default_rng(0)
    judge = step(graph_of(discriminator, name="judge"), loss, optimizers.Adam(0.01), threads=1)
    forger = step(
        graph_of(generator, discriminator, name="forger"),
        loss,
        optimizers.Adam(0.01),
        trainable=lambda name, _: name.startswith("g."),
        shares=[judge],
        threads=1,
    )
    assert forger.weights()["d.w1"] is judge.weights()["d.w1"]

    def forged(rows: int) -> np.ndarray:
        w, b = forger.weights()["g.w"], forger.weights()["g.b"]
        return (rng.normal(size=(rows, 2)).astype(np.float32) @ w.T + b).astype(np.float32)

    target = np.concatenate([np.ones((32, 1)), np.zeros((32, 1))]).astype(np.float32)
    for _ in range(400):
        real = rng.normal((1.5, -1.0), 0.3, (32, 2)).astype(np.float32)
        judge.run({"x": np.concatenate([real, forged(32)]), "target": target})
        before = judge.parameters
        forger.run({"x": rng.normal(size=(64, 2)).astype(np.float32), "target": np.ones((64, 1), np.float32)})
        for name, array in judge.parameters.items():
            np.testing.assert_array_equal(array, before[name])
    np.testing.assert_allclose(forged(500).mean(0), (1.5, -1.0), atol=0.5)


def test_two_heads_update_a_shared_trunk() -> None:
    """Two heads on one trunk, as an actor and a critic have it."""

    def headed(name: str, shares: list[TrainStep]) -> TrainStep:
        graph = Graph(name)
        writer = Writer(graph)
        x = writer.input("x", TensorType(F32, (symbol("n"), 2)))
        hidden = x.op("MatMul", weight(writer, "trunk", 2, 3))
        graph.outputs = [hidden.op("MatMul", weight(writer, name, 3, 1)).value]
        return step(graph, losses.MeanSquaredError(), optimizers.SGD(0.1), shares=shares, threads=1)

    actor = headed("actor", [])
    critic = headed("critic", [actor])
    feeds = {"x": np.ones((8, 2), np.float32), "target": np.ones((8, 1), np.float32)}
    trunks = [actor.parameters["trunk"]]
    for learner in (actor, critic):
        learner.run(feeds)
        trunks.append(actor.parameters["trunk"])
    assert not np.array_equal(trunks[0], trunks[1]) and not np.array_equal(trunks[1], trunks[2])
    np.testing.assert_array_equal(critic.parameters["trunk"], trunks[2])


def test_shared_parameters_must_have_one_shape() -> None:
    small, large = perceptron(features=5), perceptron(features=6)
    first = step(small, losses.CrossEntropy(), optimizers.SGD(0.1), threads=1)
    with pytest.raises(LatheError, match=r"shared parameter 'w1': expected float32\[7,6\], got float32\[7,5\]"):
        step(large, losses.CrossEntropy(), optimizers.SGD(0.1), shares=[first], threads=1)
