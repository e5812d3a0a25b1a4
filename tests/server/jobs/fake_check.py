"""A fake check of a job's inputs: `python -m tests.server.jobs.fake_check check RECIPE DATASET MODEL`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path


def main(recipe: Path) -> int:
    match json.loads(recipe.read_text()):
        case {"do": "refuse"}:
            print(json.dumps({"error": f"{recipe}: expected more"}))
            return 2
        case {"do": "crash"}:
            os.kill(os.getpid(), signal.SIGSEGV)
        case {"do": "eat memory"}:
            raise MemoryError
        case {"do": "talk"}:
            print("hello")
            return 0
        case {"do": "leave out"}:
            print(json.dumps({"metrics": ["accuracy"]}))
            return 0
    print(json.dumps({"metrics": ["accuracy", "size_ratio"], "comparable": ["accuracy"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[2])))
