"""The history of a run: the clients' operations and their outcomes, one per line of a JSON-lines file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import orjson

Outcome = Literal["ok", "failed", "unknown"]
"""`failed`: refused, so without effect. `unknown`: the connection ended first, so the effect is unknown."""

ALIASES = ("move", "rollback", "upload")  # kinds of operation that may write an alias


@dataclass(frozen=True, slots=True)
class Operation:
    """One call, or one start of the server; times of the monotonic clock, in seconds.

    Each upload multiplies by a distinct factor, so an answer shows which upload it comes from.
    """

    kind: str  # upload, move, rollback, delete, infer, aliases, versions, audit, start
    client: str
    invoked: float
    completed: float | None  # None: no response came, or status 500
    outcome: Outcome
    tried: float = 0.0  # start of a change's last call; 0 if the operation is no change
    model: str = ""
    status: int = 0  # of HTTP; 0 if no response came
    alias: str = ""  # the alias written; for an upload `live` if it asks for promotion
    asked: str = ""  # by an inference: a version, an alias, or nothing
    version: int | None = None  # the version written, or the one that answered
    factor: int | None = None  # of the upload, or of the answer's values
    generation: int | None = None  # the number of the change, or of the model's last change if nothing was changed
    changed: bool = True  # False: the answer says that the alias named this version already
    found: dict[str, int] = field(default_factory=dict)  # aliases: alias to version; versions, audit: version to factor

    @property
    def end(self) -> float:
        """`completed`, or infinity without a response."""
        return float("inf") if self.completed is None else self.completed


def write_history(path: Path, operations: Iterable[Operation]) -> None:
    """Write a history for `read_history`."""
    path.write_bytes(b"".join(orjson.dumps(asdict(operation)) + b"\n" for operation in operations))


def read_history(path: Path) -> list[Operation]:
    """Read a history. ValueError for a line that is no operation."""
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found.append(Operation(**orjson.loads(line)))
        except (TypeError, orjson.JSONDecodeError) as error:
            raise ValueError(f"{path.name}, line {number}: no operation: {line[:80]!r}: {error}") from error
    return found
