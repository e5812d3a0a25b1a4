"""Checks of a recorded history. They hold whatever was killed during the run; each yields its violations."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from loadtest.chaos.history import ALIASES, Operation
from loadtest.chaos.linearizability import ANY, Entry, find_violation


@dataclass
class ModelFacts:
    """The facts about one model's versions in a history."""

    model: str
    operations: list[Operation]
    uploads: dict[int, Operation] = field(default_factory=dict)  # by factor
    factors: dict[int, dict[int, Operation]] = field(default_factory=dict)  # version -> factor -> first answer with it
    known: dict[int, float] = field(default_factory=dict)  # version -> when the first client had seen it
    deletes: dict[int, list[Operation]] = field(default_factory=dict)  # deletes that may have taken effect

    @property
    def numbers(self) -> dict[int, int]:
        """The version of each upload (by factor), as far as any client has seen it."""
        return {factor: version for version, seen in self.factors.items() for factor in seen}

    def expected(self, operation: Operation) -> Iterator[int]:
        """The versions that must exist during an operation: those known before it.

        Left out are versions of which a delete that may have taken effect began before the operation's end.
        """
        for version, since in self.known.items():
            deletes = self.deletes.get(version, ())
            if since < operation.invoked and not any(delete.invoked <= operation.end for delete in deletes):
                yield version

    def gone_before(self, version: int, moment: float) -> bool:
        """True if a deletion of the version was acknowledged before `moment`."""
        return any(delete.outcome == "ok" and delete.end < moment for delete in self.deletes.get(version, ()))


def facts_by_model(history: Sequence[Operation]) -> list[ModelFacts]:
    """Collect the facts of a history, one object per model."""
    found: dict[str, ModelFacts] = {}
    for operation in sorted(history, key=lambda it: it.invoked):
        if operation.model:
            found.setdefault(operation.model, ModelFacts(operation.model, [])).operations.append(operation)
    for facts in found.values():
        for operation in facts.operations:
            if operation.kind == "upload" and operation.factor is not None:
                facts.uploads[operation.factor] = operation
            elif operation.kind == "delete" and operation.outcome != "failed" and operation.version is not None:
                facts.deletes.setdefault(operation.version, []).append(operation)
        for operation in sorted(facts.operations, key=lambda it: it.end):
            for version, factor in seen_by(operation):
                facts.factors.setdefault(version, {}).setdefault(factor, operation)
                facts.known.setdefault(version, operation.end)
    return list(found.values())


def seen_by(operation: Operation) -> Iterator[tuple[int, int]]:
    """The (version, factor) pairs that a successful answer shows."""
    if operation.outcome != "ok":
        return
    if operation.kind in ("upload", "infer") and operation.version is not None and operation.factor is not None:
        yield operation.version, operation.factor
    elif operation.kind in ("versions", "audit"):
        for version, factor in operation.found.items():
            yield int(version), factor


def linearizability_violations(history: Sequence[Operation]) -> Iterator[str]:
    """Each alias of each model must be a linearizable register."""
    starts = sorted((op.invoked, op.end) for op in history if op.kind == "start" and op.completed is not None)
    for facts in facts_by_model(history):
        for alias in sorted({op.alias for op in facts.operations if op.alias}):
            violation = find_violation(list(entries(facts, alias, starts)))
            if violation is not None:
                yield f"{facts.model}, alias {alias}: {violation}"


def entries(facts: ModelFacts, alias: str, starts: Sequence[tuple[float, float]]) -> Iterator[Entry]:
    """The reads and writes of one alias; a call that changed nothing is a read.

    An operation that a killed server did not answer can take effect until the next server is ready.
    """
    numbers = facts.numbers
    for op in facts.operations:
        if op.kind in ALIASES and op.alias == alias and op.outcome != "failed":
            value = numbers.get(op.factor or 0, ANY) if op.version is None else op.version
            if op.outcome == "ok":
                yield Entry(op.invoked, op.end, value, op.changed, said=_description(op, value))
            elif value != ANY or op.kind != "upload":  # not an upload that no client has ever seen
                yield Entry(op.invoked, _latest(op, starts), value, True, True, _description(op, value))
        elif op.kind == "aliases" and op.outcome == "ok":
            named = op.found.get(alias)
            yield Entry(op.invoked, op.end, named, False, said=_description(op, named))
        elif op.kind == "infer" and op.outcome == "ok" and (op.asked or "live") == alias:
            yield Entry(op.invoked, op.end, op.version, False, said=_description(op, op.version))


def _latest(op: Operation, starts: Sequence[tuple[float, float]]) -> float:
    at = bisect_right(starts, (max(op.invoked, op.tried), math.inf))
    return starts[at][1] if at < len(starts) else math.inf


def _description(op: Operation, value: int | None) -> str:
    shown = "an unknown version" if value == ANY else f"version {value}"
    return f"{op.kind} of {op.client}: {shown} at {op.invoked:.3f} to {op.end:.3f} s"


def order_violations(history: Sequence[Operation]) -> Iterator[str]:
    """The numbers of changes must be distinct, and in the order in which the changes were made.

    A call that changed nothing is answered with the number of the change before it.
    """
    for facts in facts_by_model(history):
        numbered = [op for op in facts.operations if op.generation is not None]
        latest: Operation | None = None  # that began last, among the calls whose place is before
        for (_, is_after), group in groupby(sorted(numbered, key=_place), key=_place):
            operations = list(group)
            for op in operations:
                if latest is not None and op.end < latest.invoked:
                    yield f"{facts.model}: {_change(op)} was over before {_change(latest)} began"
            for before, op in () if is_after else pairwise(operations):
                yield f"{facts.model}: one number for two changes: {_change(before)} and {_change(op)}"
            latest = max(operations if latest is None else [latest, *operations], key=lambda op: op.invoked)


def _place(op: Operation) -> tuple[int, bool]:
    """The place of a numbered call in the order of changes; calls that changed nothing are after their number."""
    return op.generation or 0, not op.changed


def _change(op: Operation) -> str:
    when = f"{op.invoked:.3f} to {op.end:.3f} s"
    return f"{op.kind} of {op.client} (change {op.generation}, version {op.version}, {when})"


def lost_versions(history: Sequence[Operation]) -> Iterator[str]:
    """A version that was acknowledged or seen, and was not deleted, must be listed and must answer."""
    for facts in facts_by_model(history):
        for op in facts.operations:
            if op.kind in ("versions", "audit") and op.outcome == "ok":
                for version in facts.expected(op):
                    if str(version) not in op.found:
                        yield f"{facts.model}: version {version} is not in {op.kind} at {op.invoked:.3f} s"
            elif op.kind in ("infer", "move") and op.status == 404:
                asked = op.asked if op.kind == "infer" else str(op.version)
                if asked.isdigit() and int(asked) in facts.expected(op):
                    yield f"{facts.model}: version {asked} is not found by {op.kind} at {op.invoked:.3f} s"


def reappeared_versions(history: Sequence[Operation]) -> Iterator[str]:
    """A version whose deletion was acknowledged must not be seen again."""
    for facts in facts_by_model(history):
        for op in facts.operations:
            if op.outcome != "ok" or op.kind in ("delete", "start"):
                continue
            shown = {int(v) for v in op.found} if op.kind != "aliases" else set(op.found.values())
            shown |= {op.version} if op.version is not None else set()
            for version in sorted(shown):
                if facts.gone_before(version, op.invoked):
                    yield f"{facts.model}: version {version} was deleted, and is in {op.kind} at {op.invoked:.3f} s"


def value_violations(history: Sequence[Operation]) -> Iterator[str]:
    """Answers must come from the requested version. Each version has the values of one upload, and vice versa."""
    for facts in facts_by_model(history):
        for op in facts.operations:
            if op.kind == "infer" and op.outcome == "ok" and op.asked.isdigit() and int(op.asked) != op.version:
                yield f"{facts.model}: version {op.version} answered for version {op.asked} at {op.invoked:.3f} s"
        of: dict[int, int] = {}
        for version, seen in sorted(facts.factors.items()):
            if len(seen) > 1:
                yield f"{facts.model}: version {version} has the values of uploads {sorted(seen)}"
            for factor, op in seen.items():
                yield from _upload_violations(facts, version, factor, op)
                if of.setdefault(factor, version) != version:
                    yield f"{facts.model}: upload {factor} became versions {of[factor]} and {version}"


def _upload_violations(facts: ModelFacts, version: int, factor: int, op: Operation) -> Iterator[str]:
    upload = facts.uploads.get(factor)
    at = f"{op.kind} at {op.invoked:.3f} s"
    if upload is None:
        yield f"{facts.model}: version {version} has values of no upload ({factor}), in {at}"
    elif upload.outcome == "failed":
        yield f"{facts.model}: version {version} is upload {factor}, which was refused or cut off, in {at}"
    elif upload.invoked > op.end:
        yield f"{facts.model}: version {version} is upload {factor}, which began later, in {at}"


def internal_errors(history: Sequence[Operation]) -> Iterator[str]:
    """No request may be answered with status 500."""
    for op in history:
        if op.status == 500:
            yield f"{op.model}: {op.kind} of {op.client} was answered with 500 at {op.invoked:.3f} s"


PROMISES: dict[str, Callable[[Sequence[Operation]], Iterator[str]]] = {
    "each alias is a linearizable register": linearizability_violations,
    "changes are numbered in their order": order_violations,
    "nothing acknowledged is lost": lost_versions,
    "nothing deleted comes back": reappeared_versions,
    "answers have the values of the version that answers": value_violations,
    "nothing is answered with 500": internal_errors,
}
