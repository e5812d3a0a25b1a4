"""The options and the end of load tests that print a table of rows, some of which have limits."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson


def add_result_options(parser: argparse.ArgumentParser) -> None:
    """Add `--limits` and `--json`, which `finish` reads."""
    parser.add_argument("--limits", action="store_true", help="exit with 1 if a limit is missed")
    parser.add_argument("--json", type=Path, help="also write the table to this file")


def finish(options: argparse.Namespace, rows: Sequence[Any], missed: Sequence[str]) -> int:
    """Write the rows, dataclasses, to the file of `--json`, print the missed limits, and return the exit status."""
    if options.json:
        options.json.write_bytes(orjson.dumps([asdict(row) for row in rows]))
    for line in missed:
        print(f"missed: {line}")
    return int(bool(missed) and options.limits)
