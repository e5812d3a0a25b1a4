"""The answer to `POST /v1/audio/transcriptions`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import orjson
from starlette.types import Send

from lathe.core.language.generation.request import Progress
from lathe.server.api.codec.reply import openai_error
from lathe.server.api.openai.text_response import TextResponse, event, send_json
from lathe.server.errors import ServerError
from lathe.server.generation.transcription import Transcription

Format = Literal["json", "text", "verbose_json"]


class TranscriptionAnswer(TextResponse):
    """The text of a sound: the texts of its pieces, one after the other, without white space at the beginning."""

    texts: Transcription

    def __init__(self, texts: Transcription, form: Format, seconds: float, *, streams: bool) -> None:
        """`seconds`: the length of the sound."""
        super().__init__(texts, streams=streams)
        self._format, self._seconds, self._text = form, seconds, ""

    def take(self, index: int, part: Progress) -> Sequence[str]:
        new = part.text if self._text else part.text.lstrip()
        self._text += new
        return [new] if new else []

    def event_of(self, item: str) -> bytes:
        return event(orjson.dumps({"type": "transcript.text.delta", "delta": item}))

    def document(self) -> bytes:
        if self._format == "text":
            return self._text.encode() + b"\n"
        fields: dict[str, Any] = {"text": self._text, "usage": self._usage()}
        if self._format == "verbose_json":
            fields |= {"task": "transcribe", "language": self.texts.language or "en", "duration": self._seconds}
        return orjson.dumps(fields)

    def last_event(self) -> bytes:
        return event(orjson.dumps({"type": "transcript.text.done", "text": self._text, "usage": self._usage()}))

    def failure(self, error: ServerError) -> bytes:
        return event(orjson.dumps(openai_error(error)))

    async def send_document(self, send: Send) -> None:
        if self._format != "text":
            await send_json(send, self.document())
            return
        body = self.document()
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _usage(self) -> dict[str, Any]:
        """As for OpenAI's models that charge by time: whole seconds."""
        return {"type": "duration", "seconds": math.ceil(self._seconds)}
