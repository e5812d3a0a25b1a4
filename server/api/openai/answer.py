"""`TextAnswer`: the answer to a request for texts in the form of OpenAI's API."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from lathe.core.language.generation.request import End, Progress
from lathe.server.api.codec.reply import openai_error
from lathe.server.api.openai.text_response import TextResponse, event
from lathe.server.errors import ServerError
from lathe.server.generation.texts import Texts

_DONE = b"data: [DONE]\n\n"


class TextAnswer(TextResponse):
    """The answer to a request for texts, whose choices are in the form of OpenAI's API."""

    prefix = ""  # of the answer's id
    kind = ""  # the `object` of the answer
    chunk_kind = ""  # the `object` of an event

    def __init__(self, texts: Texts, model: str, *, streams: bool, with_usage: bool) -> None:
        """`model`: the name in the answer. `with_usage`: the last event has the token counts."""
        super().__init__(texts, streams=streams)
        self._with_usage = with_usage
        self._head: dict[str, Any] = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}", "object": self.kind, "created": int(time.time()),
            "model": model,
        }  # fmt: skip
        self._ends: dict[int, End] = {}
        self._began = False

    @abstractmethod
    def choices_of(self, index: int, part: Progress) -> Iterable[dict[str, Any]]:
        """Add a part of a text; yields the choices of events for it."""

    @abstractmethod
    def choices(self) -> list[dict[str, Any]]:
        """The choices of the whole answer."""

    def first_choices(self) -> Iterable[dict[str, Any]]:
        """The choices of events before the first part."""
        return ()

    def take(self, index: int, part: Progress) -> Sequence[dict[str, Any]]:
        choices = list(self.choices_of(index, part))
        if part.end is not None:
            self._ends[index] = part.end
        if not self._began:
            self._began = True
            choices = [*self.first_choices(), *choices]
        return choices

    def event_of(self, item: dict[str, Any]) -> bytes:
        return self._event([item])

    def document(self) -> bytes:
        return orjson.dumps({**self._head, "choices": self.choices(), "usage": self._usage()})

    def last_event(self) -> bytes:
        return (self._event([], self._usage()) if self._with_usage else b"") + _DONE

    def failure(self, error: ServerError) -> bytes:
        return event(orjson.dumps(openai_error(error)))

    def _event(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        content = {**self._head, "object": self.chunk_kind, "choices": choices}
        if self._with_usage:
            content["usage"] = usage
        return event(orjson.dumps(content))

    def _usage(self) -> dict[str, Any]:
        """The numbers of tokens; a prompt with several texts counts once."""
        ends = list(self._ends.values())
        prompts = self.prompt_ends(ends)
        prompt, generated = sum(end.prompt_tokens for end in prompts), sum(end.generated_tokens for end in ends)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in prompts)},
        }

    def prompt_ends(self, ends: Sequence[End]) -> Sequence[End]:
        """One end for each prompt."""
        return [self._ends[min(self._ends)]] if ends else []
