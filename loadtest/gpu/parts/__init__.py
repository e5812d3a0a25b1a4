"""The parts of a run, in order: first correctness, then speed, last the slowest measurements.

Each module has `SHARE`, its share of the time; `cases(options)`, which needs no device; and `measure(case, bench)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from loadtest.gpu.case import Bench, Case, Finding, Options
from loadtest.gpu.parts import agreement, ceilings, compiled, overhead, probe, sanitizer, speed, tiles, training

_MODULES = {
    "probe": probe,
    "agreement": agreement,
    "overhead": overhead,
    "ceilings": ceilings,
    "tiles": tiles,
    "speed": speed,
    "training": training,
    "compiled": compiled,
    "sanitizer": sanitizer,
}
PARTS = tuple(_MODULES)
SHARES: Mapping[str, float] = {name: module.SHARE for name, module in _MODULES.items()}
CASES: Mapping[str, Callable[[Options], list[Case]]] = {name: module.cases for name, module in _MODULES.items()}
MEASURES: Mapping[str, Callable[[Case, Bench], Finding]] = {name: module.measure for name, module in _MODULES.items()}
