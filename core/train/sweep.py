"""A search for good settings as a process of its own: `python -m core.train.sweep FOLDER --dataset PATH`.

What to search stands in FOLDER/recipe.json: see space.py. Command line and exit status are those of run.py. Its trials
are processes of run.py, and end with it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from core.train.run import Work, child


def main(argv: Sequence[str] | None = None) -> int:
    """Search; returns the exit status."""

    def load() -> Work:
        from core.train.searching import work

        return work

    return child("Search for good settings.", load, argv)


if __name__ == "__main__":
    sys.exit(main())
