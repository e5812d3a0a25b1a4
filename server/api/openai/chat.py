"""The answer to `POST /v1/chat/completions`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lathe.core.language.generation.request import End, Progress
from lathe.core.language.sampling import Choice
from lathe.server.api.openai.answer import TextAnswer
from lathe.server.api.openai.token_text import token_text
from lathe.server.api.openai.tool_calls import ToolCallParser
from lathe.server.generation.texts import Texts

BytesOf = Callable[[int], bytes]


class ChatAnswer(TextAnswer):
    """An answer whose texts are messages of the assistant."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        texts: Texts,
        model: str,
        *,
        count: int,
        streams: bool,
        with_usage: bool,
        token_bytes: BytesOf | None,
        with_tools: bool,
    ) -> None:
        """`count`: of the texts. `token_bytes` is given if log-probabilities are wanted."""
        super().__init__(texts, model, streams=streams, with_usage=with_usage)
        self._token_bytes = token_bytes
        self._count = count
        self._contents: dict[int, str] = defaultdict(str)
        self._tokens: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self._calls: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self._parsers = {index: ToolCallParser() for index in range(count)} if with_tools else {}

    def first_choices(self) -> Iterable[dict[str, Any]]:
        for index in range(self._count):
            yield _chunk(index, {"role": "assistant", "content": ""})

    def choices_of(self, index: int, part: Progress) -> Iterator[dict[str, Any]]:
        content, calls = self._split(index, part)
        tokens = [self._logprob(choice) for choice in part.choices] if self._token_bytes is not None else []
        self._contents[index] += content
        self._tokens[index] += tokens
        if content or tokens:
            yield _chunk(index, {"content": content}, tokens if self._token_bytes is not None else None)
        for call in calls:
            yield _chunk(index, {"tool_calls": [{"index": len(self._calls[index]), **call}]})
            self._calls[index].append(call)
        if part.end is not None:
            yield _chunk(index, {}, finish=self._finish_reason(index, part.end))

    def choices(self) -> list[dict[str, Any]]:
        return [self._choice(index) for index in range(self._count)]

    def _split(self, index: int, part: Progress) -> tuple[str, list[dict[str, Any]]]:
        parser = self._parsers.get(index)
        if parser is None:
            return part.text, []
        content, calls = parser.push(part.text)
        return content + (parser.finish() if part.end is not None else ""), calls

    def _choice(self, index: int) -> dict[str, Any]:
        calls, content = self._calls[index], self._contents[index]
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = calls
        tokens = {"content": self._tokens[index], "refusal": None} if self._token_bytes is not None else None
        reason = self._finish_reason(index, self._ends[index])
        return {"index": index, "message": message, "logprobs": tokens, "finish_reason": reason}

    def _finish_reason(self, index: int, end: End) -> str:
        return "tool_calls" if self._calls[index] and end.reason == "stop" else end.reason

    def _logprob(self, choice: Choice) -> dict[str, Any]:
        assert choice.logprob is not None
        best = [self._entry(token, logprob) for token, logprob in choice.alternatives]
        return {**self._entry(choice.token, choice.logprob), "top_logprobs": best}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        assert self._token_bytes is not None
        content = self._token_bytes(token)
        return {"token": token_text(content), "logprob": logprob, "bytes": list(content)}


def _chunk(
    index: int, delta: dict[str, Any], tokens: list[dict[str, Any]] | None = None, finish: str | None = None
) -> dict[str, Any]:
    logprobs = None if tokens is None else {"content": tokens, "refusal": None}
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
