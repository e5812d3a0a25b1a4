"""Tokenizes text, with the tokenizers library (the extra `text`) and the version's `tokenizer.json`.

The library holds the interpreter's lock while it parses, half a second for 250,000 words, and the file determines how
long a text takes. So it runs in its own process; see `tokenizer_process`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Annotated

import numpy as np
from pydantic import Field

from lathe.server.datatypes import pack_strings, to_bytes
from lathe.server.errors import BadRequest
from lathe.server.pipelines.builtins.base import HostStep, Options, StepRequest
from lathe.server.pipelines.definition import DEFAULT_FILES, BadPipeline
from lathe.server.pipelines.step_process import Answer, InvalidFile, LimitExceeded, StepProcess
from lathe.server.processes.stage_children import Limits
from lathe.server.types import Tensors, TensorSpec

if find_spec("tokenizers") is None:
    raise ModuleNotFoundError("tokenizers", name="tokenizers")

_MAX_FILE_BYTES = 64 << 20  # bytes of tokenizer.json
_MODULE = "lathe.server.pipelines.tokenizer_process"
_MULTIPLE = 16  # tokens: requests of similar lengths share batches, and few lengths need code of their own
_PARSING = Limits(seconds=30.0, memory=2 << 30)
_ENCODING = Limits(seconds=10.0, memory=2 << 30)
_NAMES = ("input_ids", "attention_mask", "token_type_ids")
_TOKENS = "tokens"
_LIMITS = "limits"  # of a request, besides its texts: INT64 [2], see `Tokenize.limited`


class TokenizeOptions(Options):
    """Options of `tokenize`."""

    file: str = DEFAULT_FILES["tokenize"]
    max_length: Annotated[int, Field(ge=1, le=1 << 20)] = 512  # tokens; longer texts are truncated
    # Lengths are padded to a multiple of this number. Default: 1 if all steps that read tokens pack, otherwise 16.
    multiple: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    max_bytes: Annotated[int, Field(ge=1)] = 1 << 16  # bytes of one text


def tokenize(request: StepRequest) -> Tokenize:
    """The step `text` BYTES [n, 1] -> `input_ids`, `attention_mask`, `token_type_ids` INT64 [n, length].

    And `tokens` INT64 [n, 1], the number of tokens of each text.

    The length is that of the request's longest text, padded to a multiple but to at most `max_length`, so that requests
    of similar lengths share a batch of the next step. The mask is 1 for tokens and 0 for padding. Raises BadPipeline.
    """
    return _start(request, ("text",))


def tokenize_pair(request: StepRequest) -> Tokenize:
    """The step `text` and `pair` BYTES [n, 1] -> the outputs of `tokenize`, of both texts together.

    The tokenizer's template joins the two texts and numbers them in `token_type_ids`, as cross-encoders take them. If
    they have too many tokens, the longer one is truncated first. Raises BadPipeline.
    """
    return _start(request, ("text", "pair"))


def _start(request: StepRequest, texts: Sequence[str]) -> Tokenize:
    options = request.read(TokenizeOptions)
    arguments = [str(options.max_length), str(options.multiple or _MULTIPLE), str(len(texts))]
    try:
        helper = StepProcess(_MODULE, arguments, request.open(options.file, _MAX_FILE_BYTES), _PARSING, _ENCODING)
    except InvalidFile as error:
        raise BadPipeline(f"file {options.file!r}: not a valid tokenizer: {error}") from error
    except LimitExceeded as error:
        raise BadPipeline(f"file {options.file!r}: cannot be read: {error}") from error
    return Tokenize(helper, options, texts)


class Tokenize(HostStep):
    """Runs a tokenizer in a child process."""

    def __init__(self, helper: StepProcess, options: TokenizeOptions, texts: Sequence[str]) -> None:
        """`texts`: the names of the inputs, whose texts form one row together."""
        super().__init__(
            [TensorSpec(name, "BYTES", (-1, 1)) for name in texts],
            [*(TensorSpec(name, "INT64", (-1, -1)) for name in _NAMES), TensorSpec(_TOKENS, "INT64", (-1, 1))],
        )
        self._helper = helper
        self._max_bytes = options.max_bytes
        self._max_length = options.max_length
        self._has_free_multiple = options.multiple is None

    @property
    def truncations(self) -> range:
        """The numbers of tokens to which a request may have its texts truncated: special tokens are never left out."""
        return range(max(int(self._helper.greeting), 1), self._max_length + 1)

    def limited(self, inputs: Tensors, most: int, packed: bool) -> Tensors:
        """The inputs of `execute` with which texts have at most `most` tokens, which is 0 or in `truncations`.

        0: `max_length`. `packed`: the steps that read the tokens pack, so they are padded only as far as the options
        ask for it.
        """
        multiple = 1 if packed and self._has_free_multiple else 0
        return {**inputs, _LIMITS: np.array([most, multiple])} if most or multiple else inputs

    @staticmethod
    def token_count(outputs: Tensors) -> int:
        """The number of tokens of a request's texts, from the outputs of the step."""
        return int(outputs[_TOKENS].sum())

    @property
    def memory_bytes(self) -> int:
        """The resident memory of the child process, in bytes."""
        return self._helper.memory_bytes

    may_not_end = True  # a text may take very long, so runs can be interrupted

    def runs(self) -> dict[int, int]:
        """Return {id of the thread that uses the process now: number of its run}; empty if no thread uses it."""
        return self._helper.runs()

    def interrupt(self, run: int | None = None) -> None:
        """Interrupt run number `run`, or the present one."""
        self._helper.interrupt(run)

    def execute(self, inputs: Tensors) -> Tensors:
        """Tokenize the rows; raises BadRequest for a row that is not UTF-8 or too long, or if a limit is exceeded.

        Raises ExecutionInterrupted after `interrupt`, and Internal if the process fails.
        """
        (outcome,) = self.execute_each([inputs])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def execute_each(self, requests: list[Tensors]) -> list[Tensors | Exception]:
        """Return the outputs or the error of each request; the process gets all valid requests together.

        Raises ExecutionInterrupted after `interrupt`, and Internal if the process cannot be started.
        """
        packed = [self._pack(inputs) for inputs in requests]
        answers = iter(self._helper.ask([one for one in packed if isinstance(one, bytes)]))
        return [one if isinstance(one, Exception) else _unpack_answer(next(answers)) for one in packed]

    def _pack(self, inputs: Tensors) -> bytes | BadRequest:
        """The limits and the texts of a request, row by row."""
        try:
            for spec in self.inputs:
                for row, item in enumerate(inputs[spec.name].ravel().tolist()):
                    self._check(f"{spec.name} {row}", to_bytes(item))
        except BadRequest as error:
            return error
        limits = inputs[_LIMITS].tolist() if _LIMITS in inputs else (0, 0)
        texts = pack_strings(np.concatenate([inputs[spec.name] for spec in self.inputs], axis=1))
        return struct.pack("<II", *limits) + texts

    def _check(self, name: str, data: bytes) -> None:
        if len(data) > self._max_bytes:
            raise BadRequest(f"{name}: expected at most {self._max_bytes} bytes, got {len(data)}")
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise BadRequest(f"{name}: not UTF-8: {error.reason} at byte {error.start}") from error

    def close(self) -> None:
        """End the process."""
        self._helper.close()


def _unpack_answer(answer: Answer) -> Tensors | Exception:
    if isinstance(answer, LimitExceeded):
        return BadRequest(f"text: {answer} to tokenize")
    if isinstance(answer, Exception):
        return answer
    rows, length = np.frombuffer(answer, np.int64, 2).tolist()
    columns = np.frombuffer(answer, np.int64, offset=16).reshape(len(_NAMES), rows, length)
    return {**dict(zip(_NAMES, columns, strict=True)), _TOKENS: columns[1].sum(axis=1, keepdims=True)}
