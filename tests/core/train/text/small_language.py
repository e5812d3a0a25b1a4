"""A small data set of documents, and trainings on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = (
    "the server",
    "a model",
    "the batcher",
    "one kernel",
    "loads",
    "runs",
    "drops",
    "two rows",
    "a cache.",
    "a plan.",
)
DECODER = {"architecture": "decoder", "layers": 1, "width": 16, "heads": 2}
OPTIMIZER = {"kind": "adamw", "rate": 0.01}


def write_documents(folder: Path, count: int = 12) -> Path:
    """A folder of text files, each with words in an order of its own."""
    folder.mkdir()
    for number in range(count):
        words = [WORDS[(number * 7 + place * place) % len(WORDS)] for place in range(12)]
        (folder / f"{number:02}.txt").write_text(" ".join(words))
    return folder


def recipe(**changes: Any) -> dict[str, Any]:
    """The recipe of a decoder of characters, with changes."""
    text = {"length": 16, "tokenizer": "characters"}
    return {"model": DECODER, "optimizer": OPTIMIZER, "epochs": 2, "batch": 8, "text": text, **changes}
