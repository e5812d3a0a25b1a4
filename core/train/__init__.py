"""Training: losses, optimizers and schedules, and the training step as one compiled graph.

step = train.step(core.load("model.onnx"), losses.CrossEntropy(), optimizers.Adam(), schedules.OneCycle(0.01, 500))
for x, target in batches:
    results = step.run({"x": x, "target": target})       # {"loss": ...}; the parameters have moved
trained = step.graph()                                    # the model with its new parameters

The compiler comes with the first use of a step: who only looks at data does without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.train import data, losses, optimizers, schedules
    from core.train.stepping import TrainStep, step

__all__ = ["TrainStep", "data", "losses", "optimizers", "schedules", "step"]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'core.train' has no attribute '{name}'")
    if name in ("TrainStep", "step"):
        return getattr(importlib.import_module("core.train.stepping"), name)
    return importlib.import_module(f"core.train.{name}")
