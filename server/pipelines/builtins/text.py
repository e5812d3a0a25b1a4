"""Text to token numbers, with the tokenizers library (the extra ``text``) and a version's own ``tokenizer.json``.

The library holds the interpreter's lock while it parses, half a second for 250,000 words, and what is in the file
decides how long a text takes. So all of it happens in a process of its own; see tokenizing.py.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import numpy as np
from pydantic import Field

from server.children import Limits
from server.datatypes import pack_strings, to_bytes
from server.errors import BadRequest
from server.pipelines.builtins.base import HostStep, Options, Request
from server.pipelines.definition import BadPipeline
from server.pipelines.helper import Answer, Beyond, Helper, Refused
from server.types import Array, Tensors, TensorSpec

if find_spec("tokenizers") is None:
    raise ModuleNotFoundError("tokenizers", name="tokenizers")

_LARGEST = 64 << 20  # bytes of tokenizer.json
_MODULE = "server.pipelines.tokenizing"
_PARSING = Limits(seconds=30.0, memory=2 << 30)
_ENCODING = Limits(seconds=10.0, memory=2 << 30)
_NAMES = ("input_ids", "attention_mask", "token_type_ids")


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
    arguments = [str(options.max_length), str(options.multiple)]
    try:
        helper = Helper(_MODULE, arguments, request.open(options.file, _LARGEST), _PARSING, _ENCODING)
    except Refused as error:
        raise BadPipeline(f"file {options.file!r}: it does not read as a tokenizer: {error}") from error
    except Beyond as error:
        raise BadPipeline(f"file {options.file!r}: cannot be read: {error}") from error
    return Tokenize(helper, options.max_bytes)


class Tokenize(HostStep):
    """Has a process run a tokenizer."""

    def __init__(self, helper: Helper, max_bytes: int) -> None:
        super().__init__(
            [TensorSpec("text", "BYTES", (-1, 1))], [TensorSpec(name, "INT64", (-1, -1)) for name in _NAMES]
        )
        self._helper = helper
        self._max_bytes = max_bytes

    @property
    def memory_bytes(self) -> int:
        """What the process has in memory."""
        return self._helper.memory_bytes

    may_not_end = True  # at least not while anybody waits for it

    def runs(self) -> dict[int, int]:
        """Return the run of each thread that the process works for."""
        return self._helper.runs()

    def interrupt(self, run: int | None = None) -> None:
        """Have a run end, or all of them."""
        self._helper.interrupt(run)

    def execute(self, inputs: Tensors) -> Tensors:
        """Encode the rows; raises BadRequest naming one that is not UTF-8 or too long, or where they take too long."""
        (outcome,) = self.execute_each([inputs])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def execute_each(self, requests: list[Tensors]) -> list[Tensors | Exception]:
        """Return what `execute` would for each; the process gets all of them at once."""
        packed = [self._packed(inputs["text"]) for inputs in requests]
        answers = iter(self._helper.ask([one for one in packed if isinstance(one, bytes)]))
        return [one if isinstance(one, Exception) else _read(next(answers)) for one in packed]

    def _packed(self, texts: Array) -> bytes | BadRequest:
        try:
            for row, item in enumerate(texts.ravel().tolist()):
                self._check(row, to_bytes(item))
        except BadRequest as error:
            return error
        return pack_strings(texts)

    def _check(self, row: int, data: bytes) -> None:
        if len(data) > self._max_bytes:
            raise BadRequest(f"text {row}: expected at most {self._max_bytes} bytes, got {len(data)}")
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise BadRequest(f"text {row}: not UTF-8: {error.reason} at byte {error.start}") from error

    def close(self) -> None:
        """End the process."""
        self._helper.close()


def _read(answer: Answer) -> Tensors | Exception:
    if isinstance(answer, Beyond):
        return BadRequest(f"text: {answer} to tokenize")
    if isinstance(answer, Exception):
        return answer
    rows, length = np.frombuffer(answer, np.int64, 2).tolist()
    columns = np.frombuffer(answer, np.int64, offset=16).reshape(len(_NAMES), rows, length)
    return dict(zip(_NAMES, columns, strict=True))
