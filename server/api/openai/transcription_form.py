"""Receives the form of `POST /v1/audio/transcriptions`: its fields, and the sound of its file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from fastapi import Request
from numpy.typing import NDArray
from pydantic import ValidationError

from lathe.core.errors import FeedError
from lathe.core.language.log_mel import RATE
from lathe.core.language.resampling import resampled
from lathe.core.language.wav import read_wav
from lathe.core.validation_errors import error_messages
from lathe.server.api.inference.asgi import client_id, read_body
from lathe.server.api.openai.form import Form, form_boundary, read_form
from lathe.server.api.openai.schemas import TranscriptionRequest
from lathe.server.errors import BadRequest, UnsupportedMedia

if TYPE_CHECKING:
    from lathe.server.api.inference.memory_ledger import MemoryClaim
    from lathe.server.api.inference.reader_threads import ReaderThreads

MOST_BYTES = 25 << 20  # of a request: OpenAI's limit of a file
_FILE = "file"
_FLOATS = 20  # bytes of numbers and their copies for each byte of a file, the most: 8 bits at 8 kHz become 16 kHz


async def receive_form(request: Request, claim: MemoryClaim, readers: ReaderThreads, most: int) -> Form:
    """The form of a request of at most `most` bytes, which `claim` counts. Raises as `read_body` and `read_form`."""
    boundary = form_boundary(request.headers.get("content-type", ""))
    body = await read_body(request.receive, most, claim)
    return await readers.run(client_id(request.scope), read_form, body, boundary)


def asked_fields(form: Form) -> TranscriptionRequest:
    """The fields of a form. BadRequest for unknown ones, values out of range, and a form without a file."""
    fields: dict[str, str] = {}
    for name, values in form.fields.items():
        if len(values) > 1:
            raise BadRequest(f"{name[:80]}: expected one value, got {len(values)}")
        fields[name] = values[0]
    if _FILE in form.fields:
        raise BadRequest("file: expected a file with its name, got a text")
    for name in form.files:
        if name != _FILE:
            raise BadRequest(f"{name[:80]}: expected a text, got a file")
    if _FILE not in form.files:
        raise BadRequest("file: is missing")
    try:
        return TranscriptionRequest.model_validate(fields)
    except ValidationError as error:
        raise BadRequest("; ".join(error_messages(error.errors(), TranscriptionRequest, fields))) from None


async def read_sound(form: Form, claim: MemoryClaim, readers: ReaderThreads, client: str) -> NDArray[np.float32]:
    """The sound of a form's file, float32 [samples] of 16 kHz. BadRequest for a file that cannot be read."""
    content = form.files[_FILE]
    claim.add(_FLOATS * len(content))
    return await readers.run(client, _decoded, content)


def _decoded(content: memoryview) -> NDArray[np.float32]:
    if not (bytes(content[:4]) == b"RIFF" and bytes(content[8:12]) == b"WAVE"):
        raise UnsupportedMedia("file: expected a WAV file of PCM, got another format; convert it first")
    try:
        return resampled(*read_wav(content), RATE)
    except FeedError as error:
        raise BadRequest(f"file: {error}") from error
