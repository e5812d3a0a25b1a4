"""Text to token ids and back, by the library `tokenizers` (the extra `text`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lathe.core.errors import ModelError, UnsupportedError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer: `library` is the object of the library `tokenizers`, `ends` are the tokens that end an answer."""

    library: Library
    ends: tuple[int, ...] = ()

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The token ids of a text. `special`: add the tokens that the tokenizer puts before and after each text.

        Special tokens that the text itself contains, such as those of a chat template, become one token each.
        """
        return list(self.library.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of token ids. `special`: keep special tokens."""
        return str(self.library.decode(list(ids), skip_special_tokens=not special))


def parse_tokenizer(content: bytes, where: str) -> Library:
    """The tokenizer in a `tokenizer.json`.

    ModelError if the library cannot read it. UnsupportedError if the library is missing.
    """
    library = tokenizers_library(where)
    try:
        return library.Tokenizer.from_buffer(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the Rust library is a BaseException
        raise ModelError(f"expected a tokenizer: {str(error)[:200]}", where=where) from None


def tokenizers_library(where: str) -> Any:
    """The module `tokenizers`. UnsupportedError if it is not installed."""
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise UnsupportedError("needs the library tokenizers: install the extra 'text'", where=where) from None
    return tokenizers
