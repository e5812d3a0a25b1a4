"""Decoders of each family against the results of Transformers, which `make_transformers.py` records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lathe
from lathe import nn
from lathe.core.ir.graph import Graph
from lathe.core.train import step
from lathe.core.train.training_step.losses import CrossEntropy
from lathe.core.train.training_step.optimizers import SGD
from tests.core.language.checkpoints import IDS, IN_GGUF, NEW, PROMPT, RATE, STEPS
from tests.core.language.families import EXPECTED, FAMILIES, IN_NATIVE_CODE, MOSTLY_SLOW, gguf_content, write_folder
from tests.onnx_runtime import plain_session


def graph_of(path: Path) -> Graph:
    return lathe.load_language_model(path).graph


def assert_logits(found: Any, name: str) -> None:
    expected = EXPECTED[f"{name}/logits"]
    np.testing.assert_allclose(found, expected, 1e-4, 1e-4 * np.abs(expected).max(), err_msg=name)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_a_folder(tmp_path: Path, name: str) -> None:
    (found,) = lathe.interpret(graph_of(write_folder(tmp_path, name)), {"input_ids": IDS}).values()
    assert_logits(found, name)


@pytest.mark.parametrize("name", IN_GGUF)
def test_logits_of_a_gguf_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf_content(name))
    (found,) = lathe.interpret(graph_of(tmp_path / "model.gguf"), {"input_ids": IDS}).values()
    assert_logits(found, name)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", IN_NATIVE_CODE)
def test_native_code_gives_the_same_greedy_tokens(tmp_path: Path, name: str) -> None:
    graph = graph_of(write_folder(tmp_path, name))
    with lathe.compile(graph, threads=1, tune="off", new_shapes="wait") as session:
        assert_logits(session.run({"input_ids": IDS})["logits"], name)
        tokens = list(PROMPT)
        for _ in range(NEW):
            tokens.append(int(session.run({"input_ids": np.array([tokens])})["logits"][0, -1].argmax()))
        assert tokens == EXPECTED[f"{name}/tokens"].tolist()
        assert "0 on the reference" in session.explain()
        assert not session._shapes.cached_runners(), "dynamic-shape code serves every length"
        assert session.batching.batchable, session.batching.reason


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MOSTLY_SLOW)
def test_sequences_of_any_length_share_a_packed_run(tmp_path: Path, name: str) -> None:
    """Packed runs give each sequence the logits that it gets alone."""
    sequences = ((0, 21), (1, 5), (1, 21), (0, 1))  # rows of IDS, and how many of their tokens
    with lathe.compile(graph_of(write_folder(tmp_path, name)), threads=1, tune="off", packing=64) as session:
        assert session.packing is not None
        assert session.packing.packable, session.packing.reason
        answers = session.run_packed([{"input_ids": IDS[row : row + 1, :length]} for row, length in sequences])
        for (row, length), answer in zip(sequences, answers, strict=True):
            expected = EXPECTED[f"{name}/logits"][row, :length]
            np.testing.assert_allclose(answer["logits"][0], expected, 1e-4, 1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", FAMILIES)
def test_onnx_runtime_runs_the_exported_graph(tmp_path: Path, name: str) -> None:
    model = lathe.export(graph_of(write_folder(tmp_path, name)))
    (found,) = plain_session(model).run(None, {"input_ids": IDS})
    assert_logits(found, name)


class NextToken(nn.Module):
    """The logits of all tokens but the first, as the loss reads them: [batch, vocabulary, length - 1]."""

    def __init__(self, decoder: nn.Module) -> None:
        self.decoder = decoder

    def forward(self, ids: nn.Tensor) -> nn.Tensor:
        logits: nn.Tensor = self.decoder(ids)
        return logits[:, :-1].transpose(1, 2)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MOSTLY_SLOW)
def test_training_gives_the_losses_of_pytorch(tmp_path: Path, name: str) -> None:
    model = lathe.load_language_model(write_folder(tmp_path, name))
    graph = nn.trace(NextToken(model.module), {"input_ids": "int64[n,21]"})
    learner = step(graph, CrossEntropy(), SGD(RATE), threads=1)
    found = [learner.run({"input_ids": IDS, "target": IDS[:, 1:]})["loss"] for _ in range(STEPS)]
    np.testing.assert_allclose(found, EXPECTED[f"{name}/losses"], 1e-4)
