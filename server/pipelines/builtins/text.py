"""Text to token numbers, with the tokenizers library (the extra ``text``) and a version's own ``tokenizer.json``."""

from __future__ import annotations

import os
from typing import Annotated

import numpy as np
from pydantic import Field

from server.datatypes import to_bytes
from server.errors import BadRequest, Internal
from server.pipelines.builtins.base import HostStep, Options, Request
from server.pipelines.definition import BadPipeline
from server.types import Array, Tensors, TensorSpec

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the server's workers are the parallelism
from tokenizers import Encoding, Tokenizer

_LARGEST = 64 << 20  # bytes of tokenizer.json


class TokenizeOptions(Options):
    """How text becomes numbers."""

    file: str = "tokenizer.json"
    max_length: Annotated[int, Field(ge=1, le=1 << 20)] = 512  # tokens; what is longer is cut
    multiple: Annotated[int, Field(ge=1, le=1 << 20)] = 16  # lengths are padded to multiples of it
    max_bytes: Annotated[int, Field(ge=1)] = 1 << 16  # of one text


def tokenize(request: Request) -> Tokenize:
    """``text`` BYTES [n, 1] -> ``input_ids``, ``attention_mask``, ``token_type_ids`` INT64 [n, length].

    The length is that of the request's longest text, padded to a multiple, so that requests of like lengths share a
    batch of the next step. The mask is 1 for tokens and 0 for padding.
    """
    options = request.read(TokenizeOptions)
    return Tokenize(_load(request.file(options.file, _LARGEST), options), options)


class Tokenize(HostStep):
    """Runs a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, options: TokenizeOptions) -> None:
        names = ("input_ids", "attention_mask", "token_type_ids")
        super().__init__(
            [TensorSpec("text", "BYTES", (-1, 1))], [TensorSpec(name, "INT64", (-1, -1)) for name in names]
        )
        self._tokenizer = tokenizer
        self._options = options
        self._pad = _padding_of(tokenizer)

    def execute(self, inputs: Tensors) -> Tensors:
        """Encode the rows; raises BadRequest naming one that is not UTF-8 or too long."""
        texts = [self._text(row, to_bytes(item)) for row, item in enumerate(inputs["text"].ravel().tolist())]
        encodings = self._encode(texts)
        length = self._length(encodings)
        return {
            "input_ids": _padded([encoding.ids for encoding in encodings], length, self._pad),
            "attention_mask": _padded([encoding.attention_mask for encoding in encodings], length, 0),
            "token_type_ids": _padded([encoding.type_ids for encoding in encodings], length, 0),
        }

    def _text(self, row: int, data: bytes) -> str:
        if len(data) > self._options.max_bytes:
            raise BadRequest(f"text {row}: expected at most {self._options.max_bytes} bytes, got {len(data)}")
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise BadRequest(f"text {row}: not UTF-8: {error.reason} at byte {error.start}") from error

    def _encode(self, texts: list[str]) -> list[Encoding]:
        try:
            return self._tokenizer.encode_batch(texts)
        except BaseException as error:  # a panic of the library is no Exception, and would end the worker
            _pass_on(error)
            raise Internal(f"the tokenizer failed ({type(error).__name__})") from error

    def _length(self, encodings: list[Encoding]) -> int:
        longest, multiple = max((len(one) for one in encodings), default=1), self._options.multiple
        return min(max(-(-longest // multiple), 1) * multiple, max(self._options.max_length, longest))


def _load(content: bytes, options: TokenizeOptions) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(content)
        tokenizer.no_padding()
        tokenizer.enable_truncation(options.max_length)
    except BaseException as error:
        _pass_on(error)
        raise BadPipeline(f"file {options.file!r}: it does not read as a tokenizer: {str(error)[:200]}") from error
    return tokenizer


def _pass_on(error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
        raise error


def _padding_of(tokenizer: Tokenizer) -> int:
    """Return the token that fills up; which one makes no difference to a model that heeds the mask."""
    found = (tokenizer.token_to_id(token) for token in ("[PAD]", "<pad>"))
    return next((number for number in found if number is not None), 0)


def _padded(rows: list[list[int]], length: int, filler: int) -> Array:
    made = np.full((len(rows), length), filler, np.int64)
    for row, numbers in enumerate(rows):
        made[row, : len(numbers)] = numbers
    return made
