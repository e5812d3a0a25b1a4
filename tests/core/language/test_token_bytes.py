"""The bytes of tokens, against those that llguidance computes, and against the bytes of whole texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llguidance
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from lathe.core.language.token_bytes import TokenBytes
from lathe.core.language.tokenizer import Tokenizer
from tests.core.language.test_tokenizer import TEXTS, made_from, pieces, vocabulary

SPLIT = "naïve Straße 日本語 🙂 x"


@pytest.mark.parametrize("metadata", [vocabulary("gpt-2"), pieces()], ids=["byte-level", "sentencepiece"])
def test_bytes_are_those_of_another_library(tmp_path: Path, metadata: dict[str, Any]) -> None:
    tokenizer = made_from(tmp_path, metadata)
    found, oracle = TokenBytes(tokenizer), llguidance.LLTokenizer(tokenizer.library.to_str())
    count = tokenizer.library.get_vocab_size()
    plain = [token for token in range(count) if not found.is_special(token)]
    assert 0 < count - len(plain) < 10
    bytes_of = {token: found(token) for token in plain}
    assert [
        token for token in plain if bytes_of[token] != oracle.decode_bytes([token]) and bytes_of[token] != b"\xff"
    ] == []
    assert b"\xff" in bytes_of.values(), (
        "llguidance marks special tokens by this byte, and gives no bytes for its token"
    )
    assert found(count + 5) == b""


@pytest.mark.parametrize("metadata", [vocabulary("gpt-2"), pieces()], ids=["byte-level", "sentencepiece"])
def test_the_bytes_of_a_texts_tokens_are_the_text(tmp_path: Path, metadata: dict[str, Any]) -> None:
    tokenizer = made_from(tmp_path, metadata)
    found = TokenBytes(tokenizer)
    for text in (SPLIT, *TEXTS):
        tokens = tokenizer.encode(text, special=False)
        if tokenizer.decode(tokens) == text:  # without special tokens, and without normalization
            # SentencePiece puts a space before each text, and decoders remove it.
            assert b"".join(found(token) for token in tokens) in (text.encode(), b" " + text.encode())
    single = [found(token) for token in tokenizer.encode("🙂", special=False)]
    assert len([each for each in single if each.strip()]) > 1, "the character consists of several tokens"


def test_other_decoders(tmp_path: Path) -> None:
    library = Library(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece()
    found = TokenBytes(Tokenizer(library))
    assert found(1) == b"a" and found(2) == tokenized(library, 2)
    library.decoder, library.pre_tokenizer = decoders.Metaspace(), pre_tokenizers.Metaspace()
    assert TokenBytes(Tokenizer(library))(1) == b"a"


def tokenized(library: Library, token: int) -> bytes:
    return str(library.decode([token])).encode()
