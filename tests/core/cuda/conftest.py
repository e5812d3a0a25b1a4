"""Kernels for GPUs are compiled and interpreted by Triton, which only `make test-cuda` installs: the version whose
interpreter Lathe knows for all tests, and the oldest one that Lathe compiles with for those that compile."""

from __future__ import annotations

import pytest

from core.kernels.cuda.toolchain import interprets, triton_version

if not triton_version():
    collect_ignore_glob = ["test_kernels*.py", "test_bindings.py"]  # tests/conftest.py says so at the end of the run


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where Triton's interpreter is another one, only what compiles kernels; pytest counts the rest as deselected."""
    if not triton_version() or interprets():
        return
    left = [item for item in items if _interprets(item)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if not _interprets(item)]


def _interprets(item: pytest.Item) -> bool:
    name = item.nodeid.rpartition("/")[2]
    return name.startswith("test_kernels_") and "compil" not in name
