"""Child processes import this package, whatever is in the working directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lathe
from lathe.core.compiler import custom_operators
from lathe.core.runtime.host import child_python
from lathe.core.runtime.session.background import Background
from tests.core.small_models import model

PROJECT = Path(lathe.__file__).parents[1]


@pytest.fixture
def project_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose files are named as Lathe's packages and as one of Python's own modules."""
    for name in ("server.py", "core/__init__.py", "argparse.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit(f'{__file__} was imported')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.sample(4)
@pytest.mark.parametrize("path", [None, "", f"{os.pathsep}/nowhere", "/nowhere"])
def test_a_child_imports_nothing_of_the_working_directory(
    path: str | None, project_of_a_user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if path is not None:
        monkeypatch.setenv("PYTHONPATH", path)
    assert Background().run_child(["parse", str(_written(project_of_a_user)), str(project_of_a_user / "out")])
    assert (project_of_a_user / "out/graph.lir").exists()


def test_a_child_finds_custom_operators(project_of_a_user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script beside its operators can import them; a child needs their folder on its path."""
    folder = project_of_a_user / "scripts"
    (folder / "ours").mkdir(parents=True)
    (folder / "ours/__init__.py").write_text("")
    (folder / "ours/operators_of_a_test.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv(child_python.OPERATORS, "")
    custom_operators.load_operators("ours.operators_of_a_test")
    assert child_python.python_path().split(os.pathsep)[-1] == str(folder.resolve())
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", child_python.python_path())
        done = subprocess.run([sys.executable, "-P", "-c", "import ours.operators_of_a_test"], cwd="/")
    assert done.returncode == 0


def test_python_is_started_in_one_place_only() -> None:
    sources = [path for package in ("core", "server") for path in (PROJECT / package).rglob("*.py")]
    starting = {path.relative_to(PROJECT).as_posix() for path in sources if "sys.executable" in path.read_text()}
    # The exporters run in a client's process. They start a script by its path, in a Python that need not have Lathe,
    # with PYTHONSAFEPATH; `pytorch.py` is that script, and names its own Python in a message.
    exporting = {f"server/client/exporting/{name}.py" for name in ("files", "pytorch")}
    assert starting == {"core/runtime/host/child_python.py"} | exporting


def _written(folder: Path) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(model("float[n,4] x => float[n,4] y", "y = Neg(x)"))
    return path
