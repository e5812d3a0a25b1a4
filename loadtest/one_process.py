"""What one fresh process sees of the engine: how long until a model is ready, and how much memory it holds.

    python -m loadtest.one_process compile MODEL.onnx     {"ready": s, "processor": s}
    python -m loadtest.one_process load MODEL.lathe       the same, and resident bytes

"ready" is by the clock; "processor" leaves out what other processes took. Imports are done before.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core import Session

ROWS = 8  # of the run that fills the arena


def compile_file(path: Path) -> dict[str, float]:
    """Seconds from a file to a session."""
    import core

    core.compile  # noqa: B018  (imports what compiling needs)
    started = _clocks()
    core.compile(path, threads=1).close()
    return _since(started)


def load_file(path: Path) -> dict[str, float]:
    """Seconds to load a compiled file; then resident bytes around loading it a second time, when everything that stays
    (the linker, the team) is there already."""
    import core

    core.load_compiled  # noqa: B018
    started = _clocks()
    session = core.load_compiled(path, threads=1)
    figures = _since(started)
    _run(session)
    session.close()
    del session
    figures["before"] = resident_bytes()
    with core.load_compiled(path, threads=1) as session:
        figures["loaded"] = resident_bytes()
        _run(session)
        figures["used"] = resident_bytes()
    figures["closed"] = resident_bytes()
    return figures


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
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status does not say VmRSS")


STEPS = {"compile": compile_file, "load": load_file}


def main(arguments: Sequence[str]) -> int:
    step, path = arguments
    print(json.dumps(STEPS[step](Path(path))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
