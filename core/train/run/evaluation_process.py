"""Evaluates a model in a child process.

    python -m lathe.core.train.run.evaluation_process FOLDER --dataset PATH --parent MODEL.onnx

FOLDER/recipe.json says how: see evaluation.py. Options and exit statuses are those of job_process.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lathe.core.train.run.job_process import Work, run_child


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate the model as the command line `argv` says; returns the exit status."""

    def load() -> Work:
        from lathe.core.train.run.evaluation import run_evaluation

        return run_evaluation

    return run_child("Evaluate a model on data.", load, argv)


if __name__ == "__main__":
    sys.exit(main())
