"""`Sequence`: one text while it is generated: its tokens, its pages, and how far they are computed."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items

from lathe.core.errors import LatheError
from lathe.core.language.generation.page_pool import page_keys
from lathe.core.language.generation.request import End, EndReason, GenerationRequest, Listener, Progress
from lathe.core.language.generation.text_stream import Decode, TextStream
from lathe.core.language.sampling import Choice, Logits, Sampler

log = logging.getLogger(__name__)


class Sequence:
    """A request in the engine. `limit`: the most tokens, those of the prompt included. `arrival`: its number."""

    def __init__(
        self, request: GenerationRequest, listener: Listener, decode: Decode, *, limit: int, arrival: int
    ) -> None:
        self.request = request
        self.arrival = arrival
        self.tokens = list(request.prompt)
        self.pages: list[int] = []
        self.computed = 0  # the tokens whose keys and values are in the pages
        self.cached: int | None = None  # the tokens of the prompt that were in the cache when it was admitted first
        self.last_run = 0  # the number of the last run with this sequence
        self.sealed = 0  # the pages that other sequences can find
        self.ended = False
        self._keys: list[bytes] = []
        self._source_key = b"" if request.source is None else request.source.key
        self._limit = limit
        self._listener = listener
        self._sampler = Sampler(request.sampling, request.prompt)
        self._text = TextStream(decode, request.prompt, request.stops)
        self._unsent: list[Choice] = []  # tokens whose text is held back

    @property
    def missing(self) -> int:
        """The number of tokens that have to be computed before the next token can be chosen."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    def keys(self, page_size: int) -> list[bytes]:
        """The keys of all full pages of its tokens."""
        self._keys = page_keys(self.tokens, page_size, self._keys, self.request.adapter, self._source_key)
        return self._keys

    @property
    def room(self) -> int:
        """How many tokens it can still get."""
        return self._limit - len(self.tokens)

    def possible(self, draft: list[int]) -> list[int]:
        """The first tokens of a draft, up to one that the grammar does not allow."""
        constraint = self.request.constraint
        try:
            return draft if constraint is None else draft[: constraint.count_allowed(draft)]
        except Exception:  # the grammar's library gives up: `choose` will end the text with its error
            return []

    def guess(self, logits: Logits, ahead: int) -> int:
        """The token that it would choose from these logits after `ahead` more tokens; changes nothing."""
        return self._sampler.choose(logits, len(self.tokens) + ahead).token

    def choose_all(self, rows: Logits, draft: Items[int]) -> bool:
        """Choose tokens from the logits [1 + drafted, vocabulary] after the last token and after each drafted one.

        Ends with the first token that is not the drafted one; returns whether the text has ended. The tokens before it
        are those whose keys and values the run has computed.
        """
        for row, guess in zip(rows, (*draft, None), strict=True):
            if self.choose(row):
                return True
            if self.tokens[-1] != guess:
                return False
            self.computed += 1
        return False

    def choose(self, logits: Logits) -> bool:
        """Choose the next token from its logits, and tell the caller; returns whether the text has ended.

        An error of sampling or of the tokenizer ends this text alone.
        """
        try:
            return self._choose(logits)
        except Exception as error:
            if not isinstance(error, LatheError):
                log.exception("a token could not be chosen")
            self._tell("", End("error", *self._counts(), error=error))
            return True

    def _choose(self, logits: Logits) -> bool:
        constraint = self.request.constraint
        allowed = None if constraint is None else constraint.allowed()
        choice = self._sampler.choose(logits, len(self.tokens), allowed)
        self.tokens.append(choice.token)
        if choice.token in self.request.end_tokens:
            self.end("stop")
            return True
        if constraint is not None:
            constraint.accept(choice.token)
        self._sampler.record(choice.token)
        self._unsent.append(choice)
        text = self._text.push(choice.token)
        if self._text.stopped is not None:
            self._tell(text, End("stop", *self._counts(), stop=self._text.stopped))
        elif len(self.tokens) >= self._limit:
            self.end("length", text=text)
        elif text:
            self._tell(text)
        return self.ended

    def end(self, reason: EndReason, error: Exception | None = None, text: str = "") -> None:
        """End the text, with what was held back of it."""
        text += self._text.finish()
        if (stop := self._text.stopped) is not None and reason == "length":
            self._tell(text, End("stop", *self._counts(), stop=stop))
        else:
            self._tell(text, End(reason, *self._counts(), error=error))

    def _counts(self) -> tuple[int, int, int]:
        return self.request.prompt_tokens, self.generated, self.cached or 0

    def _tell(self, text: str, end: End | None = None) -> None:
        choices, self._unsent = tuple(self._unsent), []
        self.ended = end is not None
        try:
            self._listener(Progress(text, choices, end))
        except Exception:  # an error of one caller must not stop the engine
            log.exception("a listener failed")
