"""Makes a tokenizer from the vocabulary in a GGUF file: byte-level BPE, or the pieces of SentencePiece with scores.

For byte-level BPE a file has the merges, and names the rules that split texts into words before (`tokenizer.ggml.pre`).
The rules are those of `llama-vocab.cpp` in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import ModelError
from lathe.core.language.document import Document
from lathe.core.language.gguf import GgufFile
from lathe.core.language.tokenizer import Tokenizer, tokenizers_library

_CONTROL, _USER_DEFINED = 3, 4  # types of tokens that texts contain whole, and merges do not make
_SPACE = "\u2581"
_LONGEST_PIECE = 1024  # characters: 64 times what SentencePiece makes; finding the merges takes quadratic time

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

    UnsupportedError for another kind of vocabulary, or if the library tokenizers is missing. ModelError for a
    vocabulary whose parts are missing, or do not fit each other.
    """
    library = tokenizers_library(file.name)
    fields = Document(file.name, file.metadata, "tokenizer.ggml.")
    kind = fields.choice("model", list(_KINDS))
    tokens = _texts(fields, "tokens")
    try:
        made = _KINDS[kind](library, fields, tokens)
    except (KeyboardInterrupt, SystemExit, ModelError):
        raise
    except BaseException as error:  # a panic of the Rust library is a BaseException
        raise ModelError(f"expected a vocabulary and merges: {str(error)[:200]}", where=file.name) from None
    made.add_special_tokens(_whole_tokens(library, fields, tokens, _CONTROL))
    made.add_tokens(_whole_tokens(library, fields, tokens, _USER_DEFINED))
    if fields.flag("add_bos_token", kind == _SENTENCE_PIECES):
        _put_first(library, made, tokens, _token(fields, "bos_token_id", len(tokens)))
    ends = [_token(fields, name, len(tokens)) for name in ("eos_token_id", "eot_token_id") if fields.has(name)]
    return Tokenizer(made, tuple(dict.fromkeys(ends)))


def _byte_level(library: Any, fields: Document, tokens: Sequence[str]) -> Any:
    """Byte-level BPE (Radford et al., 2019)."""
    pre = fields.choice("pre", list(PRE_TOKENIZERS))
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in _texts(fields, "merges"))]
    ids = {token: index for index, token in enumerate(tokens)}
    made = library.Tokenizer(library.models.BPE(ids, pairs, ignore_merges=pre in _WHOLE_WORDS))
    made.pre_tokenizer = library.pre_tokenizers.Sequence(PRE_TOKENIZERS[pre](library))
    made.decoder = library.decoders.ByteLevel()
    return made


def _sentence_pieces(library: Any, fields: Document, tokens: Sequence[str]) -> Any:
    """BPE over characters (Kudo and Richardson, 2018): the pair whose token has the greatest score is merged first.

    Spaces become U+2581. Characters that no token has become tokens of their bytes in UTF-8.
    """
    scores = fields.get("scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise fields.error("scores", f"{len(tokens)} numbers", scores)
    ids = {token: index for index, token in enumerate(tokens)}
    unknown = tokens[_token(fields, "unknown_token_id", len(tokens))]
    merges = _merges_by_score(fields, ids, scores)
    model = library.models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    made, prefixed = library.Tokenizer(model), fields.flag("add_space_prefix", True)
    normalizers, decoders = library.normalizers, library.decoders
    prefix = [normalizers.Prepend(_SPACE)] if prefixed else []
    made.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    made.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return made


def _merges_by_score(fields: Document, ids: Mapping[str, int], scores: NDArray[Any]) -> list[tuple[str, str]]:
    """The pairs of tokens that make another token, the greatest score first."""
    longest = max(map(len, ids), default=0)
    if longest > _LONGEST_PIECE:
        raise fields.error("tokens", f"tokens of at most {_LONGEST_PIECE} characters", longest)
    order = sorted(ids, key=lambda token: -float(scores[ids[token]]))
    pairs = ((token[:at], token[at:]) for token in order for at in range(1, len(token)))
    return [(left, right) for left, right in pairs if left in ids and right in ids]


_SENTENCE_PIECES = "llama"
_KINDS: dict[str, Callable[[Any, Document, Sequence[str]], Any]] = {
    "gpt2": _byte_level,
    _SENTENCE_PIECES: _sentence_pieces,
}


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
