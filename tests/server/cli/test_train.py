"""`lathe train` from a recipe file to a result, and refused, interrupted and resumed runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lathe.core.frontends.export import export
from lathe.server.cli.app import app
from tests.core.train.models import perceptron
from tests.core.train.small_trainings import RECIPE, kinds, model_bytes, quadrants


def run_lathe(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "200"})


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A recipe and its data."""
    path = tmp_path / "points.json"
    path.write_text(json.dumps(dict(RECIPE)))
    return path, quadrants(tmp_path / "data.npz")


def test_a_recipe_becomes_a_model(tmp_path: Path, files: tuple[Path, Path]) -> None:
    recipe, data = files
    out, curves = tmp_path / "job", tmp_path / "curves"
    result = run_lathe("train", recipe, "--data", data, "--out", out, "--threads", 1, "--tensorboard", curves)
    assert result.exit_code == 0, result.output
    metrics = json.loads((out / "result/metrics.json").read_bytes())["metrics"]
    assert f"{metrics['accuracy']:.4f}" in result.stdout
    assert "epoch 4/4" in result.stdout and "20 steps in" in result.stdout
    assert (out / "result/report.html").stat().st_size > 1000
    assert list(curves.iterdir())
    again = run_lathe("train", recipe, "--data", data, "--out", out)
    assert again.exit_code == 1
    assert "the folder already has a training; --resume continues it" in again.stderr
    resumed = run_lathe("train", recipe, "--data", data, "--out", out, "--resume")
    assert resumed.exit_code == 0 and f"{metrics['accuracy']:.4f}" in resumed.stdout
    recipe.write_text(json.dumps({**RECIPE, "epochs": 5}))
    changed = run_lathe("train", recipe, "--data", data, "--out", out, "--resume")
    assert changed.exit_code == 1 and "a different recipe than" in changed.stderr


def test_fine_tuning_starts_from_a_model_beside_the_recipe(tmp_path: Path, files: tuple[Path, Path]) -> None:
    recipe, data = files
    (tmp_path / "model.onnx").write_bytes(export(perceptron(features=2, classes=4)))
    recipe.write_text(json.dumps({**RECIPE, "model": {"onnx": "model.onnx"}, "epochs": 1}))
    result = run_lathe("train", recipe, "--data", data, "--out", tmp_path / "job", "--threads", 1)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "job/parent.onnx").read_bytes() == (tmp_path / "model.onnx").read_bytes()


@pytest.mark.parametrize(
    ("changes", "options", "complaint"),
    [
        ({"epochs": 0}, [], "points.json: epochs: expected at least 1, got 0"),
        ({"model": {"onnx": "none.onnx"}}, [], "model.onnx: there is no file"),
        ({"model": {"parent": True}}, [], "model: expected a model to fine-tune"),
        ({"data": {"target": "z"}}, [], "'z'"),
        ({}, ["--resume"], "there is no training to resume"),
    ],
)
def test_a_refusal_is_one_line(
    tmp_path: Path, files: tuple[Path, Path], changes: dict[str, Any], options: list[str], complaint: str
) -> None:
    recipe, data = files
    recipe.write_text(json.dumps({**RECIPE, **changes}))
    result = run_lathe("train", recipe, "--data", data, "--out", tmp_path / "job", *options)
    assert result.exit_code == 1
    assert complaint in result.stderr and "Traceback" not in result.output
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--promote"], "--promote: expected --publish with it, otherwise there is no version"),
        (["--gate", "{}"], "--gate: expected --publish with it, otherwise there is no version"),
        (["--publish", "m", "--out", "o"], "--out: has no effect for a training on a server: the server keeps the "),
        (["--publish", "m", "--threads", "1"], "--threads: has no effect for a training on a server: "),
        (["--dataset", "d", "--resume"], "--resume: has no effect for a training on a server: "),
        (
            ["--publish", "m", "--gate", "accuracy"],
            """--gate: expected JSON such as '{"min": {"accuracy": 0.97}}', got""",
        ),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    files: tuple[Path, Path], options: list[str], complaint: str
) -> None:
    recipe, data = files
    given = options if "--dataset" in options else ["--data", data, *options]
    result = run_lathe("train", recipe, *given)
    assert (result.exit_code, result.stderr.startswith(f"error: {complaint}")) == (1, True), result.stderr
    assert result.stderr.count("\n") == 1


def test_a_dataset_instead_of_a_recipe_is_named(files: tuple[Path, Path]) -> None:
    _, data = files
    for options in (["--data", data], ["--data", data, "--publish", "m"]):
        result = run_lathe("train", data, *options)
        expected = f"error: {data}: expected a recipe, text in TOML or JSON; this file is binary\n"
        assert (result.exit_code, result.stderr) == (1, expected)


def test_an_error_at_the_start_leaves_the_folder_unused(tmp_path: Path, files: tuple[Path, Path]) -> None:
    recipe, data = files
    recipe.write_text(json.dumps({**RECIPE, "data": {"target": "z"}}))
    command = ("train", recipe, "--data", data, "--out", tmp_path / "job", "--threads", 1)
    assert run_lathe(*command).exit_code == 1
    recipe.write_text(json.dumps({**RECIPE, "epochs": 1}))
    assert run_lathe(*command).exit_code == 0


@pytest.mark.slow
def test_an_interrupted_training_can_be_resumed(tmp_path: Path, files: tuple[Path, Path]) -> None:
    recipe, data = files
    recipe.write_text(json.dumps({**RECIPE, "epochs": 400, "data": {}, "checkpoint": {}}))
    command = [
        sys.executable,
        "-c",
        "from lathe.server.cli.app import app; app()",
        "train",
        str(recipe),
        "--data",
        str(data),
    ]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_lathe("train", recipe, "--data", data, "--out", whole, "--threads", 1).exit_code == 0
    process = subprocess.Popen([*command, "--out", str(parts), "--threads", "1"], stdout=subprocess.PIPE, text=True)
    while "epoch" not in kinds(parts):
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped; --resume continues the training in" in output
    assert not (parts / "result").exists()
    assert run_lathe("train", recipe, "--data", data, "--out", parts, "--resume", "--threads", 1).exit_code == 0
    assert model_bytes(parts) == model_bytes(whole)
