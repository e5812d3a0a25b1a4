"""`Transcriber`: makes requests for a Whisper of sound: pieces, their spectrograms, and the tokens before a text."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lathe.core.compiler.compile import compile
from lathe.core.errors import FeedError
from lathe.core.language.encoder_decoder import EncoderDecoderModel
from lathe.core.language.generation.request import GenerationRequest
from lathe.core.language.log_mel import RATE, padded_audio
from lathe.core.language.sampling import SamplingSettings
from lathe.core.language.source import Source
from lathe.core.language.token_filter import MaskedTokens
from lathe.core.language.whisper import WhisperSettings

Sound = NDArray[np.float32]

_SEARCHED = 10  # a piece is cut in the last tenth of the longest one
_QUIET = 300  # at the quietest three-hundredth: 0.1 of 30 seconds


class Transcriber:
    """Any number of threads may use it."""

    def __init__(self, model: EncoderDecoderModel, threads: int | None = None) -> None:
        """Compile the front end. ModelError if the folder's `generation_config.json` lacks the tokens."""
        settings = model.settings
        assert isinstance(settings, WhisperSettings)
        self.tokens = model.speech_tokens
        self._settings = settings
        self._tokenizer = model.tokenizer
        self._features = compile(model.features_graph, threads=threads, new_shapes="wait")

    def pieces(self, sound: Sound) -> Iterator[Sound]:
        """Sound of 16 kHz in pieces that the model can take, cut where it is quiet. At least one piece."""
        most = self._settings.samples
        while len(sound) > most:
            at = _quiet_place(sound[:most])
            yield sound[:at]
            sound = sound[at:]
        yield sound

    def source(self, piece: Sound) -> Source:
        """The spectrogram of a piece, followed by silence."""
        return Source(self._features.run({"audio": padded_audio(piece, self._settings.samples)})["input_features"][0])

    def detection(self, source: Source, client: str = "") -> GenerationRequest:
        """The request whose only token is that of the likeliest language. The model has several languages."""
        others = set(range(self._settings.vocabulary)) - set(self.tokens.languages.values())
        best = SamplingSettings(temperature=0)
        only_languages = MaskedTokens(self._settings.vocabulary, others)
        return GenerationRequest((self.tokens.start,), best, 1, client=client, constraint=only_languages, source=source)

    def language_of(self, token: int) -> str:
        """The code of a language's token."""
        return next(code for code, each in self.tokens.languages.items() if each == token)

    def request(
        self, source: Source, language: str | None, prompt: str, sampling: SamplingSettings, client: str = ""
    ) -> GenerationRequest:
        """The request for the text of a source. `language` and `prompt`: see `beginning`, which raises for them."""
        tokens = self.beginning(language, prompt)
        vocabulary, first = self._settings.vocabulary, self.tokens.suppressed_first
        allowed = MaskedTokens(vocabulary, self.tokens.suppressed, first)
        ends = frozenset(self._tokenizer.ends)
        return GenerationRequest(tokens, sampling, end_tokens=ends, client=client, constraint=allowed, source=source)

    def beginning(self, language: str | None, prompt: str = "") -> tuple[int, ...]:
        """The tokens before a text. `language`: its code; None for a model of English only.

        `prompt`: a text as if it came before the sound. FeedError for another language, and for a prompt if the model
        has no token for it.
        """
        known = self.tokens.languages
        if (language is not None or known) and language not in (known or ("en",)):
            listed = ", ".join(sorted(known) or ["en"])
            raise FeedError(f"language: expected one of {listed}, got {(language or 'none')[:20]!r}")
        return self._previous(prompt) + self.tokens.beginning(language if known else None)

    def _previous(self, prompt: str) -> tuple[int, ...]:
        """The tokens of an earlier text: the last ones, fewer than half of the decoder's positions."""
        if not prompt.strip():
            return ()
        if self.tokens.previous is None:
            raise FeedError("prompt: the model has no token prev_sot_token_id in generation_config.json")
        most = self._settings.decoder.positions // 2 - 1
        found = self._tokenizer.encode(" " + prompt.strip(), special=False)
        return (self.tokens.previous, *found[-most:])

    def close(self) -> None:
        """Free the code of the front end."""
        self._features.close()


def seconds_of(sound: Sound) -> float:
    """The length of sound of 16 kHz."""
    return len(sound) / RATE


def _quiet_place(piece: Sound) -> int:
    """The middle of the quietest part in the last tenth of a piece."""
    width, start = max(len(piece) // _QUIET, 1), len(piece) - len(piece) // _SEARCHED
    parts = len(piece[start:]) // width
    searched = piece[start : start + parts * width].reshape(parts, width)
    energies = np.square(searched, dtype=np.float64).sum(1)
    return start + int(energies.argmin()) * width + width // 2
