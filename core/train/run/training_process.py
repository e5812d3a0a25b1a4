"""Runs a training in a child process: `python -m lathe.core.train.run.training_process FOLDER --dataset PATH`.

FOLDER/recipe.json is the recipe (core/train/recipe/recipe.py). Options and exit statuses are those of job_process.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lathe.core.train.run.job_process import Work, run_child


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line `argv` says; returns the exit status."""

    def load() -> Work:
        from lathe.core.train.run.work_folder import run_training

        return run_training

    return run_child("Run or resume the training in a folder.", load, argv)


if __name__ == "__main__":
    sys.exit(main())
