"""Measurements of the engine in one fresh process: time until a model is ready, and memory.

    python -m loadtest.one_process compile MODEL.onnx     {"ready": s, "processor": s}
    python -m loadtest.one_process load MODEL.lathe       the same, and resident bytes
    python -m loadtest.one_process cold MODEL.onnx        see cold.py

"ready" is wall time, "processor" is processor time of this process. Imports are not counted.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lathe import Session

ROWS = 8  # rows of the run that fills the arena
SIZE = 16  # of dynamic dimensions other than the batch, for generated inputs


def compile_file(path: Path) -> dict[str, float]:
    """Seconds to compile an ONNX file to a session."""
    import lathe

    lathe.compile  # noqa: B018  (imports what compiling needs)
    started = _clocks()
    lathe.compile(path, threads=1).close()
    return _since(started)


def load_file(path: Path) -> dict[str, float]:
    """Seconds to load a compiled file, then resident bytes around loading it a second time.

    The second load shows the cost of one more session: the linker and the thread pool, which stay, exist already.
    """
    import lathe

    lathe.load_compiled  # noqa: B018
    started = _clocks()
    session = lathe.load_compiled(path, threads=1)
    figures = _since(started)
    _run(session)
    session.close()
    del session
    figures["before"] = resident_bytes()
    with lathe.load_compiled(path, threads=1) as session:
        figures["loaded"] = resident_bytes()
        _run(session)
        figures["used"] = resident_bytes()
    figures["closed"] = resident_bytes()
    return figures


def cold_file(path: Path) -> dict[str, float]:
    """Processor seconds to compile a file and run it, then to run one other shape if there is one; memory in bytes."""
    import lathe

    lathe.compile  # noqa: B018
    figures: dict[str, float] = {"imports": resident_bytes()}
    before = _processor_seconds()
    with lathe.compile(path, threads=1, tune="off", new_shapes="wait") as session:
        first, *others = _feeds_beside(path) or [_generated_feeds(session)]
        session.run(first)
        figures["first"] = _processor_seconds() - before
        figures["resident"] = resident_bytes()
        if others:
            before = _processor_seconds()
            session.run(others[0])
            figures["next"] = _processor_seconds() - before
    return figures | {"peak": max(_peak_bytes(), figures["resident"])}  # Linux updates its counters with a delay


def _processor_seconds() -> float:
    """Processor seconds of this process and its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _peak_bytes() -> int:
    """The peak resident memory of this process or of a child.

    For this process VmHWM is used, because getrusage's maximum includes the parent's before exec.
    """
    return max(_status("VmHWM"), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)


def _feeds_beside(path: Path) -> list[dict[str, Any]]:
    import numpy as np

    found = []
    for file in sorted(path.parent.glob("feeds-*.npz")):
        with np.load(file) as stored:
            found.append({name: stored[name] for name in stored.files})
    return found


def _generated_feeds(session: Session) -> dict[str, Any]:
    """Inputs of one row, with SIZE for the other dynamic dimensions."""
    import numpy as np

    feeds: dict[str, Any] = {}
    for name, type_ in session.inputs.items():
        sizes = dict.fromkeys(type_.symbols, SIZE) | {str(session.batching.symbol): 1}  # type: ignore[union-attr]
        feeds[name] = np.ones(type_.evaluate(sizes), type_.dtype.numpy)  # type: ignore[union-attr]
    return feeds


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(started: tuple[float, float]) -> dict[str, float]:
    now = _clocks()
    return {"ready": now[0] - started[0], "processor": now[1] - started[1]}


def _run(session: Session) -> None:
    import numpy as np

    feeds: dict[str, Any] = {}
    for name, type_ in session.inputs.items():
        shape = type_.evaluate({str(session.batching.symbol): ROWS})  # type: ignore[union-attr]
        feeds[name] = np.zeros(shape, type_.dtype.numpy)  # type: ignore[union-attr]
    session.run(feeds)


def resident_bytes() -> int:
    """Physical memory of this process, mapped files included."""
    gc.collect()
    return _status("VmRSS")


def _status(name: str) -> int:
    """A field of /proc/self/status, in bytes. RuntimeError if it is missing."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


STEPS = {"compile": compile_file, "load": load_file, "cold": cold_file}


def main(arguments: Sequence[str]) -> int:
    step, path = arguments
    print(json.dumps(STEPS[step](Path(path))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
