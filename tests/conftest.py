"""Fixtures and hooks of all tests: one thread per numeric library, reproducible hypothesis runs, the project's folder.

Every session whose model is declared batchable is checked for rows that influence each other (`tests.batching`)."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests.compiled_code import use_own_cache

# NumPy reads these at its first import, which happens after this file. Several test processes share the cores.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

use_own_cache()
os.environ.setdefault("LATHE_CHECK_PLANS", "1")  # check every plan that is compiled here; child processes inherit it

# A shell that starts the suite in the background lets it ignore Ctrl-C, and so would every process that a test starts.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("lathe", deadline=None, derandomize=True, database=None)
settings.load_profile("lathe")
# Hypothesis also draws constants from the source of all modules that are imported so far. Examples would depend on
# which files of tests the process has imported.
providers._get_local_constants = lambda: providers._local_constants

_BY_FILE = "lathe_by_file"  # the key under which a test process learns that it gets whole files
_BATCHING = "lathe_batching"  # the key under which a test process sends its tally to the reporting process
_TALLY: pytest.StashKey[Any] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", type=int, default=1, metavar="N", help="run every Nth of the tests that are selected")
    parser.addoption("--native", action="store_true", help="run all cases of `sample(n, native=True)`")
    parser.addoption("--fast", action="store_true", help="run what `make test-fast` runs, see tests/fast.py")
    parser.addoption("--fast-record", type=Path, metavar="FILE", help="write down which tests are not fast")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files all of whose tests would be deselected: that takes half of the time of a collection."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    if config.option.markexpr == "not slow" and _ALL_SLOW.search(collection_path.read_text()):
        return True
    if config.getoption("--fast"):
        from tests.fast import is_left_out

        return is_left_out(collection_path, config.rootpath) or None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the garbage collector.

    Nearly all objects that a collection makes live until the end, so the collector finds nothing and takes a third of
    the time. `freeze` saves it from reading them again during the tests, which also make few cycles.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000)
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.config.getoption("--fast"):
        from tests.fast import keep_first_cases

        keep_first_cases(metafunc)


_ALL_SLOW = re.compile(r"^pytestmark = \[?pytest\.mark\.slow\b", re.MULTILINE)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Apply `--fast`, then `--every N`: every Nth test, spread over all files, the same tests each time. Then order.

    pytest.UsageError for a test whose name contains an address: processes of one run must agree on all names.
    """
    if unstable := next((item.nodeid for item in items if " at 0x" in item.nodeid), None):
        raise pytest.UsageError(f"{unstable}: expected a name without addresses; give the parameters `ids`")
    if config.getoption("--fast"):
        from tests.fast import select

        items[:], others = select(items)
        config.hook.pytest_deselected(items=others)
    stride = config.getoption("--every")
    config.hook.pytest_deselected(items=[item for place, item in enumerate(items) if place % stride])
    items[:] = items[::stride]
    if getattr(config, "workerinput", {}).get(_BY_FILE):
        from tests.scheduling import slow_files_first

        items[:] = slow_files_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process of pytest-xdist how tests are given to it; there the option is always "no"."""
    node.workerinput[_BY_FILE] = node.config.option.dist == "loadfile"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.option.dist != "loadfile":
        return None
    from tests.scheduling import FileScheduling

    return FileScheduling(config, log)


_counted: dict[str, int] = {}  # cases of a function with the mark `sample` that were collected


def pytest_itemcollected(item: pytest.Item) -> None:
    """Of a function with the mark `sample(n)`, every nth case runs in `make test`; the others are slow.

    `native=True` says that the cases test generated code. The runs for other CPUs and with checks of the heap pass
    `--native`, and then none of these cases is slow: no run of slow tests checks them in this way.
    """
    mark = item.get_closest_marker("sample")
    if mark is not None and not (mark.kwargs.get("native") and item.config.getoption("--native")):
        name = item.nodeid.partition("[")[0]
        count = _counted[name] = _counted.get(name, -1) + 1
        if count % mark.args[0]:
            item.add_marker(pytest.mark.slow)


_died: list[str] = []  # workers of this run that died, and internal errors of workers


def pytest_configure(config: pytest.Config) -> None:
    from tests.batching import Tally  # imported here because it imports NumPy

    config.stash[_TALLY] = Tally()
    config.addinivalue_line(
        "markers", "sample(n, native=False): every nth case runs in `make test`, all in `make test-all`, see `--native`"
    )
    if (path := config.getoption("--fast-record")) is not None and not hasattr(config, "workerinput"):
        from tests.fast import Recorder

        config.pluginmanager.register(Recorder(path))
    if getattr(config, "workerinput", {}).get(_BY_FILE):
        from tests import late_import

        if late_import.is_possible(config):
            config.pluginmanager.register(late_import.LateImport())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Add the tally of a worker, and record a worker that died: pytest-xdist leaves out its remaining tests."""
    if error:
        _died.append(f"worker {node.gateway.id} died ({error})")
    plain = getattr(node, "workeroutput", {}).get(_BATCHING)
    if plain is not None:
        node.config.stash[_TALLY].add(plain)


def pytest_internalerror() -> None:
    """Record an internal error: pytest-xdist reports one of a worker, and ends as if all tests had passed."""
    _died.append("an internal error ended a process")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the counts of checks, the skipped tests, and the commands that run those."""
    from tests.core.targets import skipped_targets  # imports NumPy

    for line in _died:
        terminalreporter.write_line(f"ERROR: {line}: the run is not complete", red=True)
    for line in config.stash[_TALLY].lines():
        terminalreporter.write_line(line)
    lines = skipped_targets()
    if "LATHE_EXPORTERS" not in os.environ:
        lines.append("the exporters of PyTorch, Paddle and TensorFlow (make test-exporters)")
    if find_spec("triton") is None:
        lines.append("kernels for GPUs, compiled and interpreted (make test-cuda)")
    for line in lines:
        terminalreporter.write_line(f"left out: {line}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if a worker died, whatever the worker was running. A worker sends its tally."""
    if _died:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_BATCHING] = session.config.stash[_TALLY].plain()


@pytest.fixture(scope="session", autouse=True)
def _check_row_independence(pytestconfig: pytest.Config) -> Iterator[None]:
    """Check every session whose model is declared batchable at its first run."""
    from tests.batching import install

    uninstall = install(pytestconfig.stash[_TALLY])
    yield
    uninstall()


@pytest.fixture(scope="session", autouse=True)
def _compile_equal_code_once(project: Path) -> Iterator[None]:
    """Keep object files in the checkout, also for later runs; `make clean` deletes them."""
    from tests.object_files import install

    uninstall = install(project / ".lathe" / "test-objects")
    yield
    uninstall()


@pytest.fixture(autouse=True)
def _operators_of_a_test_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the operators that a test registers: other tests look at all operators."""
    tables = {
        "lathe.core.ops.opdef.registry": ("_REGISTRY", "_REVISIONS"),
        "lathe.core.kernels.choose": ("_CUSTOM_ROWS",),
    }
    for name, tables_of_module in tables.items():
        if (module := sys.modules.get(name)) is not None:
            for table in tables_of_module:
                monkeypatch.setattr(module, table, dict(getattr(module, table)))


@pytest.fixture(autouse=True)
def _no_batch_check_failed(pytestconfig: pytest.Config) -> Iterator[None]:
    """Fail the test when a batch check failed, even if the test or one of its threads caught the error."""
    failures = pytestconfig.stash[_TALLY].failures
    before = len(failures)
    yield
    assert failures[before:] == []


_drew_at_import: list[str] = []  # modules of this run that drew random numbers when they were imported


def pytest_collectreport(report: pytest.CollectReport) -> None:
    from tests.random_numbers import drawn_at_import

    _drew_at_import.extend(f"{report.nodeid}: {name}" for name in drawn_at_import())


def pytest_collection_finish() -> None:
    """Refuse numbers that depend on which modules were imported before."""
    assert not _drew_at_import, f"modules draw at import, use made_at_import: {', '.join(_drew_at_import)}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Random numbers are the same whichever tests ran before."""
    from tests.random_numbers import restart

    restart()


@pytest.fixture(scope="session")
def project() -> Path:
    """The folder that holds pyproject.toml."""
    return Path(__file__).resolve().parent.parent
