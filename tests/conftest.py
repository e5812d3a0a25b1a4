"""What every test shares: one thread per numeric library, reproducible hypothesis runs, where the project is."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

# read when NumPy is first imported, which tests do after this file: several test processes share the cores
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

os.environ.setdefault("LATHE_CHECK_PLANS", "1")  # every plan that is made here is checked; child processes inherit it

settings.register_profile("lathe", deadline=None, derandomize=True, database=None)
settings.load_profile("lathe")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out, and how to run it."""
    if "LATHE_EXPORTERS" not in os.environ:
        left_out = "the exporters of PyTorch, Paddle and TensorFlow (make test-exporters)"
        terminalreporter.write_line(f"left out: {left_out}")
    if find_spec("triton") is None:
        terminalreporter.write_line("left out: kernels for GPUs, compiled and interpreted (make test-cuda)")


@pytest.fixture(scope="session")
def project() -> Path:
    """The folder that holds pyproject.toml."""
    return Path(__file__).resolve().parent.parent
