"""A worker of the test run that dies ends the run with an error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.project.small_run import small_run

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
    files = {"test_a.py": DIES.format(signal=signal), **{f"test_{letter}.py": WAITS for letter in "bcdef"}}
    done = small_run(project, tmp_path, files, "-n", jobs)
    assert done.returncode == pytest.ExitCode.INTERNAL_ERROR, done.stdout
    assert re.search(r"^ERROR: worker gw\d+ died .*: the run is not complete$", done.stdout, re.MULTILINE), done.stdout
    assert done.stdout.count("crashed while running 'tests/test_a.py::test_one[1]'") == 1
