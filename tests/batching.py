"""Do the rows of a batch stay apart? `check_batching` asks a session that says so, on real feeds.

Rows of the feeds run alone, all together, in another order, and among random other rows in batches of other sizes. Each
row must give what it gives alone. `install` makes every test do this at the first run of each session whose model is
declared batchable; what was not checked is counted with its reason, and `summary` gives the counts.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from core.errors import LatheError
from core.ir.graph import Node
from core.ir.types import DType, MapType, SequenceType, TensorType, ValueType
from core.ops import registry
from core.runtime.session import Session

Arrays = dict[str, NDArray[Any]]

KEPT = 3  # rows of the feeds that are compared; more cost time and find little more
SIZES = (7, 18)  # of the batches of mixed company: odd and even, one below and one above a vector of float32
SLOW_S = 0.05  # a session whose row takes longer alone is not checked
BUDGET_S = 0.25  # a check that has taken longer stops

# How far a row may be from what it gives alone, as a part of its largest element: another place in the batch means
# other tiles, and sums in another order. Where no such kernel is involved the results are equal, and are asked to be.
_TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "tf32": 1e-2, "float16": 2e-2, "bfloat16": 5e-2}

EMPTY = "no run had any rows"  # a reason that a later run may end

_run = Session.run  # as it is without `install`


class RowsMeet(AssertionError):
    """A row of a batch gives another result than alone."""


@dataclass
class Tally:
    """What was checked, and what was not. Counts of sessions."""

    checked: int = 0
    seconds: float = 0.0
    left_out: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Mapping[str, Any]) -> None:
        """The tally of another process, as `plain` gives it."""
        self.checked += other["checked"]
        self.seconds += other["seconds"]
        self.left_out.update(other["left_out"])
        self.failures += other["failures"]

    def plain(self) -> dict[str, Any]:
        return {
            "checked": self.checked,
            "seconds": self.seconds,
            "left_out": dict(self.left_out),
            "failures": self.failures,
        }

    def lines(self) -> Iterator[str]:
        yield f"batching: the rows of {self.checked} sessions were checked in {self.seconds:.1f} s"
        for reason, count in sorted((+self.left_out).items()):
            yield f"batching: {count} not checked: {reason}"
        yield from (f"batching: FAILED {failure}" for failure in dict.fromkeys(self.failures))


@dataclass(frozen=True)
class Company:
    """What a batch is made of: the places of rows of the feeds (None: a stranger)."""

    label: str
    places: tuple[int | None, ...]


def check_batching(
    session: Session, feeds: Mapping[str, Any], answers: Mapping[str, Any] | None = None, seed: int = 0
) -> str:
    """Run rows of these feeds alone, in another order, among others and in other batch sizes; RowsMeet where a row
    gives something else than alone. Returns why the check was left out or broken off, "" if it was made.

    `feeds` are such that `session.run(feeds)` answers; `answers`, if given, are what it has answered. A row at the same
    place of a batch of the same size must be equal bit by bit, whatever the other rows are.
    """
    if answers is None:
        answers = _run(session, feeds)  # before anything is timed: it may have to be compiled
    if reason := _not_checkable(session, feeds):
        return reason
    check = _Check(session, {name: np.asarray(feeds[name]) for name in session.inputs}, np.random.default_rng(seed))
    return check.run(answers)


def _not_checkable(session: Session, feeds: Mapping[str, Any]) -> str:
    if not session.batching.batchable:
        return "the model is not declared batchable"
    if any(_draws(node) for node in _on_reference(session)):
        return "the model draws random numbers"
    if not all(len(np.asarray(feeds[name])) for name in session.inputs):
        return EMPTY
    return ""


def _plans(session: Session) -> list[Any]:
    return [share.plan for runner in session._shapes.made().values() for share in runner.shares]


def _on_reference(session: Session) -> list[Node]:
    return [node for plan in _plans(session) for node in plan.fallbacks.nodes]


def _draws(node: Node) -> bool:
    """Whether a node, or one of its nested graphs, draws random numbers; no compiled kernel does."""
    inner = (each for body in node.subgraphs for each in body.nodes)
    return (not registry.get(node.op).pure and node.op != "Dropout") or any(map(_draws, inner))


class _Check:
    """One session, and the rows that are followed through its batches."""

    def __init__(self, session: Session, arrays: Arrays, rng: np.random.Generator) -> None:
        self.session, self.arrays, self.rng = session, arrays, rng
        self.rows = len(next(iter(arrays.values())))
        self.kept = sorted(rng.choice(self.rows, min(self.rows, KEPT), replace=False).tolist())
        self.tolerances = _tolerances(session)
        self.wildness = 0 if session.may_not_end else len(_STRANGERS) - 1  # with these very rows it has ended
        self.stop = time.perf_counter() + BUDGET_S

    def run(self, answers: Mapping[str, Any]) -> str:
        began = time.perf_counter()
        alone = {self.kept[0]: self._answer((self.kept[0],))}
        if time.perf_counter() - began > SLOW_S:
            return f"a row takes more than {1000 * SLOW_S:.0f} ms"
        alone |= {row: self._answer((row,)) for row in self.kept[1:]}
        everyone = Company("the rows of the feeds", tuple(range(self.rows)))
        self._compare(everyone, self._with_rows(answers, self.rows), alone)
        for company in self._companies():
            if time.perf_counter() > self.stop:
                return f"broken off after {BUDGET_S} s"
            settled = self.session.settle(0)  # else code may be replaced by code that sums in another order
            first = self._answer(company.places)
            self._compare(company, first, alone)
            if None not in company.places:
                continue
            again = self._answer(company.places)  # other strangers
            if settled and self.session.settle(0):
                self._compare_exactly(company, again, first)
        return ""

    def _companies(self) -> Iterator[Company]:
        """Batches in which the rows are not alone."""
        others = [row for row in range(self.rows) if row not in self.kept]
        order = self.rng.permutation([*self.kept, *others][:8])
        yield Company("the rows of the feeds, in another order", tuple(order.tolist()))
        most = max(self.session.max_batch, len(self.kept))  # a device takes memory for larger ones when they come
        for size in dict.fromkeys(min(size, most) for size in SIZES):
            places: list[int | None] = [None] * size
            for row, place in zip(self.kept, self.rng.choice(size, len(self.kept), replace=False), strict=True):
                places[place] = row
            yield Company("among random rows", tuple(places))

    def _compare(self, company: Company, answers: Mapping[str, Any], alone: Mapping[int, Mapping[str, Any]]) -> None:
        """Each row against what it gives alone, up to rounding."""
        for place, row in enumerate(company.places):
            for name, expected in alone[row].items() if row in alone else ():
                self._same(name, answers[name][place], expected[0], company, place, self.tolerances[name])

    def _compare_exactly(self, company: Company, answers: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        """Each row against what it gave at the same place among others, bit by bit."""
        for place in (place for place, row in enumerate(company.places) if row is not None):
            for name, expected in before.items():
                self._same(name, answers[name][place], expected[place], company, place, 0.0)

    def _answer(self, places: Sequence[int | None]) -> Mapping[str, Any]:
        """The outputs for a batch."""
        return self._with_rows(self._run(places), len(places))

    def _with_rows(self, answers: Mapping[str, Any], rows: int) -> Mapping[str, Any]:
        """The outputs, each of which must have as many rows as the batch."""
        for name, answer in answers.items():
            if np.shape(answer)[:1] != (rows,):
                shape = list(np.shape(answer))
                raise RowsMeet(f"{self.session.description.name}: output '{name}' of {rows} rows has shape {shape}")
        return answers

    def _run(self, places: Sequence[int | None]) -> Arrays:
        """The outputs for a batch. Strangers that the model refuses (an index out of range) become less strange."""
        while True:
            try:
                return _run(self.session, {name: self._batch(array, places) for name, array in self.arrays.items()})
            except (LatheError, ArithmeticError, ValueError, Warning):
                if None not in places or self.wildness == 0:
                    raise
                self.wildness -= 1

    def _batch(self, array: NDArray[Any], places: Sequence[int | None]) -> NDArray[Any]:
        stranger = _STRANGERS[self.wildness]
        rows = [stranger(array, self.rng) if place is None else array[place] for place in places]
        return np.stack(rows).astype(array.dtype)

    def _same(self, name: str, got: Any, expected: Any, company: Company, place: int, tolerance: float) -> None:
        if isinstance(expected, dict):  # a map from label to number
            distance = _distance(*(np.array(list(each.values()), np.float32) for each in (got, expected)))
            distance = distance if list(got) == list(expected) else float("inf")
        else:
            distance = _distance(np.asarray(got), np.asarray(expected))
        if distance > tolerance:
            wanted = f"at most {tolerance:g}" if tolerance else "none"
            where = f"{company.label}: {len(company.places)} rows, this one at place {place}"
            raise RowsMeet(
                f"{self.session.description.name}: row {company.places[place]} of output '{name}' depends on its "
                f"company ({where}): it differs by {distance:.3g} of its largest element, expected {wanted}\n"
                f"got {got}\nexpected {expected}"
            )


def _distance(a: NDArray[Any], b: NDArray[Any]) -> float:
    """The greatest difference as a part of the largest finite element; infinity where NaN, infinity or kinds differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if a.dtype.kind not in "fV":  # V: bfloat16
        return 0.0 if np.array_equal(a, b) else float("inf")
    x, y = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
        return float("inf")
    gap = np.abs(x[finite] - y[finite]).max(initial=0.0)
    scale = np.abs(y[finite]).max(initial=0.0)
    return float(gap / scale) if scale else float(gap)


def _tolerances(session: Session) -> dict[str, float]:
    """By output: what rounding may do in the narrowest type that any kernel of the session computes in."""
    words = " ".join(" ".join((step.summary, *step.outputs)) for plan in _plans(session) for step in plan.steps)
    words += " ".join(line for plan in _plans(session) for line in plan.log)
    narrow = max((_TOLERANCES[name] for name in ("tf32", "float16", "bfloat16") if name in words), default=0.0)
    own = {name: _TOLERANCES.get(str(_number(type_)), 0.0) for name, type_ in session.outputs.items()}
    return {name: max(tolerance, narrow) if tolerance else 0.0 for name, tolerance in own.items()}


def _number(type_: ValueType) -> DType | None:
    """The element type of a tensor, of the values of maps."""
    if isinstance(type_, SequenceType) and isinstance(type_.element, MapType):
        type_ = type_.element.value
    return type_.dtype if isinstance(type_, TensorType) else None


def _given(array: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """Another row of the feeds."""
    return array[rng.integers(len(array))]


def _alike(array: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """A row made of elements of the feeds; of numbers near them."""
    row = rng.choice(array.ravel(), array.shape[1:]) if array.size else array[0]
    return row * rng.uniform(0.5, 2.0, row.shape) if array.dtype.kind == "f" else row


def _wild(array: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """A row that nobody can overlook: NaN, infinite or very large numbers. Of other types than floats as `_alike`."""
    if array.dtype.kind != "f":
        return _alike(array, rng)
    return np.full(array.shape[1:], rng.choice([np.nan, np.inf, -np.inf, np.finfo(array.dtype).max / 4, 1000.0]))


Stranger = Callable[[NDArray[Any], np.random.Generator], NDArray[Any]]
_STRANGERS: tuple[Stranger, ...] = (_given, _alike, _wild)  # from the meekest to the wildest


def install(tally: Tally) -> Callable[[], None]:
    """Check every session at its first run, or at its first one of more than no rows. Returns what ends this."""
    done: WeakSet[Session] = WeakSet()
    empty: WeakSet[Session] = WeakSet()  # have had no rows so far
    before = Session.run

    @functools.wraps(_run)
    def run(self: Session, *args: Any, **kwargs: Any) -> dict[str, Any]:
        results = _run(self, *args, **kwargs)
        feeds = args[0] if args else kwargs["feeds"]
        if feeds.keys() & self.defaults.keys() or self._strays(feeds):
            return results  # of a session of its own, which is checked
        if self.batching.batchable and self not in done:
            done.add(self)  # before its check, which runs it again
            if self in empty:
                tally.left_out[EMPTY] -= 1
                empty.discard(self)
            if _tallied(tally, self, feeds, results) == EMPTY:
                empty.add(self)
                done.discard(self)
        return results

    Session.run = run  # type: ignore[method-assign]

    def uninstall() -> None:
        Session.run = before  # type: ignore[method-assign]

    return uninstall


def _tallied(tally: Tally, session: Session, feeds: Mapping[str, Any], answers: Mapping[str, Any]) -> str:
    """Check a session; the reason why not is counted."""
    began = time.perf_counter()
    try:
        reason = check_batching(session, feeds, answers)
    except RowsMeet as failure:
        tally.failures.append(str(failure).partition("\n")[0])
        raise
    finally:
        tally.seconds += time.perf_counter() - began
    tally.checked += not reason
    if reason:
        tally.left_out[reason] += 1
    return reason
