"""A worker of the test run that dies ends the run with an error."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DIES = """
import os, pytest
@pytest.mark.parametrize("number", range(3))
def test_one(number):
    if number == 1:
        os.kill(os.getpid(), {signal})
"""
WAITS = """
import time
def test_other():
    time.sleep(0.2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize("signal", [4, 9], ids=["illegal instruction", "killed"])
def test_a_dead_worker_fails_the_run(project: Path, tmp_path: Path, signal: int, jobs: str) -> None:
    """Runs a few tests of its own with the settings and hooks of this project."""
    helpers = [file for file in (project / "tests").glob("*.py") if not file.name.startswith("test_")]
    for source in (project / "pyproject.toml", project / "tests/core/targets.py", *helpers):
        copy = tmp_path / source.relative_to(project)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    (tmp_path / "tests" / "test_a.py").write_text(DIES.format(signal=signal))
    for letter in "bcdef":
        (tmp_path / "tests" / f"test_{letter}.py").write_text(WAITS)
    command = [sys.executable, "-m", "pytest", "-q", "-n", jobs, "--dist", "loadfile", "-p", "no:cacheprovider"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(project)
    environment.pop("CI", None)  # with CI set, pytest repeats each failure as a whole in its summary
    # The run takes 3 s. The limit only ends a run that waits for the dead worker for ever: busy machines took 69 s.
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == pytest.ExitCode.INTERNAL_ERROR, done.stdout
    assert re.search(r"^ERROR: worker gw\d+ died .*: the run is not complete$", done.stdout, re.MULTILINE), done.stdout
    assert done.stdout.count("crashed while running 'tests/test_a.py::test_one[1]'") == 1
