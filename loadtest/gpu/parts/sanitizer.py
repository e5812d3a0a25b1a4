"""Kernels of all families and a training step under NVIDIA's compute-sanitizer, if it is installed.

It checks for accesses outside of memory and for races in shared memory. It is slow, so this part comes last.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict

from loadtest.gpu.case import Bench, Case, Finding, Options

SHARE = 0.06
TOOL, TOOLKIT = "compute-sanitizer", "/usr/local/cuda/bin"
_FOUND = 9  # exit status that the tool uses for its findings
_LIMIT = 100.0


def cases(options: Options) -> list[Case]:
    return [
        Case("sanitizer", f"{check}/{what}", _LIMIT + 10)
        for check in ("memcheck", "racecheck") for what in ("kernels", "training")
    ]  # fmt: skip


def measure(case: Case, bench: Bench) -> Finding:
    """Run the tool and record its output.

    A race does not count as a broken promise: the tool sometimes reports asynchronous copies to shared memory as races.
    """
    check, what = case.words
    tool = shutil.which(TOOL) or shutil.which(TOOL, path=TOOLKIT)
    if tool is None or not bench.options.device.startswith("cuda"):
        return Finding(f"{TOOL}: not installed, or no GPU")
    given = {**bench.to_json(), "cases": [asdict(each) for each in _cases(what, bench.options)]}
    command = [tool, "--tool", check, "--error-exitcode", str(_FOUND), sys.executable, "-m", "loadtest.gpu.worker"]
    try:
        done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        return Finding(f"{check} of {what}: not done in {_LIMIT:.0f} s")
    output = {"status": done.returncode, "output": (done.stdout + done.stderr)[-4000:]}
    found = done.returncode == _FOUND
    ok = None if found and check == "racecheck" else done.returncode == 0
    return Finding(f"{check} of {what}: exit status {done.returncode}", ok, output)


def _cases(what: str, options: Options) -> list[Case]:
    from loadtest.gpu.parts import probe, training

    if what == "kernels":
        return [case for case in probe.cases(options) if case.words[0] == "kernel"]
    return [
        case for case in training.cases(options) if case.name in ("agreement/lenet/float32", "agreement/mlp/bfloat16")
    ]
