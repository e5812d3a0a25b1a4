"""Whole models, trained by `lathe.core.train.step` and by PyTorch from the same weights on the same batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lathe import nn
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.train import step
from lathe.core.train.training_step import losses, optimizers
from tests.core.nn.models import MODELS, MOMENTUM, RATE, Model

TORCH = np.load(Path(__file__).parent / "torch_models.npz")


def _cases() -> list[Any]:
    return [
        pytest.param(model, id=name, marks=[pytest.mark.slow] if name == "recurrent" else [])
        for model in MODELS
        for name in [model.make.__name__]
    ]


@pytest.mark.parametrize("model", _cases())
@pytest.mark.sample(3)
def test_the_same_losses_and_the_same_weights(model: Model) -> None:
    name, module = model.make.__name__, model.make(nn)
    module.load_state_dict({path: model.weight(path, each.data.shape) for path, each in module.named_state()})
    x, _ = model.batches()[0]
    graph = nn.trace(module, {"x": TensorType(DType.from_numpy(x.dtype), (symbol("n"), *x.shape[1:]))})
    learner = step(graph, losses.CrossEntropy(), optimizers.SGD(RATE, momentum=MOMENTUM), threads=1)
    found = [learner.run({"x": x, "target": target})["loss"] for x, target in model.batches()]
    np.testing.assert_allclose(found, TORCH[f"{name}/loss"], 1e-4)
    parameters = dict(module.named_parameters())
    assert {f"{name}/{path}" for path in parameters} == {key for key in TORCH if key.startswith(name)} - {
        f"{name}/loss"
    }
    for path in parameters:
        expected = TORCH[f"{name}/{path}"]
        np.testing.assert_allclose(learner.parameters[path], expected, 1e-3, 1e-4, err_msg=path)
