"""The process that measures: one case after the other, a line of JSON when each begins and when it has ended.

Only the cases of one part run in one process. What ends it, such as a fault of the GPU, costs the case it was at: the
run starts another process for those behind it.
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

from core.errors import DeviceLost
from loadtest.gpu.case import Bench, Case, Finding, Options
from loadtest.gpu.parts import MEASURES

Say = Callable[[Mapping[str, Any]], None]


def work(cases: Sequence[Case], bench: Bench, say: Say) -> None:
    """Measure. An error of a case is a broken promise; after the loss of the device nothing else can run here."""
    for case in cases:
        say({"begin": case.key})
        started = time.perf_counter()
        lost = False
        try:
            finding = MEASURES[case.part](case, bench)
        except Exception as error:
            lost = isinstance(error, DeviceLost)
            text = f"{type(error).__name__}: {str(error)[:300]}"
            finding = Finding(text, False, {"traceback": traceback.format_exc()[-4000:]})
        say({"case": case.key, **asdict(finding), "seconds": round(time.perf_counter() - started, 3)})
        if lost:
            return


def main() -> int:
    """Cases come on standard input; whatever a library prints goes to standard error, so that lines stay whole."""
    given = json.loads(sys.stdin.read())
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(record: Mapping[str, Any]) -> None:
        lines.write(json.dumps(record) + "\n")
        lines.flush()

    bench = Bench(Options.from_json(given["options"]), given["known"])
    work([Case(**each) for each in given["cases"]], bench, say)
    return 0


if __name__ == "__main__":
    sys.exit(main())
