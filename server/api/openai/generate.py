"""The answer to `POST /v2/models/MODEL/generate` and `generate_stream`, the extension of Triton's protocol.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_generate.md
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from lathe.core.language.generation.request import Progress
from lathe.server.api.openai.text_response import TextResponse, event
from lathe.server.errors import ServerError
from lathe.server.generation.texts import Texts


class GenerateAnswer(TextResponse):
    """One text, as a JSON object or as an event for each part."""

    def __init__(self, texts: Texts, id: str | None, prefix: str, *, streams: bool) -> None:
        """`id`: of the request. `prefix`: comes before the text."""
        super().__init__(texts, streams=streams)
        ref = texts.servable.ref
        self._head: dict[str, Any] = {"model_name": ref.name, "model_version": str(ref.version)}
        if id is not None:
            self._head["id"] = id
        self._text = self._unsent = prefix

    def take(self, index: int, part: Progress) -> Sequence[str]:
        new, self._unsent = self._unsent + part.text, ""
        self._text += part.text
        return [new] if new else []

    def event_of(self, item: str) -> bytes:
        return event(self._content(item))

    def document(self) -> bytes:
        return self._content(self._text)

    def last_event(self) -> bytes:
        return b""

    def failure(self, error: ServerError) -> bytes:
        return event(orjson.dumps({"error": error.message}))

    def _content(self, text: str) -> bytes:
        return orjson.dumps({**self._head, "text_output": text})
