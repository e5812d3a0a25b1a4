"""Compares the zoo's results on the device with the CPU's: the largest difference over the largest output.

The reference is the CPU's result in float32. In another precision the device may err as the CPU does.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from numpy.typing import NDArray

import lathe
from loadtest import zoo
from loadtest.gpu.case import Bench, Case, Finding, Options
from loadtest.timing import relative_error

SHARE = 0.14
TOLERANCES = {"float32": 1e-4, "tf32": 5e-3, "bfloat16": 2e-2, "float16": 5e-3}
_ROWS = 3
_OF_CPU = 1.5  # times the CPU's own error: some models amplify rounding, the U-Nets to 3 % in bfloat16
_LEFT_OUT = ("heavy",)  # made to load a server; it has no operator that the others lack


def cases(options: Options) -> list[Case]:
    names = options.zoo or tuple(name for name in zoo.ZOO if name not in _LEFT_OUT)
    return [Case("agreement", f"{name}/{precision}", 45.0) for precision in TOLERANCES for name in names]


def measure(case: Case, bench: Bench) -> Finding:
    """The largest error over runs launched kernel by kernel and runs launched as a CUDA graph."""
    name, precision = case.words
    kind: Any = precision
    want, feeds = _wanted(name, "float32"), zoo.feeds(name, _ROWS)
    with lathe.compile(
        zoo.model(name).SerializeToString(), device=bench.options.device, precision=kind, tune="off",
        max_batch=4,
    ) as session:  # fmt: skip
        errors = []
        for _ in range(3):
            errors.append(relative_error(session.run(feeds)["y"], want))
            session.settle(20)
        where = next((line for line in session.explain().splitlines() if " parts on " in line), "")
    error, devices = max(errors), where.partition(" parts on ")[2]
    most = max(TOLERANCES[precision], _OF_CPU * relative_error(_wanted(name, precision), want))
    text = f"{name} in {precision}: error {error:.1e}, at most {most:.1e}, on {devices}"
    return Finding(text, error <= most, {"error": error, "most": most, "devices": devices})


@lru_cache(4)
def _wanted(name: str, precision: Any) -> NDArray[Any]:
    """The CPU's result, from compiled code, or from the reference operators if the llvmlite version does not fit."""
    model, feeds = zoo.model(name).SerializeToString(), zoo.feeds(name, _ROWS)
    try:
        with lathe.compile(model, tune="off", precision=precision) as session:
            found: NDArray[Any] = session.run(feeds)["y"]
            return found
    except Exception:  # another version of llvmlite can raise any exception
        interpreted: NDArray[Any] = lathe.interpret(lathe.load(model), feeds)["y"]
        return interpreted
