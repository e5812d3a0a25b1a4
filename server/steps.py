"""Work in steps: a generator that pauses between short pieces of its work, and returns its result.

Pure Python gives the interpreter lock away by itself; one long call into C does not. So long work makes many short
calls, and pauses between them, where its thread may turn to the work of others.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

Result = TypeVar("Result")
Steps: TypeAlias = Generator[None, None, Result]


def whole(steps: Steps[Result]) -> Result:
    """Do all the work without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
