"""`Transcription`: the text of a sound, piece by piece, as an asynchronous stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from lathe.core.errors import LatheError
from lathe.core.language.generation.request import GenerationRequest, Progress
from lathe.core.language.sampling import SamplingSettings
from lathe.core.language.source import Source
from lathe.core.language.transcriber import Sound, Transcriber
from lathe.server.backends.language import TextModel
from lathe.server.generation.statistics import TextStatistics
from lathe.server.generation.texts import Texts, as_server_error
from lathe.server.serving.servable import Servable

if TYPE_CHECKING:
    from lathe.server.telemetry.text_trace import TextTrace  # opentelemetry is installed by an extra


class Transcription(Texts):
    """Transcribes one piece after the other, so that a request holds the encoder's results of one piece only.

    A piece waits for one of the model's slots, which clients share fairly. Without `language` the model detects that of
    the first piece. `language` is its code then; None for a model of English only.
    """

    def __init__(
        self,
        servable: Servable,
        pieces: Sequence[Sound],
        statistics: TextStatistics,
        trace: TextTrace | None,
        spend: Callable[[int], None],
        *,
        language: str | None,
        prompt: str,
        sampling: SamplingSettings,
        client: str,
    ) -> None:
        """Raises BadRequest for a language or a prompt that the model cannot take."""
        super().__init__(servable, (), statistics, trace, spend)
        assert isinstance(servable.model, TextModel)
        assert servable.model.generator.transcriber is not None
        self._transcriber: Transcriber = servable.model.generator.transcriber
        self._slots = servable.model.slots
        self._pieces, self._sampling, self._prompt, self._client = pieces, sampling, prompt, client
        self.language = language
        try:
            self._transcriber.beginning(language or next(iter(self._transcriber.tokens.languages), None), prompt)
        except LatheError as error:
            raise as_server_error(error) from error
        self._nbytes = sum(piece.nbytes for piece in pieces)
        self._is_complete = False

    @property
    def is_complete(self) -> bool:
        return self._is_complete

    async def parts(self) -> AsyncIterator[tuple[int, Progress]]:
        """Yield the parts of the texts of all pieces, each with the number of its piece. Raises as `Texts.parts`."""
        for index, piece in enumerate(self._pieces):
            async with self._slots.place(self._client):
                source = await asyncio.to_thread(self._transcriber.source, piece)
                if self.language is None and self._transcriber.tokens.languages:
                    self.language = await self._detected(source)
                request = self._request(source)
                self._spend(len(request.prompt))
                self.begin(index, request)
                async for part in super().parts():
                    yield part
        self._is_complete = True

    async def _detected(self, source: Source) -> str:
        """The likeliest language of a source."""
        found: asyncio.Queue[Progress] = asyncio.Queue()
        cancel = self.submit(self._transcriber.detection(source, self._client), found.put_nowait)
        try:
            part = await found.get()  # the only token is the end
        finally:
            cancel()
        if part.end is not None and part.end.error is not None:
            self.fail(part.end.error, 1)
        return self._transcriber.language_of(part.choices[0].token)

    def _request(self, source: Source) -> GenerationRequest:
        return self._transcriber.request(source, self.language, self._prompt, self._sampling, self._client)
