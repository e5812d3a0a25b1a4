"""GPU kernels are compiled and interpreted by Triton, which only `make test-cuda` installs.

It installs the version whose interpreter Lathe supports for all tests, and the oldest supported compiler for the tests
that compile.
"""

from __future__ import annotations

import pytest

from lathe.core.kernels.cuda.toolchain import is_interpreter_supported, triton_version

if not triton_version():
    collect_ignore_glob = ["test_kernels*.py", "test_bindings.py"]  # reported by tests/conftest.py at the end


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With another version of Triton's interpreter, run only tests that compile; the rest are deselected."""
    if not triton_version() or is_interpreter_supported():
        return
    left = [item for item in items if _interprets(item)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if not _interprets(item)]


def _interprets(item: pytest.Item) -> bool:
    name = item.nodeid.rpartition("/")[2]
    return name.startswith("test_kernels_") and "compil" not in name
