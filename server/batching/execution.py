"""One batch, run: stack the requests' rows, execute once, cut the outputs apart again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, thread_time
from typing import TypeAlias

import numpy as np

from server.backends.base import KernelRun, LoadedModel, PackingModel, SeparateModel
from server.batching.entry import Outcome
from server.batching.padding import Padded
from server.errors import BrokenOff, Internal, ServerError
from server.types import Tensors


@dataclass(slots=True)
class Kernels:
    """What a batch consisted of, for the requests in it that are traced."""

    runs: list[KernelRun] = field(default_factory=list)
    told: object = None  # where they are written already: once for all requests of the batch


@dataclass(slots=True)
class Ran:
    """A batch's outcomes, one per entry in order, and when its steps ended (monotonic seconds)."""

    outcomes: list[Outcome]
    rows: int
    executions: int
    started: float
    gathered: float
    executed: float
    scattered: float
    tokens: int = 0  # that ran packed
    kernels: Kernels | None = None  # None: nobody asked
    busy: float = math.inf  # seconds that the thread was at work, not counting what it waited; inf: not known


Execute: TypeAlias = Callable[[LoadedModel, list[Tensors], list[int]], Ran]  # inputs and rows of each request


def run(model: LoadedModel, inputs: list[Tensors], rows: list[int]) -> Ran:
    """Execute requests together; when that fails, each alone, so that only those at fault fail."""
    started, working = monotonic(), thread_time()
    executions = 1
    try:
        stacked = inputs[0] if len(inputs) == 1 else gather(inputs)
        gathered = monotonic()
        outputs = _execute(model, stacked)
        executed = monotonic()
        outcomes: list[Outcome] = [outputs] if len(inputs) == 1 else scatter(outputs, rows)
    except BrokenOff as error:  # nobody waits for any of them
        outcomes = [error for _ in inputs]
        gathered, executed = started, monotonic()
    except Exception as error:
        executions += len(inputs) if len(inputs) > 1 else 0
        outcomes = [_failure(error)] if len(inputs) == 1 else [_alone(model, one) for one in inputs]
        gathered, executed = started, monotonic()
    busy = thread_time() - working
    return Ran(outcomes, sum(rows), executions, started, gathered, executed, monotonic(), busy=busy)


def run_packed(model: LoadedModel, inputs: list[Tensors], rows: list[int]) -> Ran:
    """Execute requests whose sequences may be of different lengths together, without padding; as :func:`run`."""
    packing = model if isinstance(model, PackingModel) else None
    if packing is None:
        return run_each(model, inputs, rows)
    started = monotonic()
    tokens = sum(packing.tokens(one) for one in inputs)
    executions = 1
    try:
        outcomes: list[Outcome] = [*packing.execute_packed(inputs)]
    except BrokenOff as error:
        outcomes = [error for _ in inputs]
    except Exception as error:
        executions += len(inputs) if len(inputs) > 1 else 0
        outcomes = [_failure(error)] if len(inputs) == 1 else [_alone(model, one) for one in inputs]
    ended = monotonic()
    return Ran(outcomes, sum(rows), executions, started, started, ended, ended, tokens)


def run_padded(
    execute: Execute, padded: list[Padded | None], model: LoadedModel, inputs: list[Tensors], rows: list[int]
) -> Ran:
    """Execute requests of which some are padded, each as ``padded`` says; as :func:`run`."""
    started = monotonic()
    try:
        filled = [one if rule is None else rule.fill(one) for rule, one in zip(padded, inputs, strict=True)]
    except MemoryError as error:
        ended = monotonic()
        return Ran([_failure(error) for _ in inputs], sum(rows), 0, started, started, ended, ended)
    ran = execute(model, filled, rows)
    ran.started = started
    ran.outcomes = [one if rule is None else rule.cut(one) for rule, one in zip(padded, ran.outcomes, strict=True)]
    ran.scattered = monotonic()
    return ran


def run_each(model: LoadedModel, inputs: list[Tensors], rows: list[int]) -> Ran:
    """Execute requests one after the other: for work that gains nothing from being stacked."""
    started = monotonic()
    outcomes: list[Outcome]
    try:
        if isinstance(model, SeparateModel):
            outcomes = [_failure(one) if isinstance(one, Exception) else one for one in model.execute_each(inputs)]
        else:
            outcomes = [_alone(model, one) for one in inputs]
    except Exception as error:
        outcomes = [_failure(error) for _ in inputs]
    ended = monotonic()
    return Ran(outcomes, sum(rows), len(inputs), started, started, ended, ended)


def _execute(model: LoadedModel, inputs: Tensors) -> Tensors:
    """Return the outputs row-major, as they travel: nobody has to copy them on the event loop."""
    outputs = model.execute(inputs)
    if all(array.flags.c_contiguous for array in outputs.values()):
        return outputs
    return {name: np.ascontiguousarray(array) if array.ndim else array for name, array in outputs.items()}


def _alone(model: LoadedModel, inputs: Tensors) -> Outcome:
    try:
        return _execute(model, inputs)
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> Exception:
    """Errors meant for callers pass; of any other only the kind is told."""
    if isinstance(error, ServerError):
        return error
    wrapped = Internal(f"the model failed to execute ({type(error).__name__})")
    wrapped.__cause__ = error
    return wrapped


def gather(inputs: list[Tensors]) -> Tensors:
    """Stack each input along its leading axis."""
    return {name: np.concatenate([one[name] for one in inputs]) for name in inputs[0]}


def scatter(outputs: Tensors, rows: list[int]) -> list[Outcome]:
    """Cut each output back into the requests' rows, as views."""
    total = sum(rows)
    for name, array in outputs.items():
        if array.ndim == 0 or array.shape[0] != total:
            raise Internal(f"output {name!r}: expected {total} rows for {total} rows of input, got shape {array.shape}")
    parts: list[Outcome] = []
    at = 0
    for count in rows:
        end = at + count
        part = {}
        for name, array in outputs.items():
            part[name] = array[at:end]
        parts.append(part)
        at = end
    return parts
