"""Compresses a version in a child process.

    python -m lathe.core.train.run.compression_process FOLDER --dataset PATH --parent MODEL.onnx

FOLDER/recipe.json says how: see compression.py. Options and exit statuses are those of job_process.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lathe.core.train.run.job_process import Work, run_child


def main(argv: Sequence[str] | None = None) -> int:
    """Compress the version as the command line `argv` says; returns the exit status."""

    def load() -> Work:
        from lathe.core.train.run.compression import run_compression

        return run_compression

    return run_child("Compress a version of a model.", load, argv)


if __name__ == "__main__":
    sys.exit(main())
