"""A process of a parallel run imports a file of tests when the file's turn comes, not before the run begins.

pytest-xdist lets each process import all files: 8 s of processor time, and 15 s if Python has not compiled them yet.
Here a process finds the files, and tells pytest-xdist of one item for each. When this item runs, its file is imported,
its tests are selected as usual, and they run. The reports are those of the tests.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.random_numbers import drawn_at_import, restart

# Options that select or order tests by those of all files, or by the names of tests.
_NEEDS_ALL_TESTS = ("lf", "failedfirst", "newfirst", "stepwise", "collectonly", "loadgroup")


def is_possible(config: pytest.Config) -> bool:
    """Whether no option needs the tests of all files at once, and no argument names a test."""
    if config.getoption("every") > 1 or any(config.getoption(name, False) for name in _NEEDS_ALL_TESTS):
        return False
    return not any("::" in argument for argument in config.args)


class FileOfTests(pytest.Item):
    """The tests of a file that is not imported yet."""

    parent: LateModule

    def tests(self) -> list[pytest.Item]:
        """Import the file; returns its selected tests in order, none if the import fails, which is reported."""
        self.parent.is_due = True
        with without_collector():
            items = list(self.session.genitems(self.parent))
            self.config.hook.pytest_collection_modifyitems(session=self.session, config=self.config, items=items)
        return items

    def runtest(self) -> None:
        raise AssertionError("the plugin LateImport runs the tests of a file, one by one")


class LateModule(pytest.Module):
    """A file of tests that at first is one item, and its tests when `is_due`."""

    is_due = False

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        if self.is_due:
            restart()  # the test before has drawn random numbers
            tests = list(super().collect())
            if names := drawn_at_import():
                raise self.CollectError(f"draws at import, use made_at_import: {', '.join(names)}")
            yield from tests
            return
        item = FileOfTests.from_parent(self, name=self.name, nodeid=self.nodeid)
        item.add_marker(pytest.mark.timeout(0))  # the tests have limits of their own
        yield item


class LateImport:
    """The plugin of a process of pytest-xdist that gets whole files."""

    @pytest.hookimpl
    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Module:
        return LateModule.from_parent(parent, path=module_path)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
        """Select files by nothing: `-m` and `-k` select tests."""
        option = config.option
        selected_by = option.keyword, option.markexpr
        if any(isinstance(item, FileOfTests) for item in items):
            option.keyword = option.markexpr = ""
        try:
            return (yield)
        finally:
            option.keyword, option.markexpr = selected_by

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run the tests of a file, each in the file's place among the items: pytest-xdist looks there for its name."""
        if not isinstance(item, FileOfTests):
            return None
        session = item.session
        place = session.items.index(item)
        tests = item.tests()
        for test, next_test in zip(tests, [*tests[1:], nextitem], strict=False):  # there may be no test
            session.items[place] = test
            item.config.hook.pytest_runtest_protocol(item=test, nextitem=next_test)
            if session.shouldfail or session.shouldstop:
                break
        session.items[place] = item
        if not tests:  # the tests before this file have left what it shares with them to its last test
            session._setupstate.teardown_exact(nextitem)
        return True


@contextmanager
def without_collector() -> Iterator[None]:
    """Pause the garbage collector while many objects are made that nearly all live on."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
