"""python -m lathe.core.train.data describe PATH [--name NAME] [--format F] [--memory BYTES]

Prints one line of JSON. Exit status 0; 2 with {"error": ...} if the data are invalid or need too much memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from lathe.core.errors import LatheError
from lathe.core.exit_status import ExitStatus
from lathe.core.train.data.budget import DEFAULT_MAX_BYTES
from lathe.core.train.data.describe import describe
from lathe.core.train.data.formats import Format


def main(argv: Sequence[str] | None = None) -> int:
    """Print the description of a dataset, or an error, as one line of JSON; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        found = describe(arguments.path, arguments.format, name=arguments.name, memory=arguments.memory)
    except LatheError as error:
        print(json.dumps({"error": str(error)}))
        return ExitStatus.INPUT_REFUSED
    except MemoryError:
        print(json.dumps({"error": f"{arguments.name or arguments.path.name}: not enough memory to read it"}))
        return ExitStatus.INPUT_REFUSED
    print(json.dumps(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lathe.core.train.data", description="Describe a dataset.")
    parser.add_argument("task", choices=["describe"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--name", help="name of the dataset in error messages")
    parser.add_argument("--format", choices=get_args(Format))
    parser.add_argument("--memory", type=int, default=DEFAULT_MAX_BYTES, help="most bytes of its columns in memory")
    return parser


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Skips the interpreter's shutdown, during which a thread of pyarrow may still call Python to read ahead.
    os._exit(status)
