"""python -m core.train.data describe PATH [--name NAME] [--format F] [--memory BYTES]

Prints one line of JSON. Exit status 0, or 2 with {"error": ...} when the data are at fault.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from core.errors import LatheError
from core.train.data.describe import describe
from core.train.data.given import MOST_BYTES
from core.train.data.opening import Format

_DATA_AT_FAULT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Describe a dataset; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        found = describe(arguments.path, arguments.format, name=arguments.name, memory=arguments.memory)
    except LatheError as error:
        print(json.dumps({"error": str(error)}))
        return _DATA_AT_FAULT
    except MemoryError:
        print(json.dumps({"error": f"{arguments.name or arguments.path.name}: takes more memory than there is"}))
        return _DATA_AT_FAULT
    print(json.dumps(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m core.train.data", description="Look at a dataset.")
    parser.add_argument("task", choices=["describe"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--name", help="what errors call it")
    parser.add_argument("--format", choices=get_args(Format))
    parser.add_argument("--memory", type=int, default=MOST_BYTES, help="bytes that its columns may take")
    return parser


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # pyarrow may still be reading ahead, through Python, in a thread that outlives the interpreter
