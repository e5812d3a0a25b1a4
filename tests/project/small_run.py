"""Runs a few tests of its own with the settings and hooks of this project."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def small_run(project: Path, folder: Path, files: Mapping[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run these files of tests, given by name, in parallel processes that get whole files."""
    helpers = [file for file in (project / "tests").glob("*.py") if not file.name.startswith("test_")]
    for source in (project / "pyproject.toml", project / "tests/core/targets.py", *helpers):
        copy = folder / source.relative_to(project)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    for name, text in files.items():
        (folder / "tests" / name).parent.mkdir(exist_ok=True)
        (folder / "tests" / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "--dist", "loadfile", "-p", "no:cacheprovider", *options]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(project)
    environment.pop("CI", None)  # with CI set, pytest repeats each failure as a whole in its summary
    # A run takes 3 s. The limit only ends a run that waits for a dead worker for ever: busy machines took 69 s.
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
