"""`TrainStep`: a model that learns. One run is one native call: forward, loss, backward, and the update in place."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from core.errors import LatheError, UnsupportedError
from core.ir.graph import Array, Graph, State
from core.ir.types import TensorType
from core.options import Options, make_options
from core.runtime.given import Binding
from core.runtime.runner import Runner
from core.runtime.session import BatchInfo
from core.train.feeds import Door, describe
from core.train.homes import home_of
from core.train.joint import KEY, NO_CLIP, SCALAR, Clip, StepSettings, Trainable, is_weight, joint_graph
from core.train.losses import Loss
from core.train.optimizers import Optimizer
from core.train.scaling import DYNAMIC, SCALE, SKIPPED, LossScaling
from core.train.schedules import Schedule

_TRAINING = BatchInfo(False, "a training step mixes all rows of its batch")


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
    device: str = "cpu",
    precision: Literal["float32", "tf32", "bfloat16", "float16"] = "float32",
    scaling: LossScaling = DYNAMIC,
    memory: int | None = None,
    threads: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> TrainStep:
    """A training step of `model`, whose constants that are `trainable(name, array)` are its parameters.

    The first output of the model goes into the loss, whose other operand is the input `target`. `schedule` gives the
    learning rate of each update, counted from 0; without it that is the optimizer's own. `accumulate` runs make one
    update; `average` (0.999, say) keeps running averages of the parameters. What dropout draws is a function of `seed`
    and the number of the run. Weights named as parameters of the steps it `shares` with live in the arrays of those:
    each step sees what the others have learned, and what is not trainable here stays as they leave it.

    With `precision` "bfloat16" or "float16" products multiply such numbers; parameters, moments, the loss and the sums
    of products are float32 as ever. In float16 the loss is scaled (`scaling`), and updates whose gradients overflow are
    skipped: they count as `updates` and for the schedule, but not for the optimizer. `memory` bounds the bytes of what
    a run computes on its way, weights and moments aside: activations that do not fit are computed again when the
    backward pass needs them, the same numbers once more. ModelError, when a batch first comes, where no such order
    needs so little.

    `device` ("cuda", "cuda:1"; see core/runtime/devices.py) runs all of the step, and keeps its state: batches travel
    there and losses back. UnsupportedError, when a batch first comes, for a model with operators that it has no kernels
    for; neither `shares` nor `memory` goes with it.

    ModelError for a model without parameters, UnsupportedError for one that cannot be differentiated, or a device that
    is not there.
    """
    scaled = scaling if precision == "float16" else None
    settings = StepSettings(loss, optimizer, clip, accumulate, average, seed, scaled)
    options = make_options(device, precision=precision, threads=threads, cache_dir=cache_dir)
    options = replace(options, memory=memory)
    _refuse_on_devices(options, shares)
    return TrainStep(model, settings, schedule or (lambda _: optimizer.rate), trainable, keep_outputs, options, shares)


class TrainStep:
    """A compiled training step, and the state it works on. Not for several threads at once.

    `runs` counts batches, `updates` how often the parameters should have moved, and `skipped` how often gradients
    beyond float16 kept them from it; `loss_scale` is what the loss is multiplied by next, 1 where it is not scaled.
    Every batch size compiles when it first comes; all of them work on the same state.
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
    ) -> None:
        self.model = model
        self.settings = settings
        self.schedule = schedule
        self.runs = 0
        self.options = options
        shared = {name: array for other in shares for name, array in other.live_parameters.items()}
        last = joint_graph(model, settings, trainable, True, keep_outputs, shared)
        self._graphs = {True: last}
        if settings.accumulate > 1:
            self._graphs[False] = joint_graph(model, settings, trainable, False, keep_outputs, shared)
        self._types = {state.value.name: state.initial for state in last.states}
        self.loss_scale, self.skipped = settings.scaling.initial if settings.scaling is not None else 1.0, 0
        self._home = home_of({state.value.name: _array(state, shared) for state in last.states}, options)
        self._executables: dict[tuple[bool, Binding], Runner] = {}
        self._order = {moves: tuple(value.name for value in graph.inputs) for moves, graph in self._graphs.items()}
        self._given = [value for value in last.inputs if value.name != KEY and not value.name.startswith(SCALAR)]
        self._door = Door(self._given)

    @property
    def updates(self) -> int:
        return self.runs // self.settings.accumulate

    @property
    def inputs(self) -> dict[str, TensorType]:
        """Types of what `run` expects, by name."""
        return {value.name: value.tensor for value in self._given}

    @property
    def parameters(self) -> dict[str, Array]:
        """Copies of the parameters as they are now, and of the running statistics, by name."""
        return {name: array.copy() for name, array in self.live_parameters.items()}

    @property
    def live_parameters(self) -> dict[str, Array]:
        """The very arrays that runs work on, by name; copies of what is on a device."""
        return {name: self._home.read(name) for name in self.names()}

    def names(self, averaged: bool = False) -> dict[str, str]:
        """For each of the model's weights that is state, the state that stands for it: itself, or its running average
        where there is one."""
        own = [value.name for value in self.model.constants if value.name in self._types]
        averages = {name: f"{name}.average" for name in own if f"{name}.average" in self._types} if averaged else {}
        return {name: averages.get(name, name) for name in own}

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """One batch: the loss (and the model's outputs, if kept) from before the update, by name.

        FeedError for an input that is missing, unknown or ill-typed; the parameters have not moved then. Where a run on
        a device fails, nobody knows: the step wants its state loaded again before it goes on.
        """
        moves = (self.runs + 1) % self.settings.accumulate == 0
        arrays, binding = self._door.admit(feeds)
        self.check()
        ready = self._executable(moves, binding)
        given = self._arranged(moves, arrays)
        try:
            results = ready.run(1, given)
        except BaseException:
            self._home.spoil()
            raise
        self.runs += 1
        if self.settings.scaling is not None:
            *results, scale, skipped = results
            self.loss_scale, self.skipped = float(scale), int(skipped)
        return {value.name: array for value, array in zip(self._graphs[moves].outputs, results, strict=False)}

    def state(self) -> dict[str, Array]:
        """Copies of everything that a checkpoint needs besides `runs`: parameters, moments, averages, by name."""
        return {name: np.array(self._home.read(name)) for name in self._types}

    def load_state(self, state: Mapping[str, Array], runs: int) -> None:
        """Go on from a checkpoint. LatheError when it does not fit this step."""
        for name, array in self._types.items():
            given = state.get(name)
            if given is None or given.shape != array.shape or given.dtype != array.dtype:
                raise LatheError(f"state '{name}': expected {describe(array)}, got {describe(given)}")
        for name in self._types:
            self._home.write(name, state[name])
        self.runs = runs
        if self.settings.scaling is not None:
            self.loss_scale, self.skipped = float(state[SCALE]), int(state[SKIPPED])

    def graph(self, averaged: bool = False) -> Graph:
        """The model with the parameters it has now, or with their running averages."""
        return with_weights(self.model, self.weights(averaged))

    def weights(self, averaged: bool = False) -> dict[str, Array]:
        """What stands for each of the model's weights, the parameter or its running average where there is one: as the
        very array that runs work on, or a copy of what is on a device."""
        return {name: self._home.read(state) for name, state in self.names(averaged).items()}

    def runner_of(
        self, graph: Graph, options: Options, batching: BatchInfo, binding: Binding, averaged: bool
    ) -> Runner:
        """Code for another graph whose states are weights of the model: it works on those that stand for them."""
        return self._home.runner(graph, options, batching, binding, self.names(averaged))

    def check(self) -> None:
        """LatheError where a run on a device has failed, and no state was loaded since."""
        self._home.check()

    def close(self) -> None:
        """Give back the memory of a device. Further runs, and looks at the state there, raise SessionClosed."""
        self._home.close()

    def explain(self) -> str:
        """Which kernel runs each node, for every batch size so far."""
        return "\n".join(line for ready in self._executables.values() for line in ready.explain(1))

    def _arranged(self, moves: bool, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """What is given and what this very run adds to it, in the order of the graph's inputs."""
        rate = self.schedule(self.updates)
        scalars = self.settings.optimizer.scalars(self.updates - self.skipped + 1, rate)
        values: dict[str, NDArray[Any]] = {
            f"{SCALAR}{name}": np.array(number, np.float32) for name, number in scalars.items()
        }
        values.update((value.name, array) for value, array in zip(self._given, arrays, strict=True))
        if KEY in self._order[moves]:
            values[KEY] = np.random.SeedSequence((self.settings.seed, self.runs)).generate_state(1).reshape(())
        return [values[name] for name in self._order[moves]]

    def _executable(self, moves: bool, binding: Binding) -> Runner:
        if (moves, binding) not in self._executables:
            graph = self._graphs[moves]
            names = {state.value.name: state.value.name for state in graph.states}
            self._executables[moves, binding] = self._home.runner(graph, self.options, _TRAINING, binding, names)
        return self._executables[moves, binding]


def with_weights(model: Graph, weights: Mapping[str, Array]) -> Graph:
    """The model with copies of other arrays for its constants of these names."""
    changed = model.clone()
    for value in changed.constants:
        if value.name in weights:
            array = weights[value.name].copy()
            array.setflags(write=False)
            changed.constants[value] = array
    return changed


def _refuse_on_devices(options: Options, shares: Sequence[TrainStep]) -> None:
    """UnsupportedError for what only the CPU can do."""
    away = next((step.options.devices[0] for step in shares if step.options.devices), None)
    device = options.devices[0] if options.devices else away
    if shares and device is not None:
        raise UnsupportedError(f"shares: steps share the arrays of the CPU, and one of these runs on {device}")
    if options.memory is not None and device is not None:
        raise UnsupportedError(f"memory: activations are computed again on the CPU alone, not on {device}")


def _array(state: State, shared: Mapping[str, Array]) -> Array:
    """Where a state lives: in the array that another step has of it, or in one of its own."""
    name, array = state.value.name, np.array(state.initial, order="C")
    if name not in shared:
        return array
    if describe(shared[name]) != describe(array):
        raise LatheError(f"shared parameter '{name}': expected {describe(array)}, got {describe(shared[name])}")
    return shared[name]
