"""The zoo on the device and on the CPU: the largest difference, as a share of the largest output."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from numpy.typing import NDArray

import core
from loadtest import zoo
from loadtest.gpu.case import Bench, Case, Finding, Options
from loadtest.timing import relative_error

SHARE = 0.14
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
_ROWS = 3
_LEFT_OUT = ("heavy",)  # made to load a server, and of nothing that the others have not


def cases(options: Options) -> list[Case]:
    names = options.zoo or tuple(name for name in zoo.ZOO if name not in _LEFT_OUT)
    return [Case("agreement", f"{name}/{precision}", 45.0) for precision in TOLERANCES for name in names]


def measure(case: Case, bench: Bench) -> Finding:
    """The largest error of runs that were launched step by step, and by a graph."""
    name, precision = case.words
    kind: Any = precision
    want, feeds = _wanted(name), zoo.feeds(name, _ROWS)
    with core.compile(
        zoo.model(name).SerializeToString(), device=bench.options.device, precision=kind, tune="off",
        max_batch=4,
    ) as session:  # fmt: skip
        errors = []
        for _ in range(3):
            errors.append(relative_error(session.run(feeds)["y"], want))
            session.settle(20)
        where = next((line for line in session.explain().splitlines() if " parts on " in line), "")
    error, devices = max(errors), where.partition(" parts on ")[2]
    text = f"{name} in {precision}: error {error:.1e}, at most {TOLERANCES[precision]:.0e}, on {devices}"
    return Finding(text, error <= TOLERANCES[precision], {"error": error, "devices": devices})


@lru_cache(2)
def _wanted(name: str) -> NDArray[Any]:
    """What the CPU gives: its compiled code, or the references where LLVM is another one than Lathe's."""
    model, feeds = zoo.model(name).SerializeToString(), zoo.feeds(name, _ROWS)
    try:
        with core.compile(model, tune="off") as session:
            found: NDArray[Any] = session.run(feeds)["y"]
            return found
    except Exception:  # llvmlite of another version raises whatever its functions do
        interpreted: NDArray[Any] = core.interpret(core.load(model), feeds)["y"]
        return interpreted
