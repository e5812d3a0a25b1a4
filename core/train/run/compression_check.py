"""Checks whether a recipe, a dataset and a version fit together, before a compression is queued. Runs no model.

    python -m lathe.core.train.run.compression_check check RECIPE.json DATASET MODEL.onnx

Prints one line of JSON. {"metrics": [...], "comparable": [...]} names the metrics that the compression can measure, and
those among them that an evaluation of any version can measure on the same rows. Exit status 0; 2 with {"error": ...} if
they do not fit together.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lathe.core.errors import LatheError
from lathe.core.exit_status import ExitStatus


def main(argv: Sequence[str] | None = None) -> int:
    """Check the files of the command line `argv`; returns the exit status."""
    parser = argparse.ArgumentParser(description="Check a compression before it is queued.")
    parser.add_argument("task", choices=["check"])
    for name in ("recipe", "dataset", "model"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args(argv)
    from lathe.core.train.run.compression import read_inputs

    try:
        found = read_inputs(arguments.recipe, arguments.dataset, arguments.model)
    except LatheError as error:
        print(json.dumps({"error": str(error)}))
        return ExitStatus.INPUT_REFUSED
    print(json.dumps({"metrics": found.data.metrics, "comparable": found.data.comparable_metrics}))
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Skips the interpreter's shutdown, during which a thread of pyarrow may still call Python to read ahead.
    os._exit(status)
