"""Start-up, memory and reproducibility: the measured figures, and which broken promises are reported."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest import footprint, zoo
from loadtest.__main__ import main
from loadtest.footprint import MIB, Footprint

GOOD = Footprint("m", 4.0, 0.2, 0.1, 9 * MIB, 8 * MIB, MIB, MIB, 50 * MIB, 60 * MIB, 70 * MIB, 52 * MIB, True)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"cold": 5.1}, "m: cold compile took 5.1 s"),
        ({"warm": 0.31}, "m: warm compile took 0.31 s"),
        ({"load": 0.4}, "m: loading took 0.40 s"),
        ({"arena": 11 * MIB // 10}, "m: the arena is 1.10 times its bound"),
        ({"closed": 61 * MIB}, "m: 11 MiB stay after closing"),
        ({"identical": False}, "m: two builds differ"),
    ],
)
def test_a_broken_promise_is_named(change: dict[str, float], complaint: str) -> None:
    assert GOOD.broken == []
    assert replace(GOOD, **change).broken == [complaint]  # type: ignore[arg-type]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["LATHE_CACHE_DIR", "LATHE_CACHE"])
def test_a_measured_process_uses_its_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also where the environment names another one, in which all would be compiled already."""
    monkeypatch.setenv(name, str(tmp_path / "full"))
    path = tmp_path / "mlp.onnx"
    path.write_bytes(zoo.model("mlp").SerializeToString())
    figures = footprint.run_step("compile", path, tmp_path / "empty")
    assert figures["processor"] > 0
    assert (tmp_path / "empty").is_dir() and not (tmp_path / "full").exists()


@pytest.mark.slow
def test_one_command_measures_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["footprint", "--models", "mlp", "--json", str(tmp_path / "out.json")])
    (row,) = json.loads((tmp_path / "out.json").read_text())
    assert row["identical"] and row["lower_bound"] > 0
    assert row["weights"] < row["artifact"] and 0 < row["load"] <= row["warm"] * 10
    assert "mlp" in capsys.readouterr().out


_UNLOAD = """
import numpy as np, lathe, lathe.core.ops
from pathlib import Path
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType, symbol
from loadtest.one_process import resident_bytes
graph = Graph("wide")
b = Builder(graph)
x = b.input("x", TensorType(DType.FLOAT32, (symbol("n"), 2048)))
for i in range(4):
    x = b("Relu", b("MatMul", x, b.constant(np.random.default_rng(i).random((2048, 2048), np.float32), "w")))
graph.outputs = [x]
feed = {"x": np.ones((1024, 2048), np.float32)}
sizes = []
for _ in range(3):
    with lathe.compile(graph, threads=1, tune="off") as session:
        session.run(feed)
        loaded = resident_bytes()
    sizes.append((loaded, resident_bytes()))
print(*[size for pair in sizes for size in pair])
"""


@pytest.mark.slow
def test_closing_a_session_gives_its_memory_back(tmp_path: Path) -> None:
    """80 MiB of weights and arena, three times: the resident memory after each close does not grow."""
    done = subprocess.run(
        [sys.executable, "-c", _UNLOAD], cwd=footprint.PROJECT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded, closed, *rest = (int(word) / MIB for word in done.stdout.split())
    assert loaded - closed > 64
    assert rest[-1] < closed + 8
