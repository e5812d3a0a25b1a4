"""`TrainStep`: a model that learns. One run is one native call: forward, loss, backward, and the update in place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.compiler import executable
from core.errors import FeedError, LatheError
from core.ir.graph import Array, Graph
from core.ir.types import TensorType
from core.options import Options
from core.reference import bind_symbols
from core.runtime.cpus import available_cpus
from core.runtime.executable import Executable
from core.runtime.explain import explain_plan
from core.runtime.machine import peaks
from core.runtime.session import BatchInfo
from core.runtime.shapes import Binding
from core.train.joint import NO_CLIP, Clip, Recipe, Trainable, is_weight, joint_graph
from core.train.losses import Loss
from core.train.optimizers import Optimizer
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
    threads: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> TrainStep:
    """A training step of `model`, whose constants that are `trainable(name, array)` are its parameters.

    The first output of the model goes into the loss, whose other operand is the input `target`. `schedule` gives the
    learning rate of each update, counted from 0; without it that is the optimizer's own. `accumulate` runs make one
    update; `average` (0.999, say) keeps running averages of the parameters. ModelError for a model without parameters,
    UnsupportedError for one that cannot be differentiated.
    """
    recipe = Recipe(loss, optimizer, clip, accumulate, average)
    threads = threads or available_cpus()
    options = Options(threads=threads, cache_dir=os.fspath(cache_dir) if cache_dir is not None else None)
    return TrainStep(model, recipe, schedule or (lambda _: optimizer.rate), trainable, keep_outputs, options)


class TrainStep:
    """A compiled training step, and the state it works on. Not for several threads at once.

    `runs` counts batches, `updates` how often the parameters have moved. Every batch size compiles when it first comes;
    all of them work on the same state.
    """

    def __init__(
        self,
        model: Graph,
        recipe: Recipe,
        schedule: Schedule,
        trainable: Trainable,
        keep_outputs: bool,
        options: Options,
    ) -> None:
        self.model = model
        self.recipe = recipe
        self.schedule = schedule
        self.runs = 0
        self._options = options
        last = joint_graph(model, recipe, trainable, updates=True, keep_outputs=keep_outputs)
        self._graphs = {True: last}
        if recipe.accumulate > 1:
            self._graphs[False] = joint_graph(model, recipe, trainable, updates=False, keep_outputs=keep_outputs)
        self._states = {state.value.name: np.array(state.initial, order="C") for state in last.states}
        self._executables: dict[tuple[bool, Binding], Executable] = {}

    @property
    def updates(self) -> int:
        return self.runs // self.recipe.accumulate

    @property
    def inputs(self) -> dict[str, TensorType]:
        """Types of what `run` expects, by name."""
        given = self._graphs[True].inputs
        return {value.name: value.tensor for value in given if not value.name.startswith("optimizer.")}

    @property
    def parameters(self) -> dict[str, Array]:
        """Copies of the parameters as they are now, and of the running statistics, by name."""
        return {name: self._states[name].copy() for name in self._states if name in self._names()}

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """One batch: the loss (and the model's outputs, if kept) from before the update, by name.

        FeedError for an input that is missing, unknown or ill-typed; the parameters have not moved then.
        """
        moves = (self.runs + 1) % self.recipe.accumulate == 0
        graph = self._graphs[moves]
        arrays = self._arrays(graph, feeds)
        symbols = bind_symbols(graph.inputs, dict(zip(graph.inputs, arrays, strict=True)))
        ready = self._executable(moves, tuple(sorted(symbols.items())))
        results = ready.run(1, arrays)
        self.runs += 1
        return {value.name: array for value, array in zip(graph.outputs, results, strict=True)}

    def state(self) -> dict[str, Array]:
        """Copies of everything that a checkpoint needs besides `runs`: parameters, moments, averages, by name."""
        return {name: array.copy() for name, array in self._states.items()}

    def load_state(self, state: Mapping[str, Array], runs: int) -> None:
        """Go on from a checkpoint. LatheError when it does not fit this step."""
        for name, array in self._states.items():
            given = state.get(name)
            if given is None or given.shape != array.shape or given.dtype != array.dtype:
                raise LatheError(f"state '{name}': expected {_text(array)}, got {_text(given)}")
        for name, array in self._states.items():
            array[...] = state[name]
        self.runs = runs

    def graph(self, averaged: bool = False) -> Graph:
        """The model with the parameters it has now, or with their running averages."""
        trained = self.model.clone()
        for value in trained.constants:
            name = f"{value.name}.average" if averaged and f"{value.name}.average" in self._states else value.name
            if name in self._states:
                array = self._states[name].copy()
                array.setflags(write=False)
                trained.constants[value] = array
        return trained

    def explain(self) -> str:
        """Which kernel runs each node, for every batch size so far."""
        return "\n".join(line for ready in self._executables.values() for line in explain_plan(ready.plan, 1, peaks()))

    def _names(self) -> set[str]:
        return {value.name for value in self.model.constants}

    def _arrays(self, graph: Graph, feeds: Mapping[str, Any]) -> list[NDArray[Any]]:
        rate = self.schedule(self.updates)
        scalars = self.recipe.optimizer.scalars(self.updates + 1, rate)
        numbers = {f"optimizer.{name}": np.array(number, np.float32) for name, number in scalars.items()}
        unknown = feeds.keys() - self.inputs.keys()
        if unknown:
            raise FeedError(f"unknown input '{min(unknown)}'; a step takes {', '.join(self.inputs)}")
        return [_checked(value.name, value.tensor, {**feeds, **numbers}) for value in graph.inputs]

    def _executable(self, moves: bool, binding: Binding) -> Executable:
        if (moves, binding) not in self._executables:
            ready = executable(self._graphs[moves], self._options, _TRAINING, binding)
            for name in (state.value.name for state in self._graphs[moves].states):
                ready.adopt_state(name, self._states[name])
            self._executables[moves, binding] = ready
        return self._executables[moves, binding]


def _text(array: Array | None) -> str:
    return "nothing" if array is None else f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _checked(name: str, type_: TensorType, feeds: Mapping[str, Any]) -> NDArray[Any]:
    """A feed as a contiguous array of the declared type; its symbols are checked together later."""
    if name not in feeds:
        raise FeedError(f"input '{name}' is missing; expected {type_}")
    array = np.asarray(feeds[name])
    if array.dtype != type_.dtype.numpy:
        raise FeedError(f"input '{name}' has dtype {array.dtype}, expected {type_.dtype}")
    fits = array.ndim == type_.rank and all(
        not isinstance(dim, int) or dim == size for dim, size in zip(type_.dims, array.shape, strict=True)
    )
    if not fits:
        raise FeedError(f"input '{name}' has shape {list(array.shape)}, expected {type_}")
    return np.ascontiguousarray(array)
