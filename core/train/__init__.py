"""Training: losses, optimizers and schedules, and the training step as one compiled graph.

trained = train.fit(model, {"x": images, "y": labels}, epochs=5)         # progress bar, checkpoints, report

step = train.step(lathe.load("model.onnx"), losses.CrossEntropy(), optimizers.Adam(), schedules.OneCycle(0.01, 500))
for x, target in batches:
    results = step.run({"x": x, "target": target})       # {"loss": ...}; run updates the parameters in place
trained = step.graph()                                    # the model with its new parameters

Submodules are imported on first use, so that code that only reads datasets does not import the compiler.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lathe.core.train import data
    from lathe.core.train.run.fit import fit
    from lathe.core.train.run.trained import Trained
    from lathe.core.train.training_step import losses, optimizers, schedules
    from lathe.core.train.training_step.train_step import TrainStep, step

__all__ = ["TrainStep", "Trained", "data", "fit", "losses", "optimizers", "schedules", "step"]

_SUBMODULES = {
    "data": "lathe.core.train.data",
    "losses": "lathe.core.train.training_step.losses",
    "optimizers": "lathe.core.train.training_step.optimizers",
    "schedules": "lathe.core.train.training_step.schedules",
}
_EXPORTS = {
    "TrainStep": "lathe.core.train.training_step.train_step",
    "Trained": "lathe.core.train.run.trained",
    "fit": "lathe.core.train.run.fit",
    "step": "lathe.core.train.training_step.train_step",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(_SUBMODULES[name])
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'lathe.core.train' has no attribute '{name}'")
