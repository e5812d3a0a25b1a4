"""Files with random damage load or raise a LatheError, in bounded memory."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.errors import LatheError
from lathe.core.language.gguf import read_gguf
from lathe.core.language.safetensors import read_safetensors
from tests.core.language.checkpoints import gguf_parts
from tests.core.language.families import config, weights, write_folder
from tests.core.language.gguf_writer import floats, gguf_bytes
from tests.core.language.test_tokenizer import vocabulary

NUMBERS = (0, 1, 255, 1 << 16, (1 << 31) - 1, 1 << 32, (1 << 40) + 1, 1 << 62, 1 << 63, (1 << 64) - 1)
MEMORY = 1 << 25  # bytes; the files have 300 KB, of which metadata may become objects of up to 10 times their size


def damaged(content: bytes, seed: int, head: int) -> bytes:
    """The content after one to three random changes, mostly in the first `head` bytes."""
    rng, data = np.random.default_rng(seed), bytearray(content)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, min(head, len(data)) if rng.random() < 0.9 else len(data)))
        match rng.integers(0, 6):
            case 0:
                data[at] ^= 1 << int(rng.integers(0, 8))
            case 1:
                data[at : at + 8] = int(rng.choice(len(NUMBERS))).to_bytes(1, "little") * 8
            case 2:
                data[at : at + 8] = NUMBERS[int(rng.integers(0, len(NUMBERS)))].to_bytes(8, "little")
            case 3:
                del data[at : at + int(rng.integers(1, 40))]
            case 4:
                data[at:at] = data[at : at + int(rng.integers(1, 40))]
            case _:
                del data[max(at, 1) :]
    return bytes(data)


@contextmanager
def bounded_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MEMORY


def gguf_model() -> bytes:
    """A GGUF file of a small decoder with a tokenizer."""
    metadata, arrays = gguf_parts(config("llama"), weights("llama"))
    return gguf_bytes(metadata | vocabulary(), {key: floats(array) for key, array in arrays.items()})


def read_all(path: Path) -> None:
    """Load a model and use all of it."""
    model = lathe.load_language_model(path)
    assert model.tokenizer.encode("a text") is not None
    assert model.graph.outputs


def refusal(action: Callable[[Path], object], path: Path) -> str | None:
    """The message of the LatheError that an action raises; None if it succeeds."""
    try:
        action(path)
    except LatheError as error:
        return str(error)
    return None


MORE = pytest.param(range(200, 4000), marks=[pytest.mark.slow, pytest.mark.timeout(900)])
SEEDS = pytest.mark.parametrize("seeds", [range(200), MORE], ids=["some", "more"])


@SEEDS
def test_damaged_gguf_files(tmp_path: Path, seeds: range) -> None:
    content, path, loaded = gguf_model(), tmp_path / "model.gguf", 0
    head = len(content) - sum(array.nbytes for array in weights("llama").values())
    path.write_bytes(content)
    read_all(path)
    for seed in seeds:
        path.write_bytes(damaged(content, seed, head))
        with bounded_memory():
            message = refusal(read_gguf, path)
            loaded += message is None
            if message is None and seed % 5 == 0:
                message = refusal(read_all, path)
        assert message is None or re.match("model.gguf: |llama: |tensor '", message), seed
    assert 0.05 < loaded / len(seeds) < 0.95, "the damage is neither always nor never found"


@SEEDS
def test_damaged_safetensors_files(tmp_path: Path, seeds: range) -> None:
    path = write_folder(tmp_path, "qwen3") / "model.safetensors"
    content, loaded = path.read_bytes(), 0
    head = 8 + int.from_bytes(content[:8], "little")
    for seed in seeds:
        path.write_bytes(damaged(content, seed, head))
        with bounded_memory():
            message = refusal(read_safetensors, path)
            loaded += message is None
            message = message or refusal(lathe.load_language_model, tmp_path)
        assert message is None or "model.safetensors" in message, seed
    assert 0.02 < loaded / len(seeds) < 0.95, "the damage is neither always nor never found"


VALUES: tuple[Any, ...] = (None, -1, 0, 3, 1 << 23, 1 << 70, 0.5, 1e308, -0.1, True, "x", [], [1], {}, {"x": 1})


def traced(folder: Path) -> None:
    assert lathe.load_language_model(folder).graph.outputs


# Fields that decide nothing about the decoder.
UNREAD = {
    "architectures", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "pad_token_id", "use_cache",
    "transformers_version", "attention_dropout", "pretraining_tp", "attn_pdrop", "embd_pdrop", "resid_pdrop",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "reorder_and_upcast_attn", "add_cross_attention", "output_router_logits", "router_aux_loss_coef",
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["llama-tied", "qwen2-window", "qwen2-moe", "gpt2"])
def test_damaged_configurations(tmp_path: Path, name: str) -> None:
    """Every field gets every kind of value."""
    path, good, loaded = write_folder(tmp_path, name) / "config.json", config(name), 0
    for field in good.keys() - UNREAD:
        for value in VALUES:
            path.write_text(json.dumps({**good, field: value}))
            message = refusal(traced, tmp_path)
            loaded += message is None
            where = r"(config\.json|model\.safetensors|llama|qwen2|qwen2_moe|gpt2): "
            assert message is None or re.match(where, message), (field, value)
    assert loaded
