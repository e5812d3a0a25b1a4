"""A child process that checks the graphs of seeds; any of them may crash it.

    python -m tests.fuzz.graphs.worker SEED...

Writes JSON, one object a line: {"seed", "phase"} before each phase ("grows", "asks", "checks"), then the result. The
parent learns from a missing result which seed took the process down, and in which phase.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from typing import Any

from tests.fuzz.graphs.check import check, confirmed
from tests.fuzz.graphs.generate import make

MOST_MEMORY = 6 << 30  # bytes of address space: threads and ONNX Runtime reserve much of it
MOST_SECONDS = 60.0  # of processor time for a seed


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def work(seed: int) -> None:
    """Grow and check the graph of a seed, and write the result."""
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    start = time.process_time()
    say(seed=seed, phase="grows")
    made = make(seed)
    grown = time.process_time()
    say(seed=seed, phase="asks")
    cases, doubt = confirmed(made.model, made.cases)
    say(seed=seed, phase="checks")
    outcome = check(made.model, cases, made.config, doubt)
    end = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, 0)
    kinds = {f"{op}:{index}:{kind}": count for (op, index, kind), count in sorted(made.kinds.items())}
    say(
        seed=seed, kind=outcome.kind, text=outcome.text, nodes=made.nodes, opset=made.model.opset_import[0].version,
        types=made.types, engines=made.engines, growing=round(grown - start, 3), checking=round(end - grown, 3),
        kinds=kinds,
    )  # fmt: skip


def main(seeds: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    for seed in seeds:
        work(int(seed))


if __name__ == "__main__":
    main(sys.argv[1:])
