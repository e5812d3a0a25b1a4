"""The execution of one batch: stack the inputs of its requests, execute once, split the outputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, thread_time
from typing import TypeAlias

import numpy as np

from lathe.server.backends.base import KernelRun, LoadedModel, PackingModel, SeparateModel
from lathe.server.batching.entry import Outcome
from lathe.server.batching.padding import RequestPadding
from lathe.server.errors import ExecutionInterrupted, Internal, ServerError
from lathe.server.types import Tensors


@dataclass(slots=True)
class RecordedKernels:
    """The kernels that a batch ran, for the traces of its requests."""

    runs: list[KernelRun] = field(default_factory=list)
    written_to: object = None  # the span that has them already: they are written once per batch


@dataclass(slots=True)
class BatchResult:
    """The outcomes of a batch, one per entry in order, with its start and the ends of its steps (monotonic seconds).

    `executions` is the number of calls of the model.
    """

    outcomes: list[Outcome]
    rows: int
    executions: int
    started: float
    gathered: float
    executed: float
    scattered: float
    tokens: int = 0  # of packed sequences
    kernels: RecordedKernels | None = None  # None: not recorded
    busy: float = math.inf  # CPU seconds of the executing thread; inf: not measured


Execute: TypeAlias = Callable[[LoadedModel, list[Tensors], list[int]], BatchResult]  # inputs and rows of each request


def run(model: LoadedModel, inputs: list[Tensors], rows: list[int]) -> BatchResult:
    """Execute requests in one batch; if that fails, each alone, so that only the requests at fault fail.

    Errors are outcomes, never raised. After ExecutionInterrupted all requests fail, and none runs again. The outputs of
    several requests are views of the batch's outputs.
    """
    started, working = monotonic(), thread_time()
    executions = 1
    try:
        stacked = inputs[0] if len(inputs) == 1 else gather(inputs)
        gathered = monotonic()
        outputs = _execute(model, stacked)
        executed = monotonic()
        outcomes: list[Outcome] = [outputs] if len(inputs) == 1 else scatter(outputs, rows)
    except ExecutionInterrupted as error:  # interrupted because no caller waits any more: do not run them again
        outcomes = [error for _ in inputs]
        gathered, executed = started, monotonic()
    except Exception as error:
        executions += len(inputs) if len(inputs) > 1 else 0
        outcomes = [_failure(error)] if len(inputs) == 1 else [_execute_alone(model, one) for one in inputs]
        gathered, executed = started, monotonic()
    busy = thread_time() - working
    return BatchResult(outcomes, sum(rows), executions, started, gathered, executed, monotonic(), busy=busy)


def run_packed(model: LoadedModel, inputs: list[Tensors], rows: list[int]) -> BatchResult:
    """Like `run`, for sequences of different lengths: they are executed together without padding.

    If the model is no `PackingModel`, they run as in `run_each`.
    """
    packing = model if isinstance(model, PackingModel) else None
    if packing is None:
        return run_each(model, inputs, rows)
    started = monotonic()
    tokens = sum(packing.tokens(one) for one in inputs)
    executions = 1
    try:
        outcomes: list[Outcome] = [*packing.execute_packed(inputs)]
    except ExecutionInterrupted as error:
        outcomes = [error for _ in inputs]
    except Exception as error:
        executions += len(inputs) if len(inputs) > 1 else 0
        outcomes = [_failure(error)] if len(inputs) == 1 else [_execute_alone(model, one) for one in inputs]
    ended = monotonic()
    return BatchResult(outcomes, sum(rows), executions, started, started, ended, ended, tokens)


def run_padded(
    execute: Execute, padded: list[RequestPadding | None], model: LoadedModel, inputs: list[Tensors], rows: list[int]
) -> BatchResult:
    """Pad the requests that have a padding, run the batch with `execute`, and cut their outputs back.

    All requests fail if there is not enough memory for the padding.
    """
    started = monotonic()
    try:
        filled = [one if rule is None else rule.fill(one) for rule, one in zip(padded, inputs, strict=True)]
    except MemoryError as error:
        ended = monotonic()
        return BatchResult([_failure(error) for _ in inputs], sum(rows), 0, started, started, ended, ended)
    ran = execute(model, filled, rows)
    ran.started = started
    ran.outcomes = [one if rule is None else rule.cut(one) for rule, one in zip(padded, ran.outcomes, strict=True)]
    ran.scattered = monotonic()
    return ran


def run_each(model: LoadedModel, inputs: list[Tensors], rows: list[int]) -> BatchResult:
    """Execute requests without stacking them: by the model's `execute_each`, otherwise one after the other.

    Errors are outcomes, never raised. If `execute_each` raises, all requests fail.
    """
    started = monotonic()
    outcomes: list[Outcome]
    try:
        if isinstance(model, SeparateModel):
            outcomes = [_failure(one) if isinstance(one, Exception) else one for one in model.execute_each(inputs)]
        else:
            outcomes = [_execute_alone(model, one) for one in inputs]
    except Exception as error:
        outcomes = [_failure(error) for _ in inputs]
    ended = monotonic()
    return BatchResult(outcomes, sum(rows), len(inputs), started, started, ended, ended)


def _execute(model: LoadedModel, inputs: Tensors) -> Tensors:
    """The outputs in row-major order, as the wire needs them: so the event loop need not copy them."""
    outputs = model.execute(inputs)
    if all(array.flags.c_contiguous for array in outputs.values()):
        return outputs
    return {name: np.ascontiguousarray(array) if array.ndim else array for name, array in outputs.items()}


def _execute_alone(model: LoadedModel, inputs: Tensors) -> Outcome:
    try:
        return _execute(model, inputs)
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> Exception:
    """The error for the caller: a ServerError as it is; of any other, only the class name is shown."""
    if isinstance(error, ServerError):
        return error
    wrapped = Internal(f"the model failed to execute ({type(error).__name__})")
    wrapped.__cause__ = error
    return wrapped


def gather(inputs: list[Tensors]) -> Tensors:
    """Concatenate each input along its leading axis."""
    return {name: np.concatenate([one[name] for one in inputs]) for name in inputs[0]}


def scatter(outputs: Tensors, rows: list[int]) -> list[Outcome]:
    """Split the outputs into one view per request along the rows; Internal if the number of rows is wrong."""
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
