"""`TextAnswer`: sends the texts of a request as one JSON document or as server-sent events, while the client waits."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lathe.core.language.generation.request import End, Progress
from lathe.server.api.codec.reply import openai_error
from lathe.server.api.openai.connected import while_connected
from lathe.server.errors import ServerError
from lathe.server.generation.texts import Texts

_DONE = b"data: [DONE]\n\n"


class TextAnswer(Response, ABC):
    """The answer to a request for texts. When the client disconnects, its texts are cancelled."""

    prefix = ""  # of the answer's id
    kind = ""  # the `object` of the answer
    chunk_kind = ""  # the `object` of an event

    def __init__(self, texts: Texts, model: str, *, streams: bool, with_usage: bool) -> None:
        """`model`: the name in the answer. `streams`: as events. `with_usage`: the last event has the token counts."""
        self.status_code, self.background = 200, None
        self._texts = texts
        self._streams = streams
        self._with_usage = with_usage
        self._head: dict[str, Any] = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}", "object": self.kind, "created": int(time.time()),
            "model": model,
        }  # fmt: skip
        self._ends: dict[int, End] = {}

    @abstractmethod
    def take(self, index: int, part: Progress) -> Iterable[dict[str, Any]]:
        """Add a part of a text; yields the choices of events for it."""

    @abstractmethod
    def choices(self) -> list[dict[str, Any]]:
        """The choices of the whole answer."""

    def first_events(self) -> Iterable[dict[str, Any]]:
        """The choices of events before the first part."""
        return ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. Raises the ServerError of texts that have failed before anything was sent."""
        self._texts.admit()
        try:
            await while_connected(self._send_events(send) if self._streams else self._send_whole(scope, send), receive)
        finally:
            self._texts.close()

    async def _send_whole(self, scope: Scope, send: Send) -> None:
        async for index, part in self._texts.parts():
            self._note(index, part)
            for _ in self.take(index, part):
                pass
        body = orjson.dumps({**self._head, "choices": self.choices(), "usage": self._usage()})
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _send_events(self, send: Send) -> None:
        began = False
        try:
            async for index, part in self._texts.parts():
                events = list(self.take(index, part))
                self._note(index, part)
                if not began:
                    began = True
                    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    events = [*self.first_events(), *events]
                if events:
                    body = b"".join(self._event([choice]) for choice in events)
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            last = self._event([], self._usage()) if self._with_usage else b""
            await send({"type": "http.response.body", "body": last + _DONE})
        except ServerError as error:
            if not began:
                raise
            await send({"type": "http.response.body", "body": b"data: " + orjson.dumps(openai_error(error)) + b"\n\n"})

    def _note(self, index: int, part: Progress) -> None:
        if part.end is not None:
            self._ends[index] = part.end

    def _event(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        event = {**self._head, "object": self.chunk_kind, "choices": choices}
        if self._with_usage:
            event["usage"] = usage
        return b"data: " + orjson.dumps(event) + b"\n\n"

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
