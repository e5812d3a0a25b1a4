"""`SpeechTokens`: the tokens that tell a Whisper what to do, and those that it must not produce."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lathe.core.language.document import Document
from lathe.core.language.json_file import read_json

_FILE = "generation_config.json"


@dataclass(frozen=True)
class SpeechTokens:
    """The tokens of a Whisper's `generation_config.json`.

    `languages`: the token of each language by its code, such as `en`; empty for a model of English only, which has no
    `transcribe` either. `plain`: the text has no timestamps. `previous`: what precedes is an earlier text, None if the
    file does not name the token. `suppressed` are never produced, `suppressed_first` not as the first token of a text.
    """

    start: int
    languages: Mapping[str, int]
    transcribe: int | None
    plain: int
    previous: int | None
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()

    def beginning(self, language: str | None) -> tuple[int, ...]:
        """The tokens with which the text in a language begins; `language` is None for a model of English only."""
        if language is None or self.transcribe is None:
            return (self.start, self.plain)
        return (self.start, self.languages[language], self.transcribe, self.plain)


def read_speech_tokens(folder: Path, start: int, vocabulary: int) -> SpeechTokens:
    """The tokens in a Hugging Face folder. `start`: the first token of each text.

    ModelError if `generation_config.json` is missing or lacks the tokens, or has others than 0 to `vocabulary` - 1.
    """
    reader = _Reader(Document(_FILE, read_json(folder / _FILE)), vocabulary)
    languages: dict[str, int] = {}
    transcribe = None
    if reader.fields.flag("is_multilingual", True):
        languages = {name.removeprefix("<|").removesuffix("|>"): each for name, each in reader.table("lang_to_id")}
        transcribe = dict(reader.table("task_to_id")).get("transcribe")
        if transcribe is None or not languages:
            raise reader.fields.error("task_to_id", "the token of 'transcribe', and languages in lang_to_id", None)
    previous = reader.fields.get("prev_sot_token_id")
    return SpeechTokens(
        start,
        languages,
        transcribe,
        reader.token("no_timestamps_token_id", reader.fields.get("no_timestamps_token_id")),
        None if previous is None else reader.token("prev_sot_token_id", previous),
        reader.tokens("suppress_tokens"),
        reader.tokens("begin_suppress_tokens"),
    )


@dataclass(frozen=True)
class _Reader:
    fields: Document
    vocabulary: int

    def token(self, name: str, found: Any) -> int:
        if type(found) is not int or not 0 <= found < self.vocabulary:
            raise self.fields.error(name, f"a token of 0 to {self.vocabulary - 1}", found)
        return found

    def tokens(self, name: str) -> tuple[int, ...]:
        found = self.fields.get(name)
        if not isinstance(found, list | None):
            raise self.fields.error(name, "a list of tokens", found)
        return tuple(self.token(name, each) for each in found or ())

    def table(self, name: str) -> list[tuple[str, int]]:
        found = self.fields.part(name)
        if found is None:
            raise self.fields.error(name, "an object of tokens", None)
        return [(key, self.token(name, each)) for key, each in found.fields.items()]
