"""Language models behind the interface of the data path, which loads, lists and unloads them as other models."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lathe.server.archive import DRAFT, stored_adapters
from lathe.server.backends.base import MemoryNeeds
from lathe.server.errors import Unprocessable, Unsupported
from lathe.server.fair_slots import FairSlots
from lathe.server.types import Tensors, TensorSpec

if TYPE_CHECKING:
    from lathe.core.language.generation.generator import TextGenerator
    from lathe.core.language.generation.options import GeneratorOptions

PLATFORM = "lathe_language_model"


class TextModel:
    """A LoadedModel that generates texts with `generator`. Inference by tensors is refused."""

    platform = PLATFORM
    inputs = (TensorSpec("prompt", "BYTES", (1,)),)
    outputs = (TensorSpec("text", "BYTES", (1,)),)
    max_batch = 1
    batchable = False
    batch_reason = "the model generates texts: requests to /v1 share its runs"
    may_not_end = True  # texts are cancelled when the model has to leave memory
    last_seconds = 120.0

    def __init__(self, generator: TextGenerator, memory_bytes: int, closed: Callable[[], None] = lambda: None) -> None:
        """`closed` is called when the memory is free."""
        self.generator = generator
        # Of transcriptions: each holds the encoder's results of a piece of sound. Admission bounds those that wait.
        self.slots = FairSlots(generator.sequences, sys.maxsize, "transcriptions")
        self.memory_bytes = memory_bytes
        self.created = int(time.time())  # for the list of models
        self._closed = closed

    def execute(self, inputs: Tensors) -> Tensors:
        raise Unsupported("the model generates texts: expected POST /v1/completions or /v1/chat/completions")

    def runs(self) -> Mapping[int, int]:
        """Return no runs: texts run on a thread of the model's own, which no batch waits for."""
        return {}

    def interrupt(self, run: int | None = None) -> None:
        """End all texts."""
        self.generator.engine.cancel_all()

    def close(self) -> None:
        self.generator.close()
        self._closed()


def language_model_needs(path: Path, options: GeneratorOptions) -> MemoryNeeds:
    """Return the memory of a language model. Raises Unprocessable for a file that cannot be read."""
    from lathe.core.errors import LatheError
    from lathe.core.language.generation.generator import memory_bytes

    try:
        return MemoryNeeds(memory_bytes(path, options, _adapters(path), _draft(path)), 0)
    except LatheError as error:
        raise Unprocessable(str(error)) from error


def load_text_model(path: Path, options: GeneratorOptions, needs: MemoryNeeds, closed: Callable[[], None]) -> TextModel:
    """Load and compile a language model. Raises Unprocessable for a model that Lathe cannot run."""
    from lathe.core.errors import LatheError
    from lathe.core.language.generation.generator import TextGenerator

    try:
        generator = TextGenerator.open(path, options, _adapters(path), _draft(path))
        return TextModel(generator, needs.weights, closed)
    except LatheError as error:
        raise Unprocessable(str(error)) from error


def _adapters(path: Path) -> Mapping[str, tuple[Path, Path]]:
    """Return the files of the adapters beside a model, by name."""
    return stored_adapters(path if path.is_dir() else path.parent)


def _draft(path: Path) -> Path | None:
    """Return the draft model beside a model, None if there is none."""
    file = (path if path.is_dir() else path.parent) / DRAFT
    return file if file.exists() else None
