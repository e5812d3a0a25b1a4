"""Files that demand too much are refused cheaply; files that are only large compile cheaply."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import bombs

ROOT = Path(__file__).resolve().parents[2]
REFUSED = {
    "functions of functions", "functions in bodies", "a long chain of functions", "a sparse weight",
    "a million integers", "a hundred thousand attributes", "a type of ninety levels",
}  # fmt: skip
MIB = 1 << 20


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cache = str(tmp_path_factory.mktemp("cache"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LATHE_CACHE_DIR": cache, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.fuzz.bombs"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    assert found.keys() == bombs.BOMBS.keys()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", bombs.BOMBS)
def test_bombs_cost_little_time_and_memory(name: str, results: dict[str, dict[str, Any]]) -> None:
    result = results[name]
    assert result["outcome"] in ("refused", "not compiled", "compiled", "loaded"), result
    assert (result["outcome"] == "refused") == (name in REFUSED), result
    assert result["bytes"] < (64 if name in REFUSED else 320) * MIB, result
    assert result["seconds"] < 5, result


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ConstantOfShape", "Expand", "Tile", "Pad", "Resize", "OneHot"])
def test_models_beyond_any_memory_are_not_compiled(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert results[f"huge {name}"]["outcome"] == "not compiled"
