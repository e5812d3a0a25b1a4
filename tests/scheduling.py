"""Gives whole files of tests to the processes of a run (`--dist loadfile`), files with slow tests first.

pytest-xdist starts with the file that has most tests, so a long file with few tests may run alone at the end. It also
reads the state of all earlier tests after each test: ten seconds of processor time for 20,000 tests.

Items of the processes are files that are not imported yet (tests/late_import.py), or tests if options forbid that.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.fast import not_fast_functions

# The tests of these folders share data that take a process several seconds, so one process runs them all.
TOGETHER = ("tests/core/conformance/",)


class FileScheduling(LoadFileScheduling):
    """`LoadFileScheduling` that forgets items when they are complete. Files run in the order of the collection."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False
        config.pluginmanager.register(self)  # for the hook below
        self._places: dict[str, int] = {}
        self._running: dict[str, str] = {}  # the test of each file that has started last
        self._tests = self._items = 0  # complete ones
        self._session: Any = config.pluginmanager.getplugin("session")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid.partition("::")[0]] = nodeid
        self._tests += 1
        self._expect_tests()

    def remove_node(self, node: Any) -> str | None:
        """Forget a process that has ended; returns the test that it ran if it died."""
        item = super().remove_node(node)
        return item if item is None else self._running.get(item, item)

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        nodeid = self.registered_collections[node][item_index]
        units, name = self.assigned_work[node], unit(nodeid)
        units[name].pop(nodeid)
        if not units[name]:
            del units[name]
        self._items += 1
        self._expect_tests()
        self._reschedule(node)

    def _expect_tests(self) -> None:
        """Tell pytest, which prints the progress, how many tests the run has if all items have as many as so far."""
        of_all_items = self._tests * len(self.collection or ()) // max(self._items, 1)
        self._session.testscollected = max(self._tests, of_all_items)

    def _reschedule(self, node: Any) -> None:
        """Give a process another file when it has begun with the last one it got."""
        if node.shutting_down or not self.workqueue or self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)

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
    slow = Counter(map(unit, not_fast_functions()))
    return sorted(items, key=lambda item: -slow[unit(item.nodeid)])
