"""`lathe generate` and `lathe chat` print texts of a model in a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lathe.server.cli.app import app
from tests.server.cli.running import run_lathe
from tests.server.generation.tiny_model import gguf_content, greedy


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_content())
    return path


def test_generate_prints_the_text_of_the_graph(model: Path, tmp_path: Path) -> None:
    text, _ = greedy(tmp_path, "Hello world", 6)
    assert text + "\n" in run_lathe("generate", str(model), "Hello world", "--max-tokens", "6", "--threads", "1")


def test_chat_answers_each_line_with_all_before(model: Path, tmp_path: Path) -> None:
    arguments = ["chat", str(model), "--temperature", "0", "--max-tokens", "4", "--threads", "1"]
    result = CliRunner().invoke(app, arguments, input="Hello\nAgain\n\n")
    assert result.exit_code == 0, result.output
    first, _ = greedy(tmp_path, "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", 4)
    conversation = f"<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{first}<|im_end|>\n"
    second, _ = greedy(tmp_path, f"{conversation}<|im_start|>user\nAgain<|im_end|>\n<|im_start|>assistant\n", 4)
    assert first + "\n" in result.output and second + "\n" in result.output


def test_errors_are_one_line(model: Path, tmp_path: Path) -> None:
    assert "temperature" in run_lathe("generate", str(model), "x", "--temperature", "-1", fails=True)
    model.write_bytes(gguf_content(None))
    result = CliRunner().invoke(app, ["chat", str(model)], input="Hello\n")
    assert result.exit_code == 1 and "no chat template" in result.output
    (tmp_path / "no.gguf").write_bytes(b"GGUF")
    assert "no.gguf" in run_lathe("generate", str(tmp_path / "no.gguf"), "x", fails=True)
