"""`Engine`: a thread that generates many texts at once, with one `TokenRunner`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from queue import SimpleQueue

import numpy as np

from lathe.core.errors import FeedError, LatheError
from lathe.core.language.generation.drafting import Drafting
from lathe.core.language.generation.request import GenerationRequest, Listener, Progress
from lathe.core.language.generation.scheduler import Counters, Scheduler
from lathe.core.language.generation.sequence import Sequence
from lathe.core.language.generation.text_stream import Decode
from lathe.core.language.source import Source
from lathe.core.language.token_runner import TokenRunner

log = logging.getLogger(__name__)


class Closed(LatheError):
    """The engine was closed before the text has ended."""


class Engine:
    """Generates texts. All methods may be called from any thread.

    `decode` makes text of tokens. The engine owns the runner, and closes it. `sequences`, `prompt_tokens` and
    `drafting`, which it closes as well, are those of `Scheduler`.
    """

    def __init__(
        self,
        runner: TokenRunner,
        decode: Decode,
        *,
        sequences: int = 64,
        prompt_tokens: int = 128,
        drafting: Drafting | None = None,
        start: int | None = None,
        reads_sound: bool = False,
        name: str = "engine",
    ) -> None:
        """`start`: for encoder-decoders of texts the token with which texts begin; prompts are then their sources.

        `reads_sound`: each request must have a source.
        """
        self._runner = runner
        self._decode = decode
        self._start = start
        self._reads_sound = reads_sound
        self._scheduler = Scheduler(
            runner.page_count,
            runner.page_size,
            runner.capacity,
            sequences=sequences,
            prompt_tokens=prompt_tokens,
            drafting=drafting,
        )
        self._drafting = drafting
        self._wake = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._closed = False
        self._arrivals = 0
        self._thread = threading.Thread(target=self._work, name=f"lathe-{name}", daemon=True)
        self._thread.start()

    @property
    def context(self) -> int:
        """The most tokens of a text with its prompt: bounded by the model, and by the pages of the cache."""
        return min(self._runner.context, self._runner.page_count * self._runner.page_size)

    @property
    def counters(self) -> Counters:
        """A copy of the counters."""
        return replace(self._scheduler.counters)

    @property
    def makes_drafts(self) -> bool:
        """Whether texts have drafts."""
        return self._drafting is not None

    @property
    def running(self) -> int:
        """The number of texts that have pages of the cache."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """The number of texts that wait for pages."""
        return len(self._scheduler.waiting)

    @property
    def cache_use(self) -> float:
        """The share of the cache's pages that texts use now."""
        return self._scheduler.pool.used / self._scheduler.pool.count

    def submit(self, request: GenerationRequest, listener: Listener) -> Callable[[], None]:
        """Begin a text; returns the function that cancels it, which has no effect after its end.

        `listener` is called on the engine's thread until a `Progress` with an `end`. FeedError for a prompt that is
        empty, too long, or has tokens outside the vocabulary; Closed if the engine is closed.
        """
        limit = self._limit(request)
        if self._start is not None:
            source = Source(np.array(request.prompt, np.int64))
            request = replace(request, prompt=(self._start,), source=source)
            limit = self.context if request.max_tokens is None else min(self.context, 1 + request.max_tokens)
        with self._wake:
            if self._closed:
                raise Closed("the model was unloaded")
            self._arrivals += 1
            sequence = Sequence(request, listener, self._decode, limit=limit, arrival=self._arrivals)
            self._send(lambda: self._scheduler.add(sequence))
        return lambda: self._cancel(sequence)

    def generate(self, request: GenerationRequest) -> Generator[Progress]:
        """The parts of a text, as they are generated, for callers without an event loop. Raises as `submit`.

        The text is cancelled if the iterator is closed. An `End` with an error raises it.
        """
        parts: SimpleQueue[Progress] = SimpleQueue()
        cancel = self.submit(request, parts.put)
        try:
            while True:
                part = parts.get()
                if part.end is not None and part.end.error is not None:
                    raise part.end.error
                yield part
                if part.end is not None:
                    return
        finally:
            cancel()

    def cancel_all(self) -> None:
        """End all texts with the error Closed."""
        with self._wake:
            self._send(self._end_all)

    def close(self) -> None:
        """End all texts with the error Closed, and close the runner. Blocks until a running step has ended."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _limit(self, request: GenerationRequest) -> int:
        length = len(request.prompt)
        if self._reads_sound and request.source is None:
            raise FeedError("model: it transcribes sound, and answers no prompts: expected /v1/audio/transcriptions")
        if not length:
            raise FeedError("prompt: expected at least one token")
        if length >= self.context:
            raise FeedError(f"prompt: expected fewer than {self.context} tokens, got {length}")
        if min(request.prompt) < 0 or max(request.prompt) >= self._runner.vocabulary:
            raise FeedError(f"prompt: expected tokens from 0 to {self._runner.vocabulary - 1}")
        if any(not 0 <= token < self._runner.vocabulary for token in request.sampling.bias):
            raise FeedError(f"logit_bias: expected tokens from 0 to {self._runner.vocabulary - 1}")
        if not 0 <= request.adapter <= self._runner.adapter_count:
            raise FeedError(f"adapter: expected 0 to {self._runner.adapter_count}, got {request.adapter}")
        if request.max_tokens is None:
            return self.context
        if request.max_tokens < 1:
            raise FeedError(f"max_tokens: expected at least 1, got {request.max_tokens}")
        return min(self.context, length + request.max_tokens)

    def _send(self, command: Callable[[], None]) -> None:
        """Let the engine's thread run `command` before its next step; the caller holds the lock."""
        self._commands.append(command)
        self._wake.notify()

    def _cancel(self, sequence: Sequence) -> None:
        if sequence.ended:
            return
        with self._wake:
            self._send(lambda: self._end_early(sequence))

    def _end_early(self, sequence: Sequence) -> None:
        if not sequence.ended:
            self._scheduler.remove(sequence)
            sequence.end("cancelled")

    def _end_all(self) -> None:
        for sequence in (*self._scheduler.running, *self._scheduler.waiting):
            self._scheduler.remove(sequence)
            sequence.end("error", Closed("the model was unloaded"))

    def _work(self) -> None:
        while True:
            with self._wake:
                while not (self._closed or self._commands) and self._scheduler.is_idle:
                    self._wake.wait()
                commands, self._commands, closed = self._commands, [], self._closed
            for command in commands:
                command()
            if closed:
                break
            self._step()
        self._end_all()
        if self._drafting is not None:
            self._drafting.close()
        self._runner.close()

    def _step(self) -> None:
        steps = self._scheduler.next_run()
        if not steps:
            return
        began = time.perf_counter()
        try:
            logits = self._runner.run([step.chunk for step in steps])
        except Exception as error:  # the texts of this run fail, and the others go on
            if not isinstance(error, LatheError):
                log.exception("a run of tokens failed")
            self._scheduler.fail_run(steps, error)
            return
        self._scheduler.counters.run_seconds += time.perf_counter() - began
        self._scheduler.finish_run(steps, logits)
