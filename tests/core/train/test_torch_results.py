"""Optimizers, schedules and losses against PyTorch's results (torch_results.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef.terms import Writer
from lathe.core.reference import interpret
from lathe.core.train.training_step import losses, optimizers, schedules
from lathe.core.train.training_step.losses import Loss
from lathe.core.train.training_step.optimizers import Optimizer

TORCH: dict[str, Any] = json.loads((Path(__file__).parent / "torch_results.json").read_text())
F32 = DType.FLOAT32
VECTOR, NUMBER = TensorType(F32, (6,)), TensorType(F32, ())

OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": optimizers.SGD(0.05),
    "SGD momentum": optimizers.SGD(0.05, momentum=0.9, weight_decay=0.01),
    "SGD dampening": optimizers.SGD(0.05, momentum=0.8, dampening=0.3),
    "SGD nesterov": optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "Adagrad": optimizers.Adagrad(0.05, rate_decay=0.01, weight_decay=0.01),
    "Adadelta": optimizers.Adadelta(1.0, rho=0.9, weight_decay=0.01),
    "RMSprop": optimizers.RMSprop(0.01, weight_decay=0.01),
    "RMSprop centered": optimizers.RMSprop(0.01, momentum=0.7, centered=True),
    "Adam": optimizers.Adam(0.02, weight_decay=0.01),
    "AMSGrad": optimizers.Adam(0.02, amsgrad=True),
    "AdamW": optimizers.AdamW(0.02, weight_decay=0.05),
    "AdaMax": optimizers.AdaMax(0.02, weight_decay=0.01),
    "NAdam": optimizers.NAdam(0.02, weight_decay=0.01),
}
LOSSES: dict[str, Loss] = {
    "CrossEntropy": losses.CrossEntropy(),
    "CrossEntropy smooth": losses.CrossEntropy(label_smoothing=0.1),
    "NegativeLogLikelihood": losses.NegativeLogLikelihood(),
    "MeanSquaredError": losses.MeanSquaredError(),
    "MeanAbsoluteError": losses.MeanAbsoluteError(),
    "Huber": losses.Huber(0.7),
    "BinaryCrossEntropy": losses.BinaryCrossEntropy(),
    "KullbackLeibler": losses.KullbackLeibler(),
}


def test_every_result_is_used() -> None:
    assert TORCH["parameters"].keys() == OPTIMIZERS.keys()
    assert TORCH["losses"].keys() == LOSSES.keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_hundred_updates(name: str) -> None:
    optimizer = OPTIMIZERS[name]
    graph = Graph("update")
    writer = Writer(graph)
    x, gradient = writer.input("x", VECTOR), writer.input("gradient", VECTOR)
    moments = [writer.input(f"moment{i}", VECTOR) for i, _ in enumerate(optimizer.moments)]
    scalars = {key: writer.input(key, NUMBER) for key in optimizer.scalars(1, optimizer.rate)}
    following, after = optimizer.update(x, gradient, moments, scalars)
    graph.outputs = [following.value, *(term.value for term in after)]
    values = [np.array(TORCH["start"], np.float32), *(np.zeros(6, np.float32) for _ in moments)]
    slopes = np.array(TORCH["gradients"], np.float32).reshape(100, 6)
    for step in range(1, 101):
        numbers = {key: np.float32(v) for key, v in optimizer.scalars(step, optimizer.rate).items()}
        named = {"x": values[0], **{f"moment{i}": value for i, value in enumerate(values[1:])}}
        values = list(interpret(graph, {**named, **numbers, "gradient": slopes[step - 1]}).values())
        expected = TORCH["parameters"][name].get(str(step))
        if expected is not None:
            np.testing.assert_allclose(values[0], expected, 1e-6, 1e-6, err_msg=f"after {step} steps")


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("OneCycle", schedules.OneCycle(0.1, 20)),
        ("Cosine", schedules.Cosine(0.1, 10, 0.01)),
        ("Steps", schedules.Steps(0.1, 3, 0.5)),
    ],
)
def test_schedules(name: str, schedule: schedules.Schedule) -> None:
    expected = TORCH["schedules"][name]
    np.testing.assert_allclose([schedule(step) for step in range(len(expected))], expected, 1e-9)


LAST_STEPS = {"CrossEntropy": "Softmax", "CrossEntropy smooth": "Softmax", "BinaryCrossEntropy": "Sigmoid"}


@pytest.mark.parametrize(
    ("name", "last_step"), [*((name, None) for name in LOSSES), *((name, op) for name, op in LAST_STEPS.items())]
)
def test_losses(name: str, last_step: str | None) -> None:
    """Losses of logits are the same for a model whose last step makes probabilities of them."""
    loss, expected = LOSSES[name], TORCH["losses"][name]
    output = np.array(TORCH["outputs"], np.float32).reshape(4, 5)
    graph = Graph("loss")
    writer = Writer(graph)
    x = writer.input("x", TensorType(F32, (4, 5)))
    target = writer.input("target", loss.target(x.value.tensor))
    last = x if last_step is None else x.op(last_step).op("Identity")
    graph.outputs = [loss(last, target).value]
    given = np.array(TORCH["targets"], np.float32).reshape(4, 5)
    if name == "KullbackLeibler":
        given = given / given.sum(1, keepdims=True)
    feeds = {"x": output, "target": np.array(TORCH["classes"]) if target.dtype is DType.INT64 else given}
    back = lathe.gradients(graph, of=graph.outputs[0].name, with_respect_to=["x"])
    found = list(interpret(back, feeds).values())
    np.testing.assert_allclose(found[0], expected["loss"], 1e-6)
    np.testing.assert_allclose(found[1].reshape(-1), expected["gradient"], 1e-5, 1e-7)
