"""Streams of text: the parts make the whole text, never half a character, and end before a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lathe.core.language.generation.text_stream import TextStream
from tests.core.language.test_tokenizer import trained

LIBRARY = trained()
TEXT = "naïve Straße 日本語 🙂🙂 and more  text,\n it's 12"


def decode(tokens: Sequence[int]) -> str:
    return str(LIBRARY.decode(list(tokens)))


def bytes_of(tokens: Sequence[int]) -> str:
    """A decoder whose tokens are bytes."""
    return bytes(tokens).decode(errors="replace")


def text_before(text: str, stops: Sequence[str]) -> str:
    """The text before the stop string that is complete first; of two that end together, before the longer one."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


def parts_of(stream: TextStream, tokens: Sequence[int]) -> list[str]:
    return [*(stream.push(token) for token in tokens), stream.finish()]


@pytest.mark.parametrize("prompt", ["", "A prompt ", "日本"])
def test_parts_make_the_whole_text(prompt: str) -> None:
    before, tokens = LIBRARY.encode(prompt).ids, LIBRARY.encode(TEXT).ids
    parts = parts_of(TextStream(decode, before), tokens)
    assert "".join(parts) == decode(tokens) and not any("\ufffd" in part for part in parts)


def test_characters_of_several_tokens_come_whole() -> None:
    parts = parts_of(TextStream(bytes_of), "aé日🙂z".encode())
    assert [part for part in parts if part] == list("aé日🙂z")


def test_invalid_bytes_do_not_hold_the_text_for_ever() -> None:
    tokens = [0x80] * 30
    parts = parts_of(TextStream(bytes_of), tokens)
    assert "".join(parts) == "\ufffd" * 30 and sum(map(bool, parts)) > 2


def test_an_incomplete_character_at_the_end_is_released() -> None:
    assert parts_of(TextStream(bytes_of), "aé".encode()[:2])[-1] == "\ufffd"


@pytest.mark.parametrize("stops", [["34"], ["3456", "45"], ["x", "7"], ["12345678x"], ["1"], ["日"]])
def test_the_text_ends_before_the_first_stop_string(stops: list[str]) -> None:
    """Whatever the tokens are: here bytes, so each stop string crosses their borders."""
    text = "1234567812日x"
    stream = TextStream(bytes_of, (), stops)
    found = ""
    for byte in text.encode():
        found += stream.push(byte)
    found += stream.finish()
    assert found == text_before(text, stops)
    assert (stream.stopped is None) == (found == text)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    stream = TextStream(bytes_of, (), ["abc"])
    assert [stream.push(byte) for byte in b"xababd"] == ["x", "", "", "ab", "", "abd"]


def test_random_stop_strings() -> None:
    rng = np.random.default_rng(3)
    for _ in range(300):
        text = "".join(rng.choice(list("ab"), 12))
        stops: list[Any] = ["".join(rng.choice(list("ab"), int(rng.integers(1, 5)))) for _ in range(2)]
        assert "".join(parts_of(TextStream(bytes_of, (), stops), text.encode())) == text_before(text, stops)
        # All of the text in one token:
        whole = TextStream(lambda tokens, text=text: text * len(tokens), (), stops)
        assert "".join(parts_of(whole, [0])) == text_before(text, stops)
