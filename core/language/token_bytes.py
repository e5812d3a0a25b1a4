"""`TokenBytes`: the bytes that a token adds to a text. A character may consist of several tokens' bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from lathe.core.language.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a token for a byte in vocabularies of SentencePiece
_OF_WHOLE_TEXTS = {"Fuse", "Strip"}  # steps of a decoder that leave the bytes of a token inside a text alone


class TokenBytes:
    """The bytes of the tokens of a tokenizer: of the model's text, with a space before a word where the token has one.

    Decoders are read that map characters to bytes (`ByteLevel`: Radford et al., 2019), or replace characters and have
    tokens for bytes, as SentencePiece. With another decoder the bytes are those of the token's decoded text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added: Mapping[int, Any] = tokenizer.library.get_added_tokens_decoder()
        self._steps = _steps(tokenizer.library.decoder)

    def is_special(self, token: int) -> bool:
        """Whether texts do not show this token."""
        return token in self._added and bool(self._added[token].special)

    def __call__(self, token: int) -> bytes:
        """The bytes of a token; those of a special token are its name. Empty for a number without a token."""
        if token in self._added:
            return str(self._added[token].content).encode()
        piece = self._tokenizer.library.id_to_token(token)
        if piece is None:
            return b""
        if not self._steps:
            return self._tokenizer.decode([token], special=True).encode()
        for step in self._steps:
            match step:
                case {"type": "ByteLevel"}:
                    return _from_characters(piece)
                case {"type": "ByteFallback"} if (found := _BYTE.fullmatch(piece)) is not None:
                    return bytes([int(found[1], 16)])
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    piece = piece.replace(old, new)
                case {"type": "Metaspace", "replacement": str(old)}:
                    piece = piece.replace(old, " ")
        return str(piece).encode()


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """The steps of a decoder of the library that change bytes; none if there is another one, or no decoder."""
    if decoder is None:
        return []
    found = json.loads(decoder.__getstate__())
    steps = found["decoders"] if found["type"] == "Sequence" else [found]
    steps = [step for step in steps if step["type"] not in _OF_WHOLE_TEXTS]
    return steps if all(_is_read(step) for step in steps) else []


def _is_read(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Replace":
        return "String" in step["pattern"]
    return step["type"] in {"ByteLevel", "ByteFallback", "Metaspace"}


def _from_characters(piece: str) -> bytes:
    numbers = [_byte_numbers().get(character) for character in piece]
    known = [number for number in numbers if number is not None]
    return bytes(known) if len(known) == len(numbers) else piece.encode()


@cache
def _byte_numbers() -> dict[str, int]:
    """The byte of each character of byte-level tokens: printable ones of Latin-1 are themselves, others follow 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
