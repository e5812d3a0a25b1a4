"""Tests beside PyTorch, which no other test needs: `pip install .[oracle]` brings it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

INSTALLED = find_spec("torch") is not None
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the skipped tests and the package that they need."""
    if not INSTALLED:
        terminalreporter.write_line("left out: comparisons with PyTorch (pip install .[oracle])")
