"""Models trained by PyTorch and by Lathe from the same weights on the same batches end with the same weights."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lathe
from lathe.core.train import step
from lathe.core.train.training_step import losses, optimizers
from lathe.core.train.training_step.optimizers import Optimizer

STEPS = 20

# what PyTorch's exporter says of itself
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def lenet() -> Any:
    images = [
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    return nn.Sequential(*images, nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 10))


def normalized() -> Any:
    # a bias before a normalization has no gradient but rounding errors, of which Adam makes whole steps
    first = [nn.Conv2d(1, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8, momentum=0.1), nn.GELU(), nn.AvgPool2d(2)]
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(288, 20), nn.LayerNorm(20), nn.Tanh(), nn.Linear(20, 10))


def exported(model: Any, x: Any) -> lathe.Graph:
    """The model as PyTorch's exporter writes it, still training."""
    data = io.BytesIO()
    mode = torch.onnx.TrainingMode.PRESERVE
    torch.onnx.export(model, (x,), data, input_names=["x"], dynamo=False, training=mode, do_constant_folding=False)
    return lathe.load(data.getvalue())


@pytest.mark.parametrize("make", [lenet, normalized])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (optimizers.SGD(0.05, momentum=0.9, nesterov=True), lambda p: torch.optim.SGD(p, 0.05, 0.9, nesterov=True)),
        (optimizers.AdamW(1e-3), lambda p: torch.optim.AdamW(p, 1e-3)),
    ],
)
def test_the_same_weights(make: Callable[[], Any], ours: Optimizer, theirs: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    model = make().train()
    rng = np.random.default_rng(0)
    batches = [(rng.normal(0, 1, (16, 1, 28, 28)).astype(np.float32), rng.integers(0, 10, 16)) for _ in range(STEPS)]
    learner = step(exported(model, torch.from_numpy(batches[0][0])), losses.CrossEntropy(), ours, threads=1)
    optimizer = theirs(model.parameters())
    for x, target in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(target))
        loss.backward()
        optimizer.step()
        found = learner.run({"x": x, "target": target})["loss"]
        np.testing.assert_allclose(found, loss.item(), 2e-3)
    for name, parameter in model.named_parameters():
        expected = parameter.detach().numpy()
        np.testing.assert_allclose(
            learner.parameters[name], expected, 2e-2, 2e-3 * np.abs(expected).max(), err_msg=name
        )
