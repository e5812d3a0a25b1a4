"""Python blocks of the documentation run unchanged, with the shell blocks that belong to them."""

from __future__ import annotations

import ast
import builtins
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import lathe
from lathe.core.train.run.result import read_metrics
from tests.project.test_commands import blocks, checkout, split_commands

__all__ = ["checkout"]
RUN_ELSEWHERE = {"torch": "tests/exporters/test_frameworks.py, in PyTorch's own environment"}
PAGES = ("docs/getting-started.md", "docs/training.md")


def python_blocks(page: str) -> list[str]:
    """The blocks that need only packages that `make test` installs."""
    return [block for block in blocks(page, "python") if not RUN_ELSEWHERE.keys() & imported_packages(block)]


def imported_packages(block: str) -> set[str]:
    """The packages that a block imports."""
    tree = ast.walk(ast.parse(block))
    names = [alias.name for node in tree if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def run(command: list[str], folder: Path) -> str:
    project = Path(__file__).parents[2]
    path = f"{folder / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(project), "LATHE_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_every_block_defines_the_names_it_uses(page: str) -> None:
    """Checks also blocks whose packages are not installed here: each block must define its model and data."""
    for block in blocks(page, "python"):
        tree = list(ast.walk(ast.parse(block)))
        used = {node.id for node in tree if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        made = {node.id for node in tree if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
        made |= {alias.asname or alias.name.partition(".")[0] for node in tree for alias in getattr(node, "names", ())
                 if isinstance(alias, ast.alias)}  # fmt: skip
        assert used - made <= set(dir(builtins))


@pytest.mark.slow
def test_the_scikit_learn_snippet_writes_a_model_file(tmp_path: Path) -> None:
    (block,) = python_blocks("docs/getting-started.md")
    run([sys.executable, "-c", block], tmp_path)
    with lathe.compile(tmp_path / "iris.onnx", threads=1) as session:
        outputs = session.run({"X": np.ones((5, 4), np.float32)})
    assert outputs["probabilities"].shape == (5, 3)


def test_the_snippet_of_a_training_step_runs(tmp_path: Path) -> None:
    (block,) = [block for block in python_blocks("docs/training.md") if "step(" in block]
    inputs, *losses = run([sys.executable, "-c", block], tmp_path).splitlines()
    assert "target" in inputs and len(losses) == 500 and all(0 < float(loss) < 5 for loss in losses)
    assert re.match(r"%x: float32\[\w+,256\]", str(lathe.load(tmp_path / "trained.onnx").inputs[0]))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_snippet_of_training_on_the_command_line_runs(checkout: Path, tmp_path: Path) -> None:
    commands = [line for block in blocks("docs/training.md", "sh") for line in split_commands(block)]
    shutil.copytree(checkout, tmp_path / "checkout", symlinks=True)
    for command in commands:
        run(["sh", "-c", command], tmp_path / "checkout")
    assert read_metrics(tmp_path / "checkout/digits")["metrics"]["accuracy"] > 0.97
