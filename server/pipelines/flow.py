"""One request on its way through a pipeline."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from server.batching.entry import Done, Entry, Outcome
from server.batching.signature import Group
from server.errors import Internal, ServerError
from server.pipelines.definition import StepDef
from server.types import Array, ModelRef, Tensors

if TYPE_CHECKING:
    from server.scheduling.servable import Servable

log = logging.getLogger("lathe.pipelines")

Target = Callable[[], "Servable"]  # what runs a step now; raises ServerError
Took = Callable[[str, float], None]  # told of each step that ended and its seconds
Ended = Callable[[Entry, Outcome], None]


class StepEntry(Entry):
    """A step's place in the queue of what runs it."""

    __slots__ = ("ended", "ref", "step")

    def __init__(self, step: str, servable: Servable, inputs: Tensors, group: Group, done: Done, whole: Entry) -> None:
        super().__init__(inputs, group, done, whole.deadline, whole.priority)
        self.client, self.id, self.trace = whole.client, whole.id, whole.trace
        self.since = monotonic()  # until it is queued, which an answer from a cache never is
        self.step = step
        self.ref: ModelRef = servable.ref
        self.ended: float | None = None  # monotonic seconds


class Flow:
    """Runs each step as soon as its inputs are there; tensors are handed on as they are.

    ``whole`` is the caller's request. Its ``parts`` are the steps begun so far. ``ended`` is called once, unless the
    flow is stopped or does not even begin.
    """

    def __init__(
        self, steps: list[tuple[StepDef, Target]], outputs: list[str], whole: Entry, took: Took, ended: Ended
    ) -> None:
        self._steps = steps
        self._outputs = outputs
        self._whole = whole
        self._took = took
        self._ended = ended
        self._tensors: Tensors = dict(whole.inputs)
        self._uses = Counter(outputs)
        for step, _ in steps:
            self._uses.update(step.inputs.values())
        self._waiting = list(range(len(steps)))
        self._running: dict[int, tuple[Servable, StepEntry]] = {}
        self._over = False

    def start(self) -> None:
        """Begin; raises ServerError when a first step is refused at its door."""
        try:
            self._begin_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Take what waits out of its queues; nobody is told."""
        self._over = True
        for servable, entry in self._running.values():
            servable.cancel(entry)
        self._running.clear()
        self._tensors.clear()

    def _begin_ready(self) -> None:
        for index in [i for i in self._waiting if self._tensors.keys() >= set(self._steps[i][0].inputs.values())]:
            self._waiting.remove(index)
            self._begin(index)

    def _begin(self, index: int) -> None:
        step, target = self._steps[index]
        try:
            servable = target()
            inputs = {name: self._take(tensor) for name, tensor in step.inputs.items()}
            group = servable.signature.group_of(inputs)
            done = partial(self._step_done, index)
            entry = StepEntry(step.name, servable, inputs, group, done, self._whole)
            servable.submit(entry)
        except ServerError as error:
            raise _at(step.name, error) from error
        self._whole.parts.append(entry)
        self._running[index] = servable, entry

    def _take(self, tensor: str) -> Array:
        """Return a tensor for one of its uses; after the last one it is not kept."""
        self._uses[tensor] -= 1
        return self._tensors[tensor] if self._uses[tensor] else self._tensors.pop(tensor)

    def _step_done(self, index: int, outcome: Outcome) -> None:
        if self._over:
            return
        _, entry = self._running.pop(index)
        entry.ended = monotonic()
        step = self._steps[index][0]
        self._took(step.name, entry.ended - entry.since)
        try:
            self._go_on(step, outcome)
        except ServerError as error:
            self._end(error)
        except Exception as error:  # a caller is waiting: whatever it is, they are told
            log.exception("step %r", step.name)
            self._end(Internal(f"step {step.name!r} could not be followed ({type(error).__name__})"))

    def _go_on(self, step: StepDef, outcome: Outcome) -> None:
        if isinstance(outcome, ServerError):
            raise _at(step.name, outcome)
        if isinstance(outcome, Exception):
            raise outcome
        for name, tensor in step.outputs.items():
            if self._uses[tensor]:
                self._tensors[tensor] = outcome[name]
        self._begin_ready()
        if not self._waiting and not self._running:
            self._end({name: self._tensors[name] for name in self._outputs})

    def _end(self, outcome: Outcome) -> None:
        self.stop()
        self._ended(self._whole, outcome)


def _at(step: str, error: ServerError) -> ServerError:
    """Return the same refusal, saying in which step it happened."""
    return type(error)(f"step {step!r}: {error.message}", retry_after=error.retry_after)
