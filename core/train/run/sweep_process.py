"""Runs a hyper-parameter search in a child process.

    python -m lathe.core.train.run.sweep_process FOLDER --dataset PATH

FOLDER/recipe.json describes the search: see sweep_space.py. Options and exit statuses are those of job_process.py. The
trials are child processes of this process: they run training_process.py, and end when this process ends.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lathe.core.train.run.job_process import Work, run_child


def main(argv: Sequence[str] | None = None) -> int:
    """Search as the command line `argv` says; returns the exit status."""

    def load() -> Work:
        from lathe.core.train.run.search import run_search

        return run_search

    return run_child("Search for good hyper-parameters.", load, argv)


if __name__ == "__main__":
    sys.exit(main())
