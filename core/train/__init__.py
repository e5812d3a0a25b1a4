"""Training: losses, optimizers and schedules, and the training step as one compiled graph.

step = train.step(core.load("model.onnx"), losses.CrossEntropy(), optimizers.Adam(), schedules.OneCycle(0.01, 500))
for x, target in batches:
    results = step.run({"x": x, "target": target})       # {"loss": ...}; the parameters have moved
trained = step.graph()                                    # the model with its new parameters
"""

from core.train import losses, optimizers, schedules
from core.train.step import TrainStep, step

__all__ = ["TrainStep", "losses", "optimizers", "schedules", "step"]
