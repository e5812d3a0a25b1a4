"""`TrainStep`: a compiled training step. One native call does forward pass, loss, backward pass and in-place update."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lathe.core.compiler.options import Options, make_options
from lathe.core.errors import LatheError, UnsupportedError
from lathe.core.ir.graph import Array, Graph, State
from lathe.core.ir.types import TensorType
from lathe.core.passes.proofs.batch_info import BatchInfo
from lathe.core.runtime.session.run_inputs import Binding
from lathe.core.runtime.session.runner import Runner
from lathe.core.train.training_step.input_validator import InputValidator, describe_array
from lathe.core.train.training_step.loss_scaling import DYNAMIC_SCALING, SCALE, SKIPPED, LossScaling
from lathe.core.train.training_step.losses import Loss
from lathe.core.train.training_step.optimizers import Optimizer
from lathe.core.train.training_step.schedules import Schedule
from lathe.core.train.training_step.state_store import make_state_store
from lathe.core.train.training_step.step_graph import (
    NO_CLIP,
    RANDOM_KEY,
    SCALAR_PREFIX,
    Clip,
    StepSettings,
    Trainable,
    is_weight,
    training_step_graph,
)

_BATCHING = BatchInfo(False, "a training step mixes all rows of its batch")


def step(
    model: Graph,
    loss: Loss,
    optimizer: Optimizer,
    schedule: Schedule | None = None,
    *,
    clip: Clip = NO_CLIP,
    accumulate: int = 1,
    average: float | None = None,
    trainable: Trainable = is_weight,
    keep_outputs: bool = False,
    seed: int = 0,
    shares: Sequence[TrainStep] = (),
    held: Collection[str] = (),
    device: str = "cpu",
    precision: Literal["float32", "tf32", "bfloat16", "float16"] = "float32",
    scaling: LossScaling = DYNAMIC_SCALING,
    memory: int | None = None,
    threads: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> TrainStep:
    """A training step of `model`. Its parameters are the constants for which `trainable(name, array)` is true.

    The loss compares the first output of the model with the input `target`. `schedule` maps the number of an update,
    counted from 0, to its learning rate; by default every update has `optimizer.rate`. `accumulate` runs make one
    update, by the mean of their gradients. `average` (such as 0.999) keeps exponential running averages of the
    parameters. Dropout masks are a function of `seed` and the number of the run. A weight that is state of one of the
    steps in `shares` uses the array of that step, so each step sees the updates of the others. A shared weight that is
    not trainable here is only read. Constants named in `held` are not trained; `TrainStep.write` replaces them between
    runs.

    `keep_outputs`: runs also return the model's outputs. With `precision` "bfloat16" or "float16", matrix products
    multiply numbers of that type; with "tf32" they may round factors to a 10-bit mantissa. Convolutions, sums, the
    parameters, moments and the loss stay float32. In float16 the loss is scaled by `scaling`, and an update whose
    gradients overflow is skipped: it counts in `updates` and for the schedule, but not for the optimizer.

    `memory` bounds the bytes of intermediate values in a run; weights and moments do not count. Activations that do not
    fit are recomputed in the backward pass (rematerialization), with identical results. If no order of the nodes needs
    so little memory, the first run of a batch size raises ModelError.

    `device` ("cuda", "cuda:1"; see core/runtime/device/devices.py) runs the whole step and holds its state until
    `close`. Only batches and results are copied. The first run of a batch size raises UnsupportedError if the device
    lacks a kernel for some operator. `device` cannot be combined with `shares` or `memory` (UnsupportedError).

    ModelError for a model without parameters, or with an input of a reserved name. UnsupportedError for a model that
    cannot be differentiated, or for a device that does not exist. LatheError if a shared weight has another type.
    """
    scaled = scaling if precision == "float16" else None
    settings = StepSettings(loss, optimizer, clip, accumulate, average, seed, scaled)
    options = make_options(device, precision=precision, threads=threads, cache_dir=cache_dir)
    options = replace(options, memory=memory)
    _refuse_on_devices(options, shares)
    rate = schedule or (lambda _: optimizer.rate)
    return TrainStep(model, settings, rate, trainable, keep_outputs, options, shares, frozenset(held))


class TrainStep:
    """A compiled training step and its state. Not thread-safe.

    `runs` counts batches. `updates` counts updates of the parameters, skipped ones included. `skipped` counts updates
    that were skipped because gradients overflowed float16. `loss_scale` is the factor of the loss in the next run, 1.0
    without loss scaling. Each batch size is compiled in its first run; all of them work on the same state.
    """

    def __init__(
        self,
        model: Graph,
        settings: StepSettings,
        schedule: Schedule,
        trainable: Trainable,
        keep_outputs: bool,
        options: Options,
        shares: Sequence[TrainStep] = (),
        held: frozenset[str] = frozenset(),
    ) -> None:
        self.model = model
        self.settings = settings
        self.schedule = schedule
        self.runs = 0
        self.options = options
        shared = {name: array for other in shares for name, array in other.live_parameters.items()}
        as_state = shared.keys() | held

        def is_trained(name: str, array: Array) -> bool:
            return name not in held and trainable(name, array)

        last = training_step_graph(model, settings, is_trained, True, keep_outputs, as_state)
        self._graphs = {True: last}
        if settings.accumulate > 1:
            self._graphs[False] = training_step_graph(model, settings, is_trained, False, keep_outputs, as_state)
        self._types = {state.value.name: state.initial for state in last.states}
        self.loss_scale, self.skipped = settings.scaling.initial if settings.scaling is not None else 1.0, 0
        self._states = make_state_store(
            {state.value.name: _state_array(state, shared) for state in last.states}, options
        )
        self._executables: dict[tuple[bool, Binding], Runner] = {}
        self._input_order = {
            is_update: tuple(value.name for value in graph.inputs) for is_update, graph in self._graphs.items()
        }
        self._batch_inputs = [
            value for value in last.inputs if value.name != RANDOM_KEY and not value.name.startswith(SCALAR_PREFIX)
        ]
        self._validator = InputValidator(self._batch_inputs)

    @property
    def updates(self) -> int:
        return self.runs // self.settings.accumulate

    @property
    def inputs(self) -> dict[str, TensorType]:
        """The types of the arrays that `run` takes, by name."""
        return {value.name: value.tensor for value in self._batch_inputs}

    @property
    def parameters(self) -> dict[str, Array]:
        """Copies of the present parameters and running statistics, by name."""
        return {name: array.copy() for name, array in self.live_parameters.items()}

    @property
    def live_parameters(self) -> dict[str, Array]:
        """The arrays of parameters and running statistics, which runs update in place, by name.

        State on a device is copied to the host.
        """
        return {name: self._states.read(name) for name in self.names()}

    def names(self, averaged: bool = False) -> dict[str, str]:
        """The name of the state that holds each of the model's weights, by the weight's name.

        The state has the weight's own name; with `averaged` it is the running average of the weight, if it has one.
        Weights that are no state are left out.
        """
        own = [value.name for value in self.model.constants if value.name in self._types]
        averages = {name: f"{name}.average" for name in own if f"{name}.average" in self._types} if averaged else {}
        return {name: averages.get(name, name) for name in own}

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Train on one batch. Returns the `loss` before the update and, with `keep_outputs`, the model's outputs.

        `feeds` maps the names of `inputs` to arrays; the result maps names to arrays. FeedError for an input that is
        missing, unknown or ill-typed; the parameters are unchanged then. After a run that failed on a device the state
        is unknown: runs raise LatheError until `load_state` restores it.
        """
        is_update = (self.runs + 1) % self.settings.accumulate == 0
        arrays, binding = self._validator.validate(feeds)
        self.check()
        runner = self._executable(is_update, binding)
        inputs = self._run_inputs(is_update, arrays)
        try:
            results = runner.run(1, inputs)
        except BaseException:
            self._states.invalidate()
            raise
        self.runs += 1
        if self.settings.scaling is not None:
            *results, scale, skipped = results
            self.loss_scale, self.skipped = float(scale), int(skipped)
        return {value.name: array for value, array in zip(self._graphs[is_update].outputs, results, strict=False)}

    def state(self) -> dict[str, Array]:
        """Copies of all state that a checkpoint needs besides `runs`, the number of runs so far.

        They are the parameters, running statistics, moments, averages of the weights, and the loss scale, by name.
        """
        return {name: np.array(self._states.read(name)) for name in self._types}

    def load_state(self, state: Mapping[str, Array], runs: int) -> None:
        """Restore `state` and the number of `runs` from a checkpoint; arrays are copied.

        LatheError if a state is missing or has another shape or dtype; nothing is changed then.
        """
        for name, array in self._types.items():
            loaded = state.get(name)
            if loaded is None or loaded.shape != array.shape or loaded.dtype != array.dtype:
                raise LatheError(f"state '{name}': expected {describe_array(array)}, got {describe_array(loaded)}")
        for name in self._types:
            self._states.write(name, state[name])
        self.runs = runs
        if self.settings.scaling is not None:
            self.loss_scale, self.skipped = float(state[SCALE]), int(state[SKIPPED])

    def write(self, name: str, array: Array) -> None:
        """Overwrite a state, such as a constant of `held`, by a copy of `array`.

        LatheError if there is no such state, or it has another shape or dtype.
        """
        if name not in self._types or describe_array(array) != describe_array(self._types[name]):
            raise LatheError(
                f"state '{name}': expected {describe_array(self._types.get(name))}, got {describe_array(array)}"
            )
        self._states.write(name, array)

    def graph(self, averaged: bool = False) -> Graph:
        """The model with copies of its present parameters, or with `averaged` of their running averages."""
        return with_weights(self.model, self.weights(averaged))

    def weights(self, averaged: bool = False) -> dict[str, Array]:
        """The arrays of the model's weights that are state, by name; with `averaged` their running averages, if any.

        On the host these are the arrays that runs update in place. State on a device is copied.
        """
        return {name: self._states.read(state) for name, state in self.names(averaged).items()}

    def runner_of(
        self, graph: Graph, options: Options, batching: BatchInfo, binding: Binding, averaged: bool
    ) -> Runner:
        """Compile another graph, whose states have the names of weights of the model, to work on this step's state.

        With `averaged` it works on the running averages of the weights that have one.
        """
        return self._states.runner(graph, options, batching, binding, self.names(averaged))

    def check(self) -> None:
        """LatheError if a run on a device has failed since state was last loaded; SessionClosed after `close` there."""
        self._states.check()

    def close(self) -> None:
        """Free the memory on a device. Later runs and reads of state on the device raise SessionClosed."""
        self._states.close()

    def explain(self) -> str:
        """A report for people with the kernel of each node, for every batch size that was compiled."""
        return "\n".join(line for runner in self._executables.values() for line in runner.explain(1))

    def _run_inputs(self, is_update: bool, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """The arrays of a run in the order of the graph's inputs: batch, scalars of the optimizer, random key."""
        rate = self.schedule(self.updates)
        scalars = self.settings.optimizer.scalars(self.updates - self.skipped + 1, rate)
        values: dict[str, NDArray[Any]] = {
            f"{SCALAR_PREFIX}{name}": np.array(number, np.float32) for name, number in scalars.items()
        }
        values.update((value.name, array) for value, array in zip(self._batch_inputs, arrays, strict=True))
        if RANDOM_KEY in self._input_order[is_update]:
            values[RANDOM_KEY] = np.random.SeedSequence((self.settings.seed, self.runs)).generate_state(1).reshape(())
        return [values[name] for name in self._input_order[is_update]]

    def _executable(self, is_update: bool, binding: Binding) -> Runner:
        if (is_update, binding) not in self._executables:
            graph = self._graphs[is_update]
            names = {state.value.name: state.value.name for state in graph.states}
            self._executables[is_update, binding] = self._states.runner(graph, self.options, _BATCHING, binding, names)
        return self._executables[is_update, binding]


def with_weights(model: Graph, weights: Mapping[str, Array]) -> Graph:
    """A copy of the model in which the constants named in `weights` are copies of those arrays."""
    changed = model.clone()
    for value in changed.constants:
        if value.name in weights:
            array = weights[value.name].copy()
            array.setflags(write=False)
            changed.constants[value] = array
    return changed


def _refuse_on_devices(options: Options, shares: Sequence[TrainStep]) -> None:
    """UnsupportedError if `shares` or a bound on memory is combined with a device other than the CPU."""
    other_device = next((step.options.devices[0] for step in shares if step.options.devices), None)
    device = options.devices[0] if options.devices else other_device
    if shares and device is not None:
        raise UnsupportedError(f"shares: steps can share arrays on the CPU only, got a step on {device}")
    if options.memory is not None and device is not None:
        raise UnsupportedError(f"memory: activations can be recomputed on the CPU only, got device {device}")


def _state_array(state: State, shared: Mapping[str, Array]) -> Array:
    """The array that holds a state: that of a step that shares it, otherwise a new one. LatheError if types differ."""
    name, array = state.value.name, np.array(state.initial, order="C")
    if name not in shared:
        return array
    if describe_array(shared[name]) != describe_array(array):
        raise LatheError(
            f"shared parameter '{name}': expected {describe_array(array)}, got {describe_array(shared[name])}"
        )
    return shared[name]
