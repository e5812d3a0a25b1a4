"""Training: losses, optimizers and schedules, and the training step as one compiled graph.

trained = train.fit(model, {"x": images, "y": labels}, epochs=5)         # with a bar, checkpoints, a report

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
    from core.train.trained import Trained
    from core.train.training import fit

__all__ = ["TrainStep", "Trained", "data", "fit", "losses", "optimizers", "schedules", "step"]

_HOMES = {"TrainStep": "stepping", "Trained": "trained", "fit": "training", "step": "stepping"}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'core.train' has no attribute '{name}'")
    if name in _HOMES:
        return getattr(importlib.import_module(f"core.train.{_HOMES[name]}"), name)
    return importlib.import_module(f"core.train.{name}")
