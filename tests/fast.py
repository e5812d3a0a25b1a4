"""The selection of `make test-fast`: one case of every quick test function, and one case per operator and kernel.

`tests/not_fast.txt` lists the functions of which one case takes more than 0.25 s. Write it again
with `python -m pytest --fast --fast-record tests/not_fast.txt` on a quiet machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

NOT_FAST = Path(__file__).with_name("not_fast.txt")
LIMIT = 0.25  # seconds of set-up, call and tear-down

# Test functions whose first parameter names an operator, a kernel or a layer: one case for each of its values.
ONE_PER_SUBJECT = {
    "test_reference_agrees_with_the_oracle",
    "test_agrees_with_central_differences",
    "test_every_operator_in_every_type",
    "test_results_compiled",
}


def select(items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The fast tests, and all others."""
    left_out = set(NOT_FAST.read_text().splitlines()) if NOT_FAST.exists() else set()
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
