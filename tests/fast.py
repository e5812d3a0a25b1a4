"""The selection of `make test-fast`: one case of every quick test function, and one case per operator and kernel.

`tests/not_fast.txt` lists the functions of which one case takes more than 0.23 s. Write it again
with `python -m pytest --fast --fast-record tests/not_fast.txt` on a quiet machine.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

NOT_FAST = Path(__file__).with_name("not_fast.txt")
LIMIT = 0.23  # seconds of set-up, call and tear-down: the others take 50 s on two cores

# Test functions whose first parameter names an operator, a kernel or a layer: one case for each of its values.
ONE_PER_SUBJECT = {
    "test_reference_agrees_with_the_oracle",
    "test_agrees_with_central_differences",
    "test_every_operator_in_every_type",
    "test_results_compiled",
}


# Folders whose files are slow to import: the package `onnx` computes the data of its backend suite at that time.
SLOW_TO_IMPORT = ("tests/core/conformance/",)


def select(items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The fast tests, and all others."""
    left_out = not_fast_functions()
    seen: set[tuple[str, str]] = set()
    fast: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        function = function_of(item.nodeid)
        key = (function, subject(item.nodeid) if function.rpartition("::")[2] in ONE_PER_SUBJECT else "")
        chosen = function not in left_out and key not in seen
        seen.add(key)
        (fast if chosen else others).append(item)
    return fast, others


def keep_first_cases(metafunc: pytest.Metafunc) -> None:
    """Let a test function have one case for each parameter list; most of the time of a collection goes into cases."""
    if metafunc.function.__name__ in ONE_PER_SUBJECT:
        return
    parametrize = metafunc.parametrize

    def first_only(argnames: Any, argvalues: Iterable[Any], *args: Any, **options: Any) -> None:
        options.pop("_param_mark", None)  # pytest keeps the ids of all cases there
        values, ids = list(argvalues)[:1], options.get("ids")
        if ids is not None and not callable(ids):
            options["ids"] = list(ids)[:1]
        parametrize(argnames, values, *args, **options)

    metafunc.parametrize = first_only  # type: ignore[method-assign]


def is_left_out(path: Path, root: Path) -> bool:
    """Whether a file has no fast test, or is slow to import."""
    left_out = not_fast_functions()
    file = path.relative_to(root).as_posix()
    if file.startswith(SLOW_TO_IMPORT):
        return True
    names = re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    return bool(names) and all(f"{file}::{name}" in left_out for name in names)


@functools.cache
def not_fast_functions() -> frozenset[str]:
    """The functions that `tests/not_fast.txt` lists."""
    return frozenset(NOT_FAST.read_text().splitlines()) if NOT_FAST.exists() else frozenset()


def function_of(nodeid: str) -> str:
    """The test function of a case: its node id without parameters."""
    return nodeid.partition("[")[0]


def subject(nodeid: str) -> str:
    """The first parameter of a case, as in its id."""
    return nodeid.partition("[")[2].partition("-")[0].rstrip("]")


class Recorder:
    """Sums the time of each test function, and writes the names of those above the limit to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        function = function_of(report.nodeid)
        self.seconds[function] = self.seconds.get(function, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        slow = sorted(function for function, seconds in self.seconds.items() if seconds > LIMIT)
        before = self.path.read_text().splitlines() if self.path.exists() else []
        self.path.write_text("".join(f"{line}\n" for line in sorted({*before, *slow})))
