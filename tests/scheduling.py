"""Gives whole files of tests to the processes of a run (`--dist loadfile`), files with slow tests first.

pytest-xdist starts with the file that has most tests, so a long file with few tests may run alone at the end. It also
reads the state of all earlier tests after each test: ten seconds of processor time for 20,000 tests.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.fast import NOT_FAST

# The tests of these folders share data that take a process several seconds, so one process runs them all.
TOGETHER = ("tests/core/conformance/",)


class FileScheduling(LoadFileScheduling):
    """`LoadFileScheduling` that forgets tests when they are complete. Files run in the order of the collection."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False
        self._places: dict[str, int] = {}

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        nodeid = self.registered_collections[node][item_index]
        units, name = self.assigned_work[node], unit(nodeid)
        units[name].pop(nodeid)
        if not units[name]:
            del units[name]
        self._reschedule(node)

    def _assign_work_unit(self, node: Any) -> None:
        name, tests = self.workqueue.popitem(last=False)
        self.assigned_work[node][name] = tests
        if not self._places:  # the same in all processes
            self._places = {nodeid: place for place, nodeid in enumerate(self.registered_collections[node])}
        node.send_runtest_some([self._places[nodeid] for nodeid in tests])


def unit(nodeid: str) -> str:
    """The file of a test, or the folder whose tests one process runs."""
    return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.partition("::")[0])


def slow_files_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests in an order that begins with those of files with many slow functions: see tests/fast.py."""
    slow = Counter(map(unit, NOT_FAST.read_text().splitlines()))
    return sorted(items, key=lambda item: -slow[unit(item.nodeid)])
