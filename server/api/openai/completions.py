"""The answer to `POST /v1/completions`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from lathe.core.language.generation.request import End, Progress
from lathe.core.language.sampling import Choice
from lathe.core.language.token_bytes import TokenBytes
from lathe.server.api.openai.answer import TextAnswer
from lathe.server.api.openai.token_text import token_text
from lathe.server.generation.texts import Texts


class CompletionAnswer(TextAnswer):
    """An answer whose texts continue prompts: `count` texts for each prompt, in the order of the prompts."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        texts: Texts,
        model: str,
        *,
        count: int,
        echoes: Sequence[str],
        streams: bool,
        with_usage: bool,
        token_bytes: TokenBytes | None,
    ) -> None:
        """`echoes`: for each prompt the text that is returned before its continuation."""
        super().__init__(texts, model, streams=streams, with_usage=with_usage)
        self._token_bytes = token_bytes
        self._per_prompt = count
        self._texts_so_far = {index: echoes[index // count] for index in range(count * len(echoes))}
        self._unsent = dict(self._texts_so_far)  # echoes that no event had yet
        self._logprobs: dict[int, dict[str, list[Any]]] = defaultdict(_no_tokens)
        # The characters of each text that have begun so far.
        self._offsets = {index: len(text) for index, text in self._texts_so_far.items()}

    def choices_of(self, index: int, part: Progress) -> Iterator[dict[str, Any]]:
        text = self._unsent.pop(index, "") + part.text
        self._texts_so_far[index] += part.text
        tokens = self._tokens(index, part.choices)
        if text or part.choices or part.end is not None:
            yield _choice(index, text, tokens, part.end)

    def choices(self) -> list[dict[str, Any]]:
        return [
            _choice(index, text, self._logprobs[index] if self._token_bytes else None, self._ends[index])
            for index, text in self._texts_so_far.items()
        ]

    def prompt_ends(self, ends: Sequence[End]) -> Sequence[End]:
        return [end for index, end in self._ends.items() if index % self._per_prompt == 0]

    def _tokens(self, index: int, choices: Sequence[Choice]) -> dict[str, list[Any]] | None:
        """The log-probabilities of new tokens, which also join those of the whole text."""
        if self._token_bytes is None:
            return None
        new = _no_tokens()
        for choice in choices:
            content = self._token_bytes(choice.token)
            new["tokens"].append(token_text(content))
            new["token_logprobs"].append(choice.logprob)
            new["top_logprobs"].append(_best(self._token_bytes, choice))
            new["text_offset"].append(self._offsets[index] - _is_rest(content))
            if not self._token_bytes.is_special(choice.token):
                self._offsets[index] += sum(not _is_rest(content[at:]) for at in range(len(content)))
        for name, values in new.items():
            self._logprobs[index][name] += values
        return new


def _no_tokens() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _best(token_bytes: TokenBytes, choice: Choice) -> dict[str, float]:
    """The alternatives of a token; of tokens with equal bytes the likeliest."""
    found: dict[str, float] = {}
    for token, value in choice.alternatives:
        found.setdefault(token_text(token_bytes(token)), value)
    return found


def _is_rest(content: bytes) -> bool:
    """Whether the first byte continues a character (RFC 3629)."""
    return bool(content) and content[0] & 0xC0 == 0x80


def _choice(index: int, text: str, tokens: dict[str, list[Any]] | None, end: End | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": tokens, "finish_reason": end.reason if end is not None else None}
