"""GPU kernels are compiled and interpreted by Triton, which only `make test-cuda` installs.

It installs the version whose interpreter Lathe supports for all tests, and the oldest supported compiler for the tests
that compile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
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


@pytest.fixture(autouse=True)
def _tensor_cores_truncate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products by TF32 in the interpreter read 10 bits of mantissa, as tensor cores do; by itself it reads all 23."""
    if is_interpreter_supported():
        from triton._C.libtriton import ir
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

        exact = InterpreterBuilder.create_dot

        def truncated(operand: Any) -> Any:
            if operand.data.dtype != np.float32:
                return operand
            bits = np.ascontiguousarray(operand.data).view(np.int32)
            return TensorHandle((bits & np.int32(-0x2000)).view(np.float32), operand.dtype)

        def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, most: Any) -> Any:
            factors = map(truncated, (a, b)) if precision == ir.INPUT_PRECISION.TF32 else (a, b)
            return exact(self, *factors, d, precision, most)

        monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
