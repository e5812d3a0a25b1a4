"""The files that `pip install` of the wheel puts into an environment, and that the sdist builds the same wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

SAY = "import lathe.core.errors, lathe.server.errors, lathe.client, sys; print(lathe.core.errors.__file__)"


def build(kind: str, source: Path, folder: Path) -> Path:
    """The file that setuptools builds from a source tree; `kind` is "wheel" or "sdist"."""
    folder.mkdir()
    script = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", script], cwd=source, check=True, capture_output=True)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, built from a copy of the files in git, because building leaves folders in its source tree."""
    folder = tmp_path_factory.mktemp("sdist")
    copy = folder / "source"
    subprocess.run(["git", "clone", "-q", str(project), str(copy)], check=True)
    changed = subprocess.run(
        ["git", "ls-files", "--modified", "--others", "--exclude-standard"],
        cwd=project, check=True, capture_output=True, text=True,
    ).stdout.split("\n")  # fmt: skip
    for name in filter(None, changed):
        if (project / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((project / name).read_bytes())
        else:
            (copy / name).unlink(missing_ok=True)
    return build("sdist", copy, folder / "built")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist, so that it lacks what the sdist lacks."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return build("wheel", source, folder / "built")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(script: str, installed: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh Python that finds the installed wheel first and ignores the working directory."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-P", "-c", script]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_the_wheel_puts_only_lathe_into_site_packages(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"lathe"}
    found = {path.name for path in (installed / "lathe").iterdir()}
    assert {"core", "server", "client.py", "nn", "train", "py.typed"} <= found


def test_the_wheel_has_every_source_file(project: Path, installed: Path) -> None:
    for folder, package in (("lathe", "lathe"), ("core", "lathe/core"), ("server", "lathe/server")):
        files = {path.relative_to(project / folder) for path in (project / folder).rglob("*.py")}
        missing = {file for file in files if not (installed / package / file).exists()}
        assert files and not missing


def test_an_installed_wheel_has_lathe_and_no_core_or_server(installed: Path, tmp_path: Path) -> None:
    done = run(SAY, installed, tmp_path)
    assert Path(done.stdout.strip()) == installed / "lathe/core/errors.py", done.stderr
    for name in ("core", "server"):
        failed = run(f"import {name}", installed, tmp_path)
        assert f"No module named '{name}'" in failed.stderr


def test_children_of_an_installed_wheel_run_its_own_modules(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "lathe.py").write_text("raise SystemExit('the working directory was imported')")
    script = """
import subprocess
from lathe.core.runtime.host import child_python
command = child_python.command("lathe.core.compiler.child_stages", "--help")
assert command[1:3] == ["-P", "-m"]
done = subprocess.run(command, env=child_python.environment(), capture_output=True, text=True, check=True)
print(done.stdout)
"""
    done = run(script, installed, tmp_path)
    assert "python -m lathe.core.compiler.child_stages" in done.stdout, done.stderr


@pytest.mark.parametrize("where", ["checkout", "wheel"])
def test_no_module_is_loaded_twice(where: str, project: Path, installed: Path, tmp_path: Path) -> None:
    """Also not where the working directory is the checkout, whose folders `core` and `server` Python could import."""
    script = """
import collections, os, sys
import lathe, lathe.client, lathe.nn, lathe.train
from lathe.server import app
session = lathe.compile(MODEL, threads=1, tune="off")
root = os.path.dirname(os.path.dirname(lathe.__file__))
files = collections.Counter(getattr(module, "__file__", None) or "" for module in list(sys.modules.values()))
own = [file for file in files if file.startswith(root) and "/lib/python" not in file]
assert len(own) > 300
print([file for file in own if files[file] > 1])
""".replace("MODEL", repr(str(project / "model_repo/digits/1/model.onnx")))
    if where == "wheel":
        done = run(script, installed, tmp_path)
    else:
        done = subprocess.run([sys.executable, "-c", script], cwd=project, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("python", ["python3.12", "python3.13"])
def test_newer_pythons_compile_every_module(python: str, installed: Path, tmp_path: Path) -> None:
    """This finds syntax that a newer Python refuses or warns of; running the modules would need an environment."""
    if not can_run(python):
        pytest.skip(f"{python} is not installed")
    command = [python, "-W", "error", "-m", "compileall", "-q", "-f", str(installed / "lathe")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def can_run(program: str) -> bool:
    """Whether a program is installed and starts; a version manager may have a placeholder that does not."""
    try:
        return subprocess.run([program, "--version"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
