"""Runs commands as users type them, in this process or in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from typer.testing import CliRunner

from lathe.server.cli.app import app

PROJECT = Path(__file__).parents[3]


def run_lathe(*arguments: str, fails: bool = False, env: Mapping[str, str | None] | None = None) -> str:
    """Run a command in this process, on a wide terminal; return its whole output."""
    result = CliRunner().invoke(
        app, arguments, env={"COLUMNS": "240", "LATHE_URL": None, "LATHE_KEY": None, **(env or {})}
    )
    assert (result.exit_code != 0) == fails, result.output
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def cells(shown: str) -> list[list[str]]:
    """The rows of a table without its head."""
    lines = [line for line in shown.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def lathe_process(
    *arguments: str, env: Mapping[str, str] | None = None, seconds: float = 60, name: str | None = None
) -> tuple[int, str]:
    """Run a command in a process of its own, under a name; return its exit status and its stderr."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("LATHE_")}
    done = subprocess.run(
        [sys.executable, "-c", f"from lathe.server.cli.app import app; app(prog_name={name!r})", *arguments],
        cwd=PROJECT,
        env={**plain, "PYTHONPATH": str(PROJECT), "COLUMNS": "240", **(env or {})},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    return done.returncode, done.stderr
