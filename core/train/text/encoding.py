"""Documents as tokens: texts with an end token, and conversations in which only answers count for the loss."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from lathe.core.errors import DataError, FeedError
from lathe.core.language.generation.chat_template import ChatTemplate
from lathe.core.train.data.dataset import Dataset, Rows, Values
from lathe.core.train.data.text_file import MESSAGES
from lathe.core.train.text.language import Language

# Tokens as int32. A token that does not count as a target is stored as its complement, a negative number.
Tokens: TypeAlias = Values
Messages: TypeAlias = Sequence[Mapping[str, Any]]
Render: TypeAlias = Callable[[Messages, bool], str]

_AT_ONCE = 256  # documents that are read and encoded together


def encoded(dataset: Dataset, rows: Rows, language: Language) -> Iterator[Tokens]:
    """The tokens of each document, int32 [length]. DataError for a conversation that the template refuses."""
    (column,) = dataset.columns
    encode = _chat_encoder(language) if column == MESSAGES else _text_encoder(language)
    for start in range(0, len(rows), _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        for row, text in zip(part.tolist(), dataset.take(part)[column], strict=True):
            try:
                yield encode(text)
            except FeedError as error:
                raise dataset.error(str(error), column, row) from None


def texts(dataset: Dataset, rows: Rows) -> Iterator[str]:
    """The text of each document as a new tokenizer sees it: of a conversation the text by the default template."""
    (column,) = dataset.columns
    for start in range(0, len(rows), _AT_ONCE):
        for text in dataset.take(rows[start : start + _AT_ONCE])[column]:
            yield chat_markup(json.loads(text), False) if column == MESSAGES else text


def _text_encoder(language: Language) -> Callable[[str], Tokens]:
    def encode(text: str) -> Tokens:
        tokens = language.tokenizer.encode(text)
        return np.array(tokens if tokens[-1:] == [language.end] else [*tokens, language.end], np.int32)

    return encode


def _chat_encoder(language: Language) -> Callable[[str], Tokens]:
    render: Render = chat_markup
    if language.chat_template is not None:
        template = ChatTemplate(language.chat_template, language.special_tokens)

        def render(messages: Messages, prompt: bool) -> str:
            return template.render(messages, prompt=prompt)

    def encode(text: str) -> Tokens:
        whole, answers = _answers(json.loads(text), render)
        found = language.tokenizer.library.encode(whole, add_special_tokens=False)
        starts = np.array([start for start, _ in found.offsets], np.int64)
        counts = np.zeros(len(starts), np.bool_)
        for begin, end in answers:
            counts |= (starts >= begin) & (starts < end)
        tokens = np.append(np.array(found.ids, np.int32), np.int32(language.end))
        return np.where(np.append(counts, bool(answers)), tokens, ~tokens)

    return encode


def _answers(messages: Messages, render: Render) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and where its answers are: the first character and the one after the last.

    An answer is what follows the prompt before it. FeedError if the template changes the text of earlier messages.
    """
    whole, answers = render(messages, False), []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = render(messages[:number], True), render(messages[: number + 1], False)
            if not after.startswith(before) or not whole.startswith(after):
                raise FeedError("messages: the chat template changes earlier messages, so answers cannot be found")
            answers.append((len(before), len(after)))
    return whole, answers


def chat_markup(messages: Messages, prompt: bool) -> str:
    """The template of models without one: ChatML, `<|im_start|>ROLE`, the content, `<|im_end|>`."""
    parts = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
    return "".join([*parts, "<|im_start|>assistant\n"] if prompt else parts)


def check_documents(dataset: Dataset) -> None:
    """DataError unless the dataset has one column of documents."""
    if dataset.format not in ("text", "jsonl"):
        message = f"a language model needs documents (format `text` or `jsonl`), got {dataset.format}: {dataset.text()}"
        raise DataError(message, file=dataset.name)
