"""What a library parses for a step is parsed in a child process first: the server only reads what did no harm there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from server.errors import Unprocessable
from server.pipelines.builtins import text
from tests.server.repository.test_pipelines import packed
from tests.server.repository.world import run, world

WORDS = """
inputs = ["text"]
outputs = ["input_ids"]

[[step]]
name = "words"
builtin = "tokenize"
inputs = {text = "text"}
outputs = {input_ids = "input_ids"}
"""


def tokenizer() -> bytes:
    made = Tokenizer(models.WordLevel({"one": 0, "two": 1}, unk_token="one"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return bytes(made.to_str(), "utf-8")


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What this process, the server, has parsed."""
    found: list[bytes] = []
    load: Callable[..., Tokenizer] = text._load

    def watched(content: bytes, options: text.TokenizeOptions) -> Tokenizer:
        found.append(content)
        return load(content, options)

    monkeypatch.setattr(text, "_load", watched)
    return found


def test_the_server_never_parses_what_a_child_could_not(tmp_path: Path, parsed: list[bytes]) -> None:
    async def story() -> None:
        async with world(tmp_path) as w:
            with pytest.raises(Unprocessable, match=r"step 'words': file 'tokenizer.json': it does not read as a tok"):
                await w.push(packed(WORDS, **{"tokenizer.json": b'{"version": "1.0", "model": {}}'}), "words")
            assert parsed == []
            await w.push(packed(WORDS, **{"tokenizer.json": tokenizer()}), "words")
            assert parsed == [tokenizer()]
            assert w.live("words") == 1

    run(story())
