"""`LiveModel`: runs a model in inference mode during its training, on the weights of the training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lathe.core.ir.graph import Array, Graph
from lathe.core.passes.proofs.batch_info import BatchInfo
from lathe.core.runtime.session.run_inputs import Binding
from lathe.core.runtime.session.runner import Runner
from lathe.core.train.training_step.input_validator import InputValidator
from lathe.core.train.training_step.losses import Loss
from lathe.core.train.training_step.step_graph import evaluation_graph
from lathe.core.train.training_step.train_step import TrainStep

_BATCHING = BatchInfo(False, "the loss is a mean over all rows of a batch")


class LiveModel:
    """The model of a training step in inference mode: float32, batch normalization by running statistics, no dropout.

    It reads the state of the step in place: an update of the weights needs neither a copy nor another compilation. With
    `averaged` it uses the running averages of the weights, if the step keeps them. It runs on the device of the step.
    """

    def __init__(
        self, learner: TrainStep, averaged: bool = False, model: Graph | None = None, loss: Loss | None = None
    ) -> None:
        """`model` replaces the step's model by one with the same weights, such as the model for other input types.

        `loss` replaces the step's loss.
        """
        self._options = replace(learner.options, precision="float32", memory=None)
        self._learner, self._averaged = learner, averaged
        self._graph = evaluation_graph(model or learner.model, loss or learner.settings.loss, learner.names(averaged))
        self._validator = InputValidator(self._graph.inputs)
        self._executables: dict[Binding, Runner] = {}

    @property
    def weights(self) -> dict[str, Array]:
        """The weights that the model reads, by name: on the host the arrays that training updates in place, not copies.

        State on a device is copied to the host.
        """
        return self._learner.weights(self._averaged)

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """The `loss` of a batch and the model's outputs, by name; `feeds` are the model's inputs and `target`.

        FeedError for an input that is missing, unknown or ill-typed. LatheError if a training run that failed on a
        device may have changed the weights.
        """
        arrays, binding = self._validator.validate(feeds)
        self._learner.check()
        results = self._executable(binding).run(1, arrays)
        return {value.name: array for value, array in zip(self._graph.outputs, results, strict=True)}

    def _executable(self, binding: Binding) -> Runner:
        if binding not in self._executables:
            runner = self._learner.runner_of(self._graph, self._options, _BATCHING, binding, self._averaged)
            self._executables[binding] = runner
        return self._executables[binding]
