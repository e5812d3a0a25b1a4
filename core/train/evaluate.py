"""Judging a model as a process of its own: `python -m core.train.evaluate FOLDER --dataset PATH --parent MODEL.onnx`.

What to do stands in FOLDER/recipe.json: see judging.py. Command line and exit status are those of run.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from core.train.run import Work, child


def main(argv: Sequence[str] | None = None) -> int:
    """Judge; returns the exit status."""

    def load() -> Work:
        from core.train.judging import work

        return work

    return child("Judge a model on data.", load, argv)


if __name__ == "__main__":
    sys.exit(main())
