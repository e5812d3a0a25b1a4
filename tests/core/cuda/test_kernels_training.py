"""Whole training steps of GPUs: loss, gradients and updates against the references, for several batch sizes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lathe.core.compiler.symbol_binding import leading_symbol
from lathe.core.ir.build import Builder
from lathe.core.ir.dim import symbol
from lathe.core.ir.graph import Array, Graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.passes.pipeline import Options, optimize
from lathe.core.reference import bind_symbols, run_nodes
from lathe.core.train import step
from lathe.core.train.training_step.live_model import LiveModel
from lathe.core.train.training_step.losses import CrossEntropy
from lathe.core.train.training_step.optimizers import SGD, AdamW, Optimizer
from lathe.core.train.training_step.step_graph import StepSettings, is_weight, training_step_graph
from tests.core.cuda.gpu_plan import InterpretedPlan
from tests.core.kernels.sweep import floats
from tests.core.train.models import batch, perceptron


def convolutional() -> Graph:
    b = Builder(Graph("images"))
    x = b.input("x", TensorType(DType.FLOAT32, (symbol("batch"), 2, 8, 8)))
    h = b("Conv", x, b.constant(floats(4, 2, 3, 3), "c.weight"), b.constant(floats(4), "c.bias"), pads=(1, 1, 1, 1))
    h = b("MaxPool", b("Relu", h), kernel_shape=(2, 2), strides=(2, 2))
    h = b("Relu", b("Conv", h, b.constant(floats(4, 4, 3, 3), "d.weight"), strides=(2, 2), pads=(1, 1, 1, 1)))
    flat = b("Flatten", h, axis=1)
    b.graph.outputs = [b("Gemm", flat, b.constant(floats(16, 3), "f.weight"), b.constant(floats(3), "f.bias"))]
    return b.graph


def embedded() -> Graph:
    b = Builder(Graph("tokens"))
    tokens = b.input("x", TensorType(DType.INT64, (symbol("batch"), 5)))
    h = b("Gather", b.constant(floats(7, 8), "embedding.weight"), tokens)
    scale, bias = b.constant(np.ones(8, np.float32), "s.weight"), b.constant(floats(8), "s.bias")
    h = b("LayerNormalization", h, scale, bias, axis=-1)
    h = b("Gelu", b("MatMul", h, b.constant(floats(8, 8), "p.weight")))
    b.graph.outputs = [b("ReduceMean", b("MatMul", h, b.constant(floats(8, 3), "q.weight")), axes=(1,), keepdims=0)]
    return b.graph


@pytest.mark.parametrize("optimizer", [SGD(rate=0.1), AdamW()], ids=["sgd", "adamw"])
@pytest.mark.parametrize("model", [convolutional, embedded])
def test_a_step_updates_parameters_like_the_references(model: Callable[[], Graph], optimizer: Optimizer) -> None:
    network = model()
    infer_graph(network)
    joint = training_step_graph(network, StepSettings(CrossEntropy(), optimizer), is_weight, True, False)
    bound = joint.clone({leading_symbol(network) or "": symbol("n")})
    infer_graph(bound)
    optimized, _ = optimize(bound, Options(integers=False, host=False))
    plan = InterpretedPlan(optimized)
    assert not plan.plan.fallbacks.nodes
    known = {state.value: state.initial for state in bound.states}
    for n in (1, 3):
        feeds = _feeds(bound, n)
        environment = {**known, **{value: feeds[value.name] for value in bound.inputs}}
        run_nodes(bound, environment, bind_symbols(bound.inputs, environment))
        outputs = plan.run(feeds, n)
        for value in bound.outputs:
            np.testing.assert_allclose(outputs[value.name], environment[value], rtol=1e-4)
        known = {state.value: environment[state.update] for state in bound.states}
        for value, expected in known.items():
            np.testing.assert_allclose(plan.states[value.name], expected, rtol=1e-3, atol=1e-5, err_msg=value.name)


def test_training_over_several_batch_sizes_agrees_with_the_cpu() -> None:
    """States that several executables share, running averages, and accumulated gradients, by the GPU's kernels."""
    learners = [
        step(perceptron(), CrossEntropy(), SGD(0.05, momentum=0.9), accumulate=2, average=0.9, threads=1, device=device)
        for device in ("cpu", "interpreted")
    ]
    for number, rows in enumerate((4, 4, 3)):
        losses = [learner.run(batch(perceptron(), rows, seed=number))["loss"] for learner in learners]
        np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    expected, found = (learner.state() for learner in learners)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-6, err_msg=name)
    judged = [LiveModel(learner, averaged=True).run(batch(perceptron(), 4))["loss"] for learner in learners]
    np.testing.assert_allclose(judged[1], judged[0], rtol=1e-5)
    learners[1].close()


def _feeds(graph: Graph, n: int) -> dict[str, Array]:
    rng, feeds = np.random.default_rng(n), {}
    for value in graph.inputs:
        shape = value.tensor.evaluate({"n": n})
        if value.dtype.is_float:
            feeds[value.name] = rng.standard_normal(shape).astype(np.float32) if shape else np.asarray(0.1, np.float32)
        else:
            feeds[value.name] = rng.integers(0, 3, shape)
    return feeds
