"""What clients did and what they were answered: one operation per line of a JSON-lines file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import orjson

Outcome = Literal["ok", "failed", "unknown"]
"""`failed`: refused, so without effect; `unknown`: the connection ended first, so perhaps with its effect."""

ALIASES = ("move", "rollback", "upload")  # kinds that may write an alias


@dataclass(frozen=True, slots=True)
class Operation:
    """One call, or one start of the server; times of the monotonic clock, in seconds.

    Each upload multiplies by a factor of its own, so answers say which upload they come from.
    """

    kind: str  # upload, move, rollback, delete, infer, aliases, versions, audit, start
    client: str
    invoked: float
    completed: float | None  # None: no answer came
    outcome: Outcome
    tried: float = 0.0  # when it was last called, where that was more than once
    model: str = ""
    status: int = 0  # of HTTP; 0 where no answer came
    alias: str = ""  # that is written, and for an upload `live` where it asks to be promoted
    asked: str = ""  # by an inference: a version, an alias, or nothing
    version: int | None = None  # that was written, or that answered
    factor: int | None = None  # of the upload, or of the answer's values
    generation: int | None = None  # the change's number
    found: dict[str, int] = field(default_factory=dict)  # aliases: alias to version; versions, audit: version to factor

    @property
    def end(self) -> float:
        """When it was over; infinite where nobody knows."""
        return float("inf") if self.completed is None else self.completed


def write_history(path: Path, operations: Iterable[Operation]) -> None:
    """Write a history that :func:`read_history` reads."""
    path.write_bytes(b"".join(orjson.dumps(asdict(operation)) + b"\n" for operation in operations))


def read_history(path: Path) -> list[Operation]:
    """Raises ValueError for a line that is no operation."""
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found.append(Operation(**orjson.loads(line)))
        except (TypeError, orjson.JSONDecodeError) as error:
            raise ValueError(f"{path.name}, line {number}: no operation: {line[:80]!r}: {error}") from error
    return found
