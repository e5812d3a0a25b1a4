"""Runs a Python module as `python -m` does, but without some packages:

python -m tests.loadtest.blocked_imports orjson,pydantic loadtest.gpu --small"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import runpy
import sys
from collections.abc import Sequence
from types import ModuleType

VARIABLE = "LATHE_TEST_BLOCKED"  # tells child processes which packages are blocked


class Blocked(importlib.abc.MetaPathFinder):
    """An import finder that refuses the packages, as if they were not installed."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in self._packages:
            raise ModuleNotFoundError(f"No module named '{name}' (blocked)", name=name)
        return None


def block(packages: str) -> None:
    """Block these packages from now on; names separated by commas."""
    sys.meta_path.insert(0, Blocked(packages.split(",")))


if __name__ == "__main__":
    os.environ[VARIABLE] = sys.argv[1]
    block(sys.argv[1])
    module, sys.argv = sys.argv[2], sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
