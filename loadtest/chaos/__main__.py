"""python -m loadtest.chaos: as `python -m loadtest chaos`; with `--check FILE` a history is checked again."""

from __future__ import annotations

import sys

from loadtest.chaos.run import main

if __name__ == "__main__":
    sys.exit(main())
