"""Cooperative multitasking: a generator does its work in short steps, pauses after each, and returns its result.

Pure Python code releases the interpreter lock regularly; one long call into C does not. So long work is split into
many short calls, and between them its thread may continue with other requests.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

Result = TypeVar("Result")
Steps: TypeAlias = Generator[None, None, Result]


def run_all(steps: Steps[Result]) -> Result:
    """Do all steps without a pause, and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
