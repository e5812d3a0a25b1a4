"""`TokenExamples`: documents packed into rows of tokens, each with the tokens that follow as its target.

The tokens are in a temporary file without a name, mapped into memory: 4 bytes of disk for each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO

import numpy as np

from lathe.core.ir.types import DType
from lathe.core.train.data.dataset import Column, Dataset, Rows, Values
from lathe.core.train.data.examples import TARGET, Examples
from lathe.core.train.data.features import Feature
from lathe.core.train.data.splits import Split, split
from lathe.core.train.text.encoding import Tokens, encoded
from lathe.core.train.text.language import Language
from lathe.core.train.training_step.losses import IGNORED

INPUT = "input_ids"
_PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class TokenSource:
    """Rows of `length` tokens from a stream, int64. With `following`, each token's target: the token after it.

    A target that does not count is -100.
    """

    column: Column
    stream: Tokens
    following: bool = False

    def __len__(self) -> int:
        return (len(self.stream) - 1) // self.column.shape[0]

    def take(self, rows: Rows) -> Values:
        length = self.column.shape[0]
        places = rows[:, None] * length + np.arange(length) + int(self.following)
        tokens = self.stream[places].astype(np.int64)
        return np.where(tokens < 0, IGNORED if self.following else ~tokens, tokens)


@dataclass(frozen=True)
class TokenExamples(Examples):
    """Rows of tokens: the input `input_ids` and the target are int64 [length]; the target is the tokens that follow.

    `vocabulary` is the number of logits for each token.
    """

    vocabulary: int
    following: TokenSource

    def take(self, rows: Rows) -> dict[str, Values]:
        """A batch: `input_ids` and `target`, int64 [rows, length]."""
        return {INPUT: self.features[INPUT].take(self.dataset, rows), TARGET: self.following.take(rows)}


def split_documents(dataset: Dataset, held_out: float, validation: float, seed: int) -> Split:
    """The split of documents into training, validation and test.

    DataError if a share that is not 0 gives no document.
    """
    none = Examples(dataset, {}, Column(TARGET, DType.FLOAT32, (0,)), np.zeros((len(dataset), 0), np.float32))
    parts = split(none, held_out, validation, False, seed)
    for name, share, rows in (("held_out", held_out, parts.test), ("validation", validation, parts.validation)):
        if share and not len(rows):
            raise dataset.error(f"{name} is {share}, which is no document of {len(dataset)}: expected more documents")
    return parts


def pack(dataset: Dataset, documents: Split, length: int, language: Language) -> TokenExamples:
    """The documents, one after the other within each part, in rows of `length` tokens; the last row is padded.

    A token may see the documents before it in its row. DataError for a conversation that the chat template refuses.
    """
    with tempfile.TemporaryFile() as file:
        ends = [0]
        for part in _PARTS:
            count = _write(file, encoded(dataset, getattr(documents, part), language), length, language.end)
            ends.append(ends[-1] + count // length)
        np.array([~language.end], np.int32).tofile(file)  # follows the last row
        file.flush()
        stream = np.memmap(file, np.int32, "r", shape=(ends[-1] * length + 1,))
    largest = language.settings.vocabulary
    if (found := _largest(stream)) >= largest:
        raise dataset.error(f"the tokenizer gives token {found}, but the model has {largest} tokens")
    column = Column(INPUT, DType.INT64, (length,))
    source = TokenSource(column, stream)
    rows = {part: range(*ends[index : index + 2]) for index, part in enumerate(_PARTS)}
    packed = Dataset(dataset.name, {INPUT: source}, lambda: dataset.digest, dataset.format, rows)
    target = Column(TARGET, DType.INT64, (length,))
    following = TokenSource(target, stream, following=True)
    feature = Feature(column, tuple(dataset.columns), source)
    return TokenExamples(packed, {INPUT: feature}, target, np.zeros(0, np.int64), largest, following)


def _write(file: IO[bytes], documents: Iterable[Tokens], length: int, end: int) -> int:
    """Append a part's tokens, padded to whole rows; returns their number.

    No token precedes the first one, so it does not count: in the stream the part before precedes it.
    """
    count = 0
    for tokens in documents:
        if not count and len(tokens):
            tokens = np.concatenate([np.minimum(tokens[:1], ~tokens[:1]), tokens[1:]])
        tokens.astype(np.int32).tofile(file)
        count += len(tokens)
    padding = -count % length
    np.full(padding, ~end, np.int32).tofile(file)
    return count + padding


def _largest(stream: Tokens) -> int:
    """The largest token, read 4 MiB at a time."""
    chunks = (stream[start : start + (1 << 20)] for start in range(0, len(stream), 1 << 20))
    return max(int(np.maximum(chunk, ~chunk).max()) for chunk in chunks)
