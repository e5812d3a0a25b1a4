"""Files of a pipeline's step are parsed in a process of that step; a refused file leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from lathe.server.access.authority import Authority
from lathe.server.errors import Unprocessable
from lathe.server.serving.dataplane import DataPlane
from lathe.server.types import InferRequest
from tests.server.repository.test_pipelines import packed
from tests.server.repository.world import run, world

WORDS = """
inputs = ["text"]
outputs = ["input_ids"]

[[step]]
name = "words"
builtin = "tokenize"
inputs = {text = "text"}
outputs = {input_ids = "input_ids"}
"""


def tokenizer() -> bytes:
    made = Tokenizer(models.WordLevel({"one": 0, "two": 1}, unk_token="one"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return bytes(made.to_str(), "utf-8")


def children() -> set[str]:
    """The children of this process, on all threads."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


def test_a_step_has_a_process_while_it_is_loaded(tmp_path: Path) -> None:
    async def scenario() -> None:
        before = children()
        async with world(tmp_path) as w:
            with pytest.raises(Unprocessable, match=r"step 'words': file 'tokenizer.json': not a valid tok"):
                await w.push(packed(WORDS, **{"tokenizer.json": b'{"version": "1.0", "model": {}}'}), "words")
            assert children() == before
            await w.push(packed(WORDS, **{"tokenizer.json": tokenizer()}), "words")
            assert len(children() - before) == 1
            plane = DataPlane(w.registry, Authority("127.0.0.1"))
            answer = await plane.infer(InferRequest("words", {"text": np.array([[b"one two"]], object)}))
            assert answer.outputs["input_ids"][0, :2].tolist() == [0, 1]
            await w.rollout.unload("words")
            assert children() == before

    run(scenario())
