"""Which inputs of which operators were reached by what kind of operand, as a table; and why some cells are empty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.fuzz.graphs.grower import KINDS


def counted(results: Sequence[dict[str, Any]]) -> Counter[tuple[str, int, str]]:
    """Operands of nodes that some output needs, by operator, input position and kind."""
    cells: Counter[tuple[str, int, str]] = Counter()
    for result in results:
        for key, count in result.get("kinds", {}).items():
            op, index, kind = key.split(":")
            cells[op, int(index), kind] += count
    return cells


def page(results: Sequence[dict[str, Any]]) -> str:
    cells = counted(results)
    rows = sorted({(op, index) for op, index, _ in cells})
    lines = [
        "# Random graphs: what was reached",
        "",
        f"{len(results)} graphs.",
        "",
        "| operator | input | " + " | ".join(KINDS) + " |",
        "|---|---|" + "---|" * len(KINDS),
    ]
    for op, index in rows:
        numbers = [str(cells[op, index, kind] or "") for kind in KINDS]
        lines.append(f"| {op} | {index} | " + " | ".join(numbers) + " |")
    return "\n".join(lines) + "\n"
