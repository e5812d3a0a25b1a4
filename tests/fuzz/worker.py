"""A child process that checks a range of cases; any of them may crash it.

    python -m tests.fuzz.worker CORPUS SEED FIRST LAST STEP

Writes one line per case to standard output: "start I", then "done I OUTCOME" or "bug I TEXT". The parent learns from a
missing "done" that case I took the process down: too much memory at once, too much time, or a crash in native code.
"""

from __future__ import annotations

import resource
import signal
import sys
import traceback
import warnings
from pathlib import Path

from lathe.core.errors import ShapeWarning
from tests.fuzz import corpus
from tests.fuzz.check import check
from tests.fuzz.mutate import mutated

MOST_MEMORY = 1 << 30  # bytes of address space beyond what the process has at the start
MOST_SECONDS = 5.0  # of processor time per case, since the machine may be busy


def limit() -> None:
    """Limit memory and time: further allocations fail, and a case that takes longer ends the process (SIGPROF)."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MOST_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def describe(error: BaseException) -> str:
    """One line that is the same for the same bug: the error, and where in Lathe it was raised."""
    inside = [frame for frame in traceback.extract_tb(error.__traceback__) if "/core/" in frame.filename]
    place = f"{Path(inside[-1].filename).name}:{inside[-1].lineno} {inside[-1].name}" if inside else "?"
    return f"{type(error).__name__} at {place}: {str(error).splitlines()[0][:300] if str(error) else ''}"


def outcome(data: bytes) -> str:
    """The outcome of `check`, or "bug" and a description."""
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        return f"done {check(data)}"
    except Exception as error:
        return f"bug {describe(error)}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main(path: str, seed: str, first: str, last: str, step: str) -> None:
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", ShapeWarning)  # mutated models often declare wrong shapes
    seeds = corpus.read(Path(path))
    limit()
    for index in range(int(first), int(last), int(step)):
        print("start", index, flush=True)
        kind, _, text = outcome(mutated(f"{seed}:{index}", seeds)).partition(" ")
        print(kind, index, text, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
