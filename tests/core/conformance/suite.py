"""The cases of ONNX's backend test suite over `lathe.core.onnx_backend`: the compiled path, its fallbacks included."""

from __future__ import annotations

import unittest
import warnings
from collections.abc import Callable
from functools import cache

with warnings.catch_warnings():
    # The package computes the expected values of its cases when it is imported, some of them not finite.
    warnings.simplefilter("ignore")
    import onnx.backend.test

    import lathe.core.onnx_backend

# `make test` runs every seventh case of the sorted names, in which the cases of an operator are adjacent.
STRIDE = 7


@cache
def cases() -> dict[str, Callable[[], None]]:
    """The function of each CPU case, by its name without the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        groups = onnx.backend.test.BackendTest(lathe.core.onnx_backend, __name__).test_cases
    found = {}
    for group in groups.values():
        for name in unittest.defaultTestLoader.getTestCaseNames(group):
            if name.endswith("_cpu"):
                found[name.removesuffix("_cpu")] = _runner(group, name)
    return dict(sorted(found.items()))


def _runner(group: type[unittest.TestCase], name: str) -> Callable[[], None]:
    def run() -> None:
        try:
            getattr(group(name), name)()
        except unittest.SkipTest as reason:  # the runner's signal that the backend does not take the model
            raise AssertionError(f"{name} is not compatible: {reason}") from None

    return run
