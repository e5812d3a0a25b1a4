"""`Texts`: the texts of one HTTP request, from admission to their ends, as an asynchronous stream."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from statistics import fmean
from time import monotonic
from typing import TYPE_CHECKING, NoReturn

from lathe.core.errors import FeedError, GrammarError, LatheError
from lathe.core.language.generation.engine import Closed, Engine
from lathe.core.language.generation.request import End, GenerationRequest, Progress
from lathe.server.backends.language import TextModel
from lathe.server.errors import BadRequest, ContextExceeded, Internal, ServerError, Unavailable, Unprocessable
from lathe.server.generation.statistics import TextStatistics
from lathe.server.serving.servable import Servable
from lathe.server.serving.text_outcome import TextOutcome

if TYPE_CHECKING:
    from lathe.server.telemetry.text_trace import TextTrace  # opentelemetry is installed by an extra

_TOKEN_BYTES = 8  # of a prompt in the queue


class Texts:
    """Generates one text for each of the requests, on the engine of a servable.

    Use `admit`, then iterate over `parts` once, and call `close` in any case: it cancels the texts that have not ended,
    so that their pages are free at the next step of the engine.
    """

    def __init__(
        self,
        servable: Servable,
        requests: Sequence[GenerationRequest],
        statistics: TextStatistics,
        trace: TextTrace | None = None,
        spend: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """`spend` is called with the numbers of tokens that texts have got."""
        assert isinstance(servable.model, TextModel)
        self.servable = servable
        self._engine: Engine = servable.model.generator.engine
        self._requests = [_with_log_probabilities(each) for each in requests] if servable.watches_texts else requests
        self._log_probabilities: defaultdict[int, list[float]] = defaultdict(list)  # of the tokens so far, by text
        self._statistics = statistics
        self._trace = trace
        self._spend = spend
        self._spent: Counter[int] = Counter()  # tokens by text
        self._error: ServerError | None = None
        self._parts: asyncio.Queue[tuple[int, Progress]] = asyncio.Queue()
        self._cancels: dict[int, Callable[[], None]] = {}  # of the texts that have not ended
        self._nbytes = _TOKEN_BYTES * sum(len(request.prompt) for request in requests)
        self._began = monotonic()
        self._starts: dict[int, float] = {}  # the time at which each text began
        self._first: dict[int, float] = {}  # the time of each text's first token
        self._admitted = self._failed = False

    def admit(self) -> None:
        """Begin the texts. Raises Overloaded if the queue is full, and BadRequest for impossible requests."""
        try:
            self._admit()
        except ServerError as error:
            self._error = error
            raise

    def _admit(self) -> None:
        admission = self.servable.batcher.admission
        context = self._engine.context
        for request in self._requests:
            if len(request.prompt) >= context:
                self.servable.stats.refused(ContextExceeded.code)
                raise ContextExceeded(
                    f"prompt: expected fewer than {context} tokens, which is the model's context here, "
                    f"got {len(request.prompt)}"
                )
        if (refusal := admission.refusal(self._nbytes, monotonic())) is not None:
            self.servable.stats.refused(refusal.code)
            self._report_failures(refusal, len(self._requests))
            raise refusal
        admission.enter(self._nbytes)
        self._admitted = True
        for index, request in enumerate(self._requests):
            self.begin(index, request)

    def begin(self, index: int, request: GenerationRequest) -> None:
        """Begin the text with this number. Raises BadRequest for an impossible request."""
        self._starts[index] = monotonic()
        self._cancels[index] = self.submit(request, lambda part: self._parts.put_nowait((index, part)))

    def submit(self, request: GenerationRequest, put: Callable[[Progress], None]) -> Callable[[], None]:
        """Begin a text whose parts are given to `put` on the event loop; returns the function that cancels it."""
        loop = asyncio.get_running_loop()

        def on_progress(part: Progress) -> None:
            with suppress(RuntimeError):  # the loop is closed: the server has stopped
                loop.call_soon_threadsafe(put, part)

        try:
            return self._engine.submit(request, on_progress)
        except LatheError as error:
            self._failed, failure = True, as_server_error(error)
            self.servable.stats.refused(failure.code)
            raise failure from error

    async def parts(self) -> AsyncIterator[tuple[int, Progress]]:
        """Yield the parts of all texts, each with the index of its request, until all have ended.

        Raises the ServerError of a text that has failed.
        """
        while self._cancels:
            index, part = await self._parts.get()
            now = monotonic()
            if index not in self._first and (part.choices or part.end is not None):
                self._first[index] = now
                self._statistics.first(now - self._starts[index])
            self._log_probabilities[index] += [each.logprob for each in part.choices if each.logprob is not None]
            self._count(
                index, len(part.choices) if part.end is None else part.end.generated_tokens - self._spent[index]
            )
            if part.end is not None:
                self._ended(index, part.end, now)
                if part.end.error is not None:
                    self.fail(part.end.error, 1 + len(self._cancels))
            yield index, part

    def _count(self, index: int, tokens: int) -> None:
        if tokens > 0:
            self._spent[index] += tokens
            self._spend(tokens)

    def fail(self, cause: Exception, count: int) -> NoReturn:
        """Note that `count` texts have failed, and raise the ServerError for it."""
        self._failed, error = True, as_server_error(cause)
        self._error = error
        self.servable.stats.refused(error.code)
        self._report_failures(error, count)
        raise error from cause

    @property
    def is_complete(self) -> bool:
        """Whether all texts have ended."""
        return not self._cancels

    def close(self) -> None:
        """Cancel the texts that have not ended."""
        if self._trace is not None:
            self._trace.close(self._error)
        if not self._admitted:
            return
        self._admitted = False
        stats, now = self.servable.stats, monotonic()
        if not self.is_complete and not self._failed:
            stats.cancelled += 1
            for index in self._cancels:
                if index not in self._first:  # a caller who has seen enough of a text may leave
                    self.servable.report_text(TextOutcome(failed=True))
        elif not self._failed:
            stats.success.add(now - self._began)
            stats.request_times.add(now - self._began)
        for cancel in self._cancels.values():
            cancel()
        admission = self.servable.batcher.admission
        admission.leave(self._nbytes)
        admission.drain.add(1, now)

    def _ended(self, index: int, end: End, now: float) -> None:
        del self._cancels[index]
        spent = now - self._first[index]
        if self._trace is not None:
            self._trace.text(self._starts[index], self._first[index], now, end)
        self._statistics.ended(end.prompt_tokens, end.cached_tokens, end.generated_tokens, spent)
        if end.error is None:
            sure = self._log_probabilities.pop(index, None)
            mean = fmean(sure) if sure else None
            each = spent / (end.generated_tokens - 1) if end.generated_tokens > 1 else None
            self.servable.report_text(TextOutcome(False, each, mean))

    def _report_failures(self, error: ServerError, count: int) -> None:
        """Report that the remaining texts have failed, unless the error is the caller's."""
        for _ in range(count if error.http_status >= HTTPStatus.INTERNAL_SERVER_ERROR else 0):
            self.servable.report_text(TextOutcome(failed=True))


def _with_log_probabilities(request: GenerationRequest) -> GenerationRequest:
    """The request, with the log-probability of each token in its progress."""
    if request.sampling.logprobs is not None:
        return request
    return replace(request, sampling=replace(request.sampling, logprobs=0))


def as_server_error(error: Exception) -> ServerError:
    """Return the error for the client after an error of the engine, the tokenizer or the chat template."""
    match error:
        case ServerError():
            return error
        case FeedError():
            return BadRequest(str(error))
        case GrammarError():
            return BadRequest(str(error))
        case Closed():
            return Unavailable(str(error))
        case LatheError():
            return Unprocessable(str(error))
    return Internal("generating failed; see the server's log")
