"""Runs exported models and reports for each: agreement, batching, packing, and nodes without a kernel.

    python -m tests.exporters.corpus FOLDER [--only NAME ...] [--json FILE]

A model is FOLDER/<name>/model.onnx with feeds-<i>.npz. Each has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from tests.exporters.evaluation import Evaluation, Feeds, evaluate_in_child

_LIMIT_S = 600.0


def examined(folder: Path) -> Evaluation:
    """Evaluate the model in a folder, without timing it."""
    feeds = [_arrays(file) for file in sorted(folder.glob("feeds-*.npz"))]
    return evaluate_in_child(folder.name, folder / "model.onnx", feeds, _LIMIT_S, packed=True)


def _arrays(path: Path) -> Feeds:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.exporters.corpus", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(arguments)
    folders = sorted(path.parent for path in options.folder.glob("*/model.onnx"))
    for folder in folders:
        if options.only is None or any(part in folder.name for part in options.only):
            found = examined(folder)
            _show(found)
            if options.json is not None:
                with options.json.open("a") as file:
                    file.write(json.dumps(asdict(found)) + "\n")


def _show(found: Evaluation) -> None:
    marks = f"{'batched' if found.batchable else '-':8} {'packed' if found.packable else '-':7}"
    truth = {True: "rows independent", False: "rows mixed", None: "?"}[found.independent]
    print(
        f"{found.name:32} {found.result:8} {found.error:8.1e} {marks} {truth:16} {len(found.fallbacks):3} on the "
        f"reference, {found.attention} attention, {found.compile_s + found.first_s:5.1f} s",
        flush=True,
    )
    for note in found.notes:
        print(f"    {note[:230]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
