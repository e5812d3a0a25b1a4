"""What every test shares: one thread per numeric library, reproducible hypothesis runs, where the project is; and every
session that says so is asked whether the rows of a batch stay apart (`tests.batching`)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# read when NumPy is first imported, which tests do after this file: several test processes share the cores
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

os.environ.setdefault("LATHE_CHECK_PLANS", "1")  # every plan that is made here is checked; child processes inherit it

# A shell that starts the suite in the background lets it ignore Ctrl-C, and so would every process that a test starts.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("lathe", deadline=None, derandomize=True, database=None)
settings.load_profile("lathe")

_BATCHING = "lathe_batching"  # the key under which a test process sends its tally to the one that reports
_TALLY: pytest.StashKey[Any] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", type=int, default=1, metavar="N", help="run every Nth of the tests that are selected")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a part of the tests that is spread over all files, the same each time."""
    stride = config.getoption("--every")
    config.hook.pytest_deselected(items=[item for place, item in enumerate(items) if place % stride])
    items[:] = items[::stride]


_died: list[str] = []  # workers of this run


def pytest_configure(config: pytest.Config) -> None:
    from tests.batching import Tally  # here, as it imports NumPy

    config.stash[_TALLY] = Tally()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take the tally of a worker; note one that died. pytest-xdist ends the run then, and what was left to that worker
    is not run."""
    if error:
        _died.append(f"worker {node.gateway.id} died ({error})")
    plain = getattr(node, "workeroutput", {}).get(_BATCHING)
    if plain is not None:
        node.config.stash[_TALLY].add(plain)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was checked and what was left out, and how to run it."""
    from tests.core.targets import left_out  # imports NumPy

    for line in _died:
        terminalreporter.write_line(f"ERROR: {line}: the run is not complete", red=True)
    for line in config.stash[_TALLY].lines():
        terminalreporter.write_line(line)
    lines = left_out()
    if "LATHE_EXPORTERS" not in os.environ:
        lines.append("the exporters of PyTorch, Paddle and TensorFlow (make test-exporters)")
    if find_spec("triton") is None:
        lines.append("kernels for GPUs, compiled and interpreted (make test-cuda)")
    for line in lines:
        terminalreporter.write_line(f"left out: {line}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run in which a worker died is no success, whatever was running in it. A worker hands its tally on."""
    if _died:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_BATCHING] = session.config.stash[_TALLY].plain()


@pytest.fixture(scope="session", autouse=True)
def _rows_stay_apart(pytestconfig: pytest.Config) -> Iterator[None]:
    """Every session whose model is declared batchable is checked at its first run."""
    from tests.batching import install

    uninstall = install(pytestconfig.stash[_TALLY])
    yield
    uninstall()


@pytest.fixture(autouse=True)
def _no_rows_have_met(pytestconfig: pytest.Config) -> Iterator[None]:
    """A test fails with its batches also where it, or a thread of it, has caught the error."""
    failures = pytestconfig.stash[_TALLY].failures
    before = len(failures)
    yield
    assert failures[before:] == []


@pytest.fixture(autouse=True)
def _drawn_alike() -> Iterator[None]:
    """Parameters begin with the same values whichever tests ran before."""
    from core.nn.init import seeded

    with seeded(0):
        yield


@pytest.fixture(scope="session")
def project() -> Path:
    """The folder that holds pyproject.toml."""
    return Path(__file__).resolve().parent.parent
