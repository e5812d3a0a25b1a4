"""Checks that the rows of a batch do not influence each other, on the real feeds of every test.

`check_batching` runs rows of the feeds alone, all together, in another order, and among random other rows in batches
of other sizes. Each row must give the result that it gives alone. `install` makes every test do this at the first
run of each session whose model is declared batchable. Sessions that were not checked are counted with the reason;
`summary` gives the counts."""

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

from lathe.core.errors import LatheError
from lathe.core.ir.graph import Node
from lathe.core.ir.types import DType, MapType, SequenceType, TensorType, ValueType
from lathe.core.ops.opdef import registry
from lathe.core.runtime.session.session import Session

Arrays = dict[str, NDArray[Any]]

FOLLOWED_ROWS = 3  # rows of the feeds that are compared; more rows cost time and find few more errors
MIXED_SIZES = (7, 18)  # sizes of the mixed batches: odd and even, one below and one above the width of a float32 vector
SLOW_S = 0.05  # a session is not checked if one row alone takes longer
BUDGET_S = 0.25  # a check stops after this time

# The largest difference between a row's result in a batch and its result alone, relative to its largest element.
# Another position in the batch means other tiles and another order of summation. Where no such kernel is involved the
# results are equal, and the check demands equality.
_TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "tf32": 1e-2, "float16": 2e-2, "bfloat16": 5e-2}

EMPTY = "no run had any rows"  # a later run of the same session may remove this reason

_unchecked_run = Session.run  # the original method, without `install`


class RowsNotIndependent(AssertionError):
    """A row gives a different result in a batch than alone."""


@dataclass
class Tally:
    """Counts of the sessions that were checked and that were not."""

    validate: int = 0
    seconds: float = 0.0
    left_out: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Mapping[str, Any]) -> None:
        """Add the tally of another process, as `plain` returns it."""
        self.validate += other["checked"]
        self.seconds += other["seconds"]
        self.left_out.update(other["left_out"])
        self.failures += other["failures"]

    def plain(self) -> dict[str, Any]:
        return {
            "checked": self.validate,
            "seconds": self.seconds,
            "left_out": dict(self.left_out),
            "failures": self.failures,
        }

    def lines(self) -> Iterator[str]:
        yield f"batching: the rows of {self.validate} sessions were checked in {self.seconds:.1f} s"
        for reason, count in sorted((+self.left_out).items()):
            yield f"batching: {count} not checked: {reason}"
        yield from (f"batching: FAILED {failure}" for failure in dict.fromkeys(self.failures))


@dataclass(frozen=True)
class Composition:
    """The composition of a batch: for each place a row of the feeds, or None for a random row."""

    label: str
    places: tuple[int | None, ...]


def check_batching(
    session: Session, feeds: Mapping[str, Any], answers: Mapping[str, Any] | None = None, seed: int = 0
) -> str:
    """Check rows of these feeds alone, in another order and in other batches; returns "", or why the check stopped.

    RowsNotIndependent if a row gives a different result in a batch than alone. `session.run(feeds)` must succeed;
    `answers`, if given, are its results. A row at the same place of a batch of the same size must be equal bit by
    bit, whatever the other rows are."""
    if answers is None:
        answers = _unchecked_run(session, feeds)  # before anything is timed, since this run may compile code
    if reason := _not_checkable(session, feeds):
        return reason
    check = _Check(session, {name: np.asarray(feeds[name]) for name in session.inputs}, np.random.default_rng(seed))
    return check.run(answers)


def _not_checkable(session: Session, feeds: Mapping[str, Any]) -> str:
    if not session.batching.batchable:
        return "the model is not declared batchable"
    if any(_draws_random_numbers(node) for node in _on_reference(session)):
        return "the model draws random numbers"
    if not all(len(np.asarray(feeds[name])) for name in session.inputs):
        return EMPTY
    return ""


def _plans(session: Session) -> list[Any]:
    runners = [*session._shapes.cached_runners().values(), *session._shapes.standing()]
    return [share.plan for runner in runners for share in runner.shares]


def _on_reference(session: Session) -> list[Node]:
    return [node for plan in _plans(session) for node in plan.fallbacks.nodes]


def _draws_random_numbers(node: Node) -> bool:
    """Whether a node, or one of its nested graphs, draws random numbers. No compiled kernel does."""
    inner = (each for body in node.subgraphs for each in body.nodes)
    return (not registry.get(node.op).pure and node.op != "Dropout") or any(map(_draws_random_numbers, inner))


class _Check:
    """Follows some rows of one session through its batches."""

    def __init__(self, session: Session, arrays: Arrays, rng: np.random.Generator) -> None:
        self.session, self.arrays, self.rng = session, arrays, rng
        self.rows = len(next(iter(arrays.values())))
        self.followed = sorted(rng.choice(self.rows, min(self.rows, FOLLOWED_ROWS), replace=False).tolist())
        self.tolerances = _tolerances(session)
        self.wildness = 0 if session.may_not_end else len(_RANDOM_ROWS) - 1  # with random rows a run might not end
        self.stop = time.perf_counter() + BUDGET_S

    def run(self, answers: Mapping[str, Any]) -> str:
        began = time.perf_counter()
        alone = {self.followed[0]: self._answer((self.followed[0],))}
        if time.perf_counter() - began > SLOW_S:
            return f"a row takes more than {1000 * SLOW_S:.0f} ms"
        alone |= {row: self._answer((row,)) for row in self.followed[1:]}
        all_rows = Composition("the rows of the feeds", tuple(range(self.rows)))
        self._compare(all_rows, self._with_rows(answers, self.rows), alone)
        for composition in self._compositions():
            if time.perf_counter() > self.stop:
                return f"broken off after {BUDGET_S} s"
            settled = self.session.settle(0)  # otherwise new code may replace the code and sum in another order
            first = self._answer(composition.places)
            self._compare(composition, first, alone)
            if None not in composition.places:
                continue
            again = self._answer(composition.places)  # with other random rows
            if settled and self.session.settle(0):
                self._compare_in_place(composition, again, first)
        return ""

    def _compositions(self) -> Iterator[Composition]:
        """Batches that hold more than one row."""
        others = [row for row in range(self.rows) if row not in self.followed]
        order = self.rng.permutation([*self.followed, *others][:8])
        yield Composition("the rows of the feeds, in another order", tuple(order.tolist()))
        # a device would have to allocate memory for larger batches
        most = max(self.session.max_batch, len(self.followed))
        for size in dict.fromkeys(min(size, most) for size in MIXED_SIZES):
            places: list[int | None] = [None] * size
            for row, place in zip(self.followed, self.rng.choice(size, len(self.followed), replace=False), strict=True):
                places[place] = row
            yield Composition("among random rows", tuple(places))

    def _compare(
        self, composition: Composition, answers: Mapping[str, Any], alone: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """Compare each row with its result alone, up to rounding."""
        for place, row in enumerate(composition.places):
            for name, expected in alone[row].items() if row in alone else ():
                self._check_equal(name, answers[name][place], expected[0], composition, place, self.tolerances[name])

    def _compare_in_place(
        self, composition: Composition, answers: Mapping[str, Any], before: Mapping[str, Any]
    ) -> None:
        """Compare each row with its result at the same place among other rows: bit by bit.

        Of a MapSelected, a row's place among the selected rows depends on the other rows. So rounding may differ there.
        """
        selects = any(step.op == "MapSelected" for plan in _plans(self.session) for step in plan.steps)
        for place in (place for place, row in enumerate(composition.places) if row is not None):
            for name, expected in before.items():
                tolerance = self.tolerances[name] if selects else 0.0
                self._check_equal(name, answers[name][place], expected[place], composition, place, tolerance)

    def _answer(self, places: Sequence[int | None]) -> Mapping[str, Any]:
        """The outputs of a batch."""
        return self._with_rows(self._run(places), len(places))

    def _with_rows(self, answers: Mapping[str, Any], rows: int) -> Mapping[str, Any]:
        """`answers`, after a check that each output has as many rows as the batch."""
        for name, answer in answers.items():
            if np.shape(answer)[:1] != (rows,):
                shape = list(np.shape(answer))
                raise RowsNotIndependent(
                    f"{self.session.description.name}: output '{name}' of {rows} rows has shape {shape}"
                )
        return answers

    def _run(self, places: Sequence[int | None]) -> Arrays:
        """The outputs of a batch. If the model refuses random rows (an index out of range), milder rows are drawn."""
        while True:
            try:
                return _unchecked_run(
                    self.session, {name: self._batch(array, places) for name, array in self.arrays.items()}
                )
            except (LatheError, ArithmeticError, ValueError, Warning):
                if None not in places or self.wildness == 0:
                    raise
                self.wildness -= 1

    def _batch(self, array: NDArray[Any], places: Sequence[int | None]) -> NDArray[Any]:
        random_row = _RANDOM_ROWS[self.wildness]
        rows = [random_row(array, self.rng) if place is None else array[place] for place in places]
        return np.stack(rows).astype(array.dtype)

    def _check_equal(
        self, name: str, got: Any, expected: Any, composition: Composition, place: int, tolerance: float
    ) -> None:
        if isinstance(expected, dict):  # a map from label to number
            distance = _distance(*(np.array(list(each.values()), np.float32) for each in (got, expected)))
            distance = distance if list(got) == list(expected) else float("inf")
        else:
            distance = _distance(np.asarray(got), np.asarray(expected))
        if distance > tolerance:
            wanted = f"at most {tolerance:g}" if tolerance else "none"
            where = f"{composition.label}: {len(composition.places)} rows, this one at place {place}"
            raise RowsNotIndependent(
                f"{self.session.description.name}: row {composition.places[place]} of output '{name}' depends on the "
                f"other rows of its batch ({where}): it differs by {distance:.3g} of its largest element, "
                f"expected {wanted}\n"
                f"got {got}\nexpected {expected}"
            )


def _distance(a: NDArray[Any], b: NDArray[Any]) -> float:
    """The largest difference relative to the largest finite element; infinity if NaN, inf, shape or dtype differ."""
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
    """By output: the rounding error of the narrowest type that any kernel of the session computes in."""
    words = " ".join(" ".join((step.summary, *step.outputs)) for plan in _plans(session) for step in plan.steps)
    words += " ".join(line for plan in _plans(session) for line in plan.log)
    narrow = max((_TOLERANCES[name] for name in ("tf32", "float16", "bfloat16") if name in words), default=0.0)
    own = {name: _TOLERANCES.get(str(_element_type(type_)), 0.0) for name, type_ in session.outputs.items()}
    return {name: max(tolerance, narrow) if tolerance else 0.0 for name, tolerance in own.items()}


def _element_type(type_: ValueType) -> DType | None:
    """The element type of a tensor, or of the values of maps."""
    if isinstance(type_, SequenceType) and isinstance(type_.element, MapType):
        type_ = type_.element.value
    return type_.dtype if isinstance(type_, TensorType) else None


def _row_of_feeds(array: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """A random row of the feeds."""
    return array[rng.integers(len(array))]


def _similar_row(array: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """A row of random elements of the feeds; for floats, of numbers near them."""
    row = rng.choice(array.ravel(), array.shape[1:]) if array.size else array[0]
    return row * rng.uniform(0.5, 2.0, row.shape) if array.dtype.kind == "f" else row


def _extreme_row(array: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """A row of NaN, infinite or very large numbers, whose influence shows; a similar row if the dtype is no float."""
    if array.dtype.kind != "f":
        return _similar_row(array, rng)
    return np.full(array.shape[1:], rng.choice([np.nan, np.inf, -np.inf, np.finfo(array.dtype).max / 4, 1000.0]))


RandomRow = Callable[[NDArray[Any], np.random.Generator], NDArray[Any]]
# from the mildest to the most extreme
_RANDOM_ROWS: tuple[RandomRow, ...] = (_row_of_feeds, _similar_row, _extreme_row)


def install(tally: Tally) -> Callable[[], None]:
    """Check every session at its first run that has rows. Returns a function that ends this."""
    checked: WeakSet[Session] = WeakSet()
    empty: WeakSet[Session] = WeakSet()  # sessions without rows so far
    before = Session.run

    @functools.wraps(_unchecked_run)
    def run(self: Session, *args: Any, **kwargs: Any) -> dict[str, Any]:
        results = _unchecked_run(self, *args, **kwargs)
        feeds = args[0] if args else kwargs["feeds"]
        if feeds.keys() & self.defaults.keys() or self._violates_assumptions(feeds):
            return results  # another session ran these feeds, and that one is checked
        if self.batching.batchable and self not in checked:
            checked.add(self)  # before the check, because the check runs the session again
            if self in empty:
                tally.left_out[EMPTY] -= 1
                empty.discard(self)
            if _check_and_count(tally, self, feeds, results) == EMPTY:
                empty.add(self)
                checked.discard(self)
        return results

    Session.run = run  # type: ignore[method-assign]

    def uninstall() -> None:
        Session.run = before  # type: ignore[method-assign]

    return uninstall


def _check_and_count(tally: Tally, session: Session, feeds: Mapping[str, Any], answers: Mapping[str, Any]) -> str:
    """Check a session; count it, or the reason why it was not checked."""
    began = time.perf_counter()
    try:
        reason = check_batching(session, feeds, answers)
    except RowsNotIndependent as failure:
        tally.failures.append(str(failure).partition("\n")[0])
        raise
    finally:
        tally.seconds += time.perf_counter() - began
    tally.validate += not reason
    if reason:
        tally.left_out[reason] += 1
    return reason
