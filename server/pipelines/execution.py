"""Executes the steps of a pipeline for one request."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from lathe.server.backends.base import TokenizingModel
from lathe.server.batching.entry import Entry, OnDone, Outcome
from lathe.server.batching.signature import BatchGroup
from lathe.server.errors import Internal, ServerError
from lathe.server.pipelines.definition import StepDef
from lathe.server.types import Array, ModelRef, Tensors

if TYPE_CHECKING:
    from lathe.server.serving.servable import Servable

log = logging.getLogger("lathe.pipelines")

Target = Callable[[], "Servable"]  # returns the version that runs a step now; raises ServerError
OnStepDone = Callable[[str, float], None]  # called with the name and the seconds of each step that ended
OnEnd = Callable[[Entry, Outcome], None]


@dataclass(frozen=True, slots=True)
class FlowStep:
    """A step of a pipeline as requests run it.

    `tokenizer`: its model, if that makes tokens of texts. `readers_pack` says whether all steps that read its outputs
    pack sequences now.
    """

    step: StepDef
    target: Target
    tokenizer: TokenizingModel | None = None
    readers_pack: Callable[[], bool] = bool


class StepEntry(Entry):
    """The request of one step, in the queue of the version that runs it."""

    __slots__ = ("ended", "ref", "step")

    def __init__(
        self, step: str, servable: Servable, inputs: Tensors, group: BatchGroup, done: OnDone, whole: Entry
    ) -> None:
        super().__init__(inputs, group, done, whole.deadline, whole.priority)
        self.client, self.id, self.trace = whole.client, whole.id, whole.trace
        self.most_tokens = whole.most_tokens
        self.since = monotonic()  # kept if the response cache answers; otherwise set again when it is queued
        self.step = step
        self.ref: ModelRef = servable.ref
        self.ended: float | None = None  # monotonic seconds


class PipelineRequest:
    """Starts each step when all its inputs exist (dataflow); tensors are passed on without copies.

    `whole` is the caller's request; its `parts` get the entry of each step that is started. `took` is called with the
    name and the seconds of each step that ended. `ended` is called once with `whole` and the outcome, unless `stop` is
    called before or `start` raises.
    """

    def __init__(
        self, steps: Sequence[FlowStep], outputs: list[str], whole: Entry, took: OnStepDone, ended: OnEnd
    ) -> None:
        self._steps = steps
        self._outputs = outputs
        self._whole = whole
        self._took = took
        self._ended = ended
        self._tensors: Tensors = dict(whole.inputs)
        self._uses = Counter(outputs)
        for each in steps:
            self._uses.update(each.step.inputs.values())
        self._waiting = list(range(len(steps)))
        self._running: dict[int, tuple[Servable, StepEntry]] = {}
        self._is_stopped = False

    def start(self) -> None:
        """Start the steps that need only the inputs; raises ServerError, and stops all, if one of them is refused."""
        try:
            self._start_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Cancel the running steps, without a call of `ended`."""
        self._is_stopped = True
        for servable, entry in self._running.values():
            servable.cancel(entry)
        self._running.clear()
        self._tensors.clear()

    def _start_ready(self) -> None:
        for index in [i for i in self._waiting if self._tensors.keys() >= set(self._steps[i].step.inputs.values())]:
            self._waiting.remove(index)
            self._start_step(index)

    def _start_step(self, index: int) -> None:
        each = self._steps[index]
        step = each.step
        try:
            servable = each.target()
            inputs = {name: self._use_tensor(tensor) for name, tensor in step.inputs.items()}
            group = servable.signature.group_of(inputs)
            if each.tokenizer is not None:
                inputs = each.tokenizer.limited(inputs, self._whole.most_tokens, each.readers_pack())
            done = partial(self._step_done, index)
            entry = StepEntry(step.name, servable, inputs, group, done, self._whole)
            servable.submit(entry)
        except ServerError as error:
            raise with_step(step.name, error) from error
        self._whole.parts.append(entry)
        self._running[index] = servable, entry

    def _use_tensor(self, tensor: str) -> Array:
        """Return a tensor for one of its uses (a step's input or an output); with the last use it is dropped here."""
        self._uses[tensor] -= 1
        return self._tensors[tensor] if self._uses[tensor] else self._tensors.pop(tensor)

    def _step_done(self, index: int, outcome: Outcome) -> None:
        if self._is_stopped:
            return
        _, entry = self._running.pop(index)
        entry.ended = monotonic()
        each = self._steps[index]
        self._took(each.step.name, entry.ended - entry.since)
        self._whole.tokens += entry.tokens  # of a pipeline as a step
        try:
            self._continue(each, outcome)
        except ServerError as error:
            self._end(error)
        except Exception as error:  # any failure: the caller is waiting for an answer
            log.exception("step %r", each.step.name)
            self._end(Internal(f"the steps after {each.step.name!r} could not be run ({type(error).__name__})"))

    def _continue(self, each: FlowStep, outcome: Outcome) -> None:
        if isinstance(outcome, ServerError):
            raise with_step(each.step.name, outcome)
        if isinstance(outcome, Exception):
            raise outcome
        if each.tokenizer is not None:
            self._whole.tokens += each.tokenizer.token_count(outcome)
        for name, tensor in each.step.outputs.items():
            if self._uses[tensor]:
                self._tensors[tensor] = outcome[name]
        self._start_ready()
        if not self._waiting and not self._running:
            self._end({name: self._tensors[name] for name in self._outputs})

    def _end(self, outcome: Outcome) -> None:
        self.stop()
        self._ended(self._whole, outcome)


def with_step(step: str, error: ServerError) -> ServerError:
    """Return an error of the same class with the step's name before its message."""
    return type(error)(f"step {step!r}: {error.message}", retry_after=error.retry_after)
