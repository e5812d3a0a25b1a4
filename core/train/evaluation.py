"""`Evaluation`: a model answers while it learns. It reads the weights where the training step keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from core.ir.graph import Array, Graph
from core.runtime.given import Binding
from core.runtime.runner import Runner
from core.runtime.session import BatchInfo
from core.train.feeds import Door
from core.train.joint import evaluation_graph
from core.train.stepping import TrainStep

_EVALUATION = BatchInfo(False, "the loss is a mean over all rows of a batch")


class Evaluation:
    """The model of a training step as it answers: in float32, batch normalization by its running statistics, nothing
    dropped.

    Nothing is copied and nothing compiled again when the weights move. With `averaged` it is the model of the running
    averages, where the step keeps any. It runs where the step does.
    """

    def __init__(self, learner: TrainStep, averaged: bool = False, model: Graph | None = None) -> None:
        """`model`: another one with the same weights, such as the same model on rows of other types."""
        self._options = replace(learner.options, precision="float32", memory=None)
        self._learner, self._averaged = learner, averaged
        self._graph = evaluation_graph(model or learner.model, learner.settings.loss, learner.names(averaged))
        self._door = Door(self._graph.inputs)
        self._executables: dict[Binding, Runner] = {}

    @property
    def weights(self) -> dict[str, Array]:
        """The very arrays that it reads, by name; copies of what is on a device."""
        return self._learner.weights(self._averaged)

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """The `loss` of a batch, and the model's outputs, by name. FeedError for arrays that do not fit."""
        arrays, binding = self._door.admit(feeds)
        self._learner.check()
        results = self._executable(binding).run(1, arrays)
        return {value.name: array for value, array in zip(self._graph.outputs, results, strict=True)}

    def _executable(self, binding: Binding) -> Runner:
        if binding not in self._executables:
            made = self._learner.runner_of(self._graph, self._options, _EVALUATION, binding, self._averaged)
            self._executables[binding] = made
        return self._executables[binding]
