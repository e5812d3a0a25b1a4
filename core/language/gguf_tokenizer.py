"""Makes a tokenizer from the vocabulary and the merges in a GGUF file.

Byte-level BPE (Radford et al., 2019) with the rules that split texts into words before merging, which GGUF files name
only: `tokenizer.ggml.pre`. The rules are those of `llama-vocab.cpp` in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lathe.core.errors import ModelError
from lathe.core.language.document import Document
from lathe.core.language.gguf import GgufFile
from lathe.core.language.tokenizer import Tokenizer, tokenizers_library

_CONTROL, _USER_DEFINED = 3, 4  # types of tokens that texts contain whole, and merges do not make

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split_by(pattern: str) -> Callable[[Any], list[Any]]:
    return lambda library: [
        library.pre_tokenizers.Split(library.Regex(pattern), "isolated"),
        library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _gpt2_words(library: Any) -> list[Any]:
    return [library.pre_tokenizers.ByteLevel(add_prefix_space=False)]


def _single_digits(library: Any) -> list[Any]:
    return [library.pre_tokenizers.Digits(individual_digits=True), *_gpt2_words(library)]


PRE_TOKENIZERS: dict[str, Callable[[Any], list[Any]]] = {
    "gpt-2": _gpt2_words,
    "smollm": _single_digits,
    "llama-bpe": _split_by(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"),
    "qwen2": _split_by(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"),
}
_WHOLE_WORDS = {"llama-bpe"}  # a word that is a token is not built by merges


def make_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer of a GGUF file.

    UnsupportedError for another kind than byte-level BPE, or if the library tokenizers is missing. ModelError for a
    vocabulary whose parts are missing, or do not fit each other.
    """
    library = tokenizers_library(file.name)
    fields = Document(file.name, file.metadata, "tokenizer.ggml.")
    fields.choice("model", ("gpt2",))
    pre = fields.choice("pre", list(PRE_TOKENIZERS))
    tokens, merges = (_texts(fields, name) for name in ("tokens", "merges"))
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    ids = {token: index for index, token in enumerate(tokens)}
    try:
        made = library.Tokenizer(library.models.BPE(ids, pairs, ignore_merges=pre in _WHOLE_WORDS))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the Rust library is a BaseException
        raise ModelError(f"expected a vocabulary and merges: {str(error)[:200]}", where=file.name) from None
    made.pre_tokenizer = library.pre_tokenizers.Sequence(PRE_TOKENIZERS[pre](library))
    made.decoder = library.decoders.ByteLevel()
    made.add_special_tokens(_whole_tokens(library, fields, tokens, _CONTROL))
    made.add_tokens(_whole_tokens(library, fields, tokens, _USER_DEFINED))
    if fields.flag("add_bos_token", False):
        _put_first(library, made, tokens, _token(fields, "bos_token_id", len(tokens)))
    ends = [_token(fields, name, len(tokens)) for name in ("eos_token_id", "eot_token_id") if fields.has(name)]
    return Tokenizer(made, tuple(dict.fromkeys(ends)))


def _texts(fields: Document, name: str) -> list[str]:
    found = fields.get(name)
    if not isinstance(found, list):
        raise fields.error(name, "a list of strings", found)
    return found


def _whole_tokens(library: Any, fields: Document, tokens: Sequence[str], kind: int) -> list[Any]:
    """The tokens of this type in the array `token_type`, as tokens that texts contain whole."""
    kinds = fields.get("token_type")
    if kinds is None:
        return []
    if not isinstance(kinds, np.ndarray) or len(kinds) != len(tokens):
        raise fields.error("token_type", f"{len(tokens)} numbers", kinds)
    chosen = [token for token, each in zip(tokens, kinds.tolist(), strict=True) if each == kind and token]
    return [library.AddedToken(token, special=kind == _CONTROL, normalized=False) for token in chosen]


def _token(fields: Document, name: str, count: int) -> int:
    found = fields.get(name)
    if type(found) is not int or not 0 <= found < count:
        raise fields.error(name, f"a token below {count}", found)
    return found


def _put_first(library: Any, made: Any, tokens: Sequence[str], token: int) -> None:
    """Make the tokenizer begin each text with this token."""
    begin = (tokens[token], token)
    made.post_processor = library.processors.TemplateProcessing(
        single=[begin[0], "$A"], pair=[begin[0], "$A", begin[0], "$B:1"], special_tokens=[begin]
    )
