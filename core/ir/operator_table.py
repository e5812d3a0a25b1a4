"""`OperatorTable`: a dictionary of functions by the name of an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F")


class OperatorTable(dict[str, F]):
    """Maps names of operators to functions, such as those of one pass; the decorator `add` enters a function."""

    def add(self, *ops: str) -> Callable[[F], F]:
        """A decorator that enters a function for these operators, and returns the function unchanged."""

        def enter(function: F) -> F:
            self.update(dict.fromkeys(ops, function))
            return function

        return enter
