"""The worker process: measures cases one by one, with a line of JSON at the start and at the end of each.

One process runs the cases of one part only. A crash, such as a fault of the GPU, costs the current case: the run starts
another process for the remaining cases.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lathe.core.errors import DeviceLost
from loadtest.gpu.case import Bench, Case, Finding, Options
from loadtest.gpu.parts import MEASURES

Report = Callable[[Mapping[str, Any]], None]


def work(cases: Sequence[Case], bench: Bench, report: Report) -> None:
    """Measure the cases. An exception counts as a broken promise. After the loss of the device the worker stops."""
    for case in cases:
        report({"begin": case.key})
        started = time.perf_counter()
        lost = False
        try:
            finding = MEASURES[case.part](case, bench)
        except Exception as error:
            lost = isinstance(error, DeviceLost)
            text = f"{type(error).__name__}: {str(error)[:300]}"
            finding = Finding(text, False, {"traceback": traceback.format_exc()[-4000:]})
        report({"case": case.key, **asdict(finding), "seconds": round(time.perf_counter() - started, 3)})
        if lost:
            return


def main() -> int:
    """Read cases from standard input and write lines to standard output. Output of libraries goes to stderr."""
    given = json.loads(sys.stdin.read())
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def report(record: Mapping[str, Any]) -> None:
        lines.write(json.dumps(record) + "\n")
        lines.flush()

    bench = Bench(Options.from_json(given["options"]), given["known"])
    work([Case(**each) for each in given["cases"]], bench, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
