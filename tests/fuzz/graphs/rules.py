"""The table of rules: the operators that the generator can add to a graph, with their opsets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.fuzz.graphs.grower import Grower


@dataclass(frozen=True)
class Rule:
    """Adds one operator and its operands. `since` and `until` are opsets, both included."""

    op: str
    build: Callable[[Grower], Any]
    since: int = 1
    until: int = 99
    weight: float = 1.0


RULES: list[Rule] = []


def rule(*ops: str, since: int = 1, until: int = 99, weight: float = 1.0) -> Callable[[Any], Any]:
    """Register a function of a grower as a rule; for several operators its second argument is the operator."""

    def register(build: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            call = (lambda f, op=op: build(f, op)) if len(ops) > 1 else build
            RULES.append(Rule(op, call, since, until, weight))
        return build

    return register
