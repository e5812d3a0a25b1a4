"""Lines of shapes: one code for all lengths of a decoder's past.

A decoder with past inputs is given the keys and values of all tokens before, and gives them back with those of the new
ones: its shapes differ from run to run, and what differs grows by the same number. All such shapes lie on a line:
sizes of the inputs are numbers, or n + a number. Code for a line has the past as the `n` that is the batch elsewhere.

    batch = 1, length = 1, past = n, total = n + 1
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from core.ir.dim import Dim, SymDim, evaluate, is_never_negative, symbol, symbols
from core.ir.types import TensorType, ValueType

# What the symbols of a model's inputs stand for, sorted by name.
Values: TypeAlias = tuple[tuple[str, int], ...]
Sizes: TypeAlias = tuple[tuple[str, Dim], ...]

_N = "n"
_REMEMBERED = 8  # shapes that the next one is compared with
_KNOWN = 8  # lines
_ATTEMPTS = 3  # lines that turn out to have no code; then this model has none


@dataclass(frozen=True)
class Past:
    """An input that a longer output takes the place of in the next run: the symbol of its length, and that output's
    length, which is larger."""

    symbol: str
    after: Dim


def pasts_of(inputs: Mapping[str, ValueType], outputs: Mapping[str, ValueType]) -> tuple[Past, ...]:
    """The inputs that outputs are longer versions of, along an axis that does not lead; each symbol once. What an
    output is as long as, is new in each run."""
    pairs = [(given, made) for given in inputs.values() for made in outputs.values()]
    found = [past for given, made in pairs if (past := _past_of(given, made)) is not None]
    shown = {name for given in inputs.values() if isinstance(given, TensorType) for name in given.symbols}
    new = {str(dim) for made in outputs.values() if isinstance(made, TensorType) for dim in made.shape or ()}
    kept = [past for past in found if symbols(past.after) <= shown and past.symbol not in new]
    return tuple({past.symbol: past for past in kept}.values())


def _past_of(given: ValueType, made: ValueType) -> Past | None:
    if not isinstance(given, TensorType) or not isinstance(made, TensorType) or given.dtype is not made.dtype:
        return None
    before, after = given.shape, made.shape
    if before is None or after is None or len(before) != len(after):
        return None
    differ = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    if len(differ) != 1 or before[0] != after[0]:
        return None
    [(old, new)] = differ
    whole = isinstance(old, SymDim) and str(old).isidentifier()
    return Past(str(old), new) if whole and is_never_negative(new - old) else None


class Lines:
    """The lines that a model's shapes lie on, as runs show them. May be asked by any number of threads."""

    def __init__(self, inputs: Mapping[str, ValueType], outputs: Mapping[str, ValueType]) -> None:
        self._pasts = pasts_of(inputs, outputs)
        self._symbols = frozenset(past.symbol for past in self._pasts)
        others = [symbols(past.after) for past in self._pasts] + [_leading(type_) for type_ in inputs.values()]
        self._fixed = frozenset().union(*others) - self._symbols  # do not grow with a past
        self._known: tuple[Sizes, ...] = ()
        self._refused: set[Sizes] = set()
        self._seen: deque[Values] = deque(maxlen=_REMEMBERED)
        self._guard = threading.Lock()

    def find(self, values: Values) -> tuple[Sizes, int] | None:
        """The line that these values lie on, and n there, which is at least 1; None where each shape needs code of its
        own: nothing is past yet, or all runs had as much, and may differ in the number of rows."""
        if not self._symbols or len(self._refused) >= _ATTEMPTS:
            return None
        for line in self._known:
            n = place_on(line, values)
            if n is not None:
                return (line, n) if line not in self._refused else None
        with self._guard:
            found = self._new(values)
            if values not in self._seen:
                self._seen.append(values)
            if found is None or found in self._refused:
                return None
            self._known = (found, *self._known)[:_KNOWN]
        n = place_on(found, values)
        return (found, n) if n is not None else None

    def refuse(self, line: Sizes) -> None:
        """There is no code for this line."""
        with self._guard:
            self._refused.add(line)

    def _new(self, values: Values) -> Sizes | None:
        """A line for values that lie on none that is known."""
        pasts = _of(values, self._symbols)
        differ = any(_of(seen, self._symbols) != pasts for seen in self._seen)
        return (self._through(values) or self._guess(values)) if differ and min(pasts) >= 1 else None

    def _through(self, values: Values) -> Sizes | None:
        """The line through these and other values, where all pasts grow, and no number of rows or new tokens."""
        found = (line_through(seen, values) for seen in reversed(self._seen))
        lines = (line for line in found if line is not None and self._symbols <= grown_on(line))
        return next((line for line in lines if self._fixed.isdisjoint(grown_on(line))), None)

    def _guess(self, values: Values) -> Sizes:
        """The line of one shape: what is as long as the past and the new tokens together grows with the past."""
        known = dict(values)
        grown = {evaluate(past.after, known) for past in self._pasts}
        growing = self._symbols | {name for name, value in values if value in grown and name not in self._fixed}
        return _line(values, growing)


def _leading(type_: ValueType) -> frozenset[str]:
    """The symbols of the first dimension of an input."""
    return symbols(type_.shape[0]) if isinstance(type_, TensorType) and type_.shape else frozenset()


def _of(values: Values, names: frozenset[str]) -> list[int]:
    return [value for name, value in values if name in names]


def line_through(before: Values, after: Values) -> Sizes | None:
    """The line through two shapes; None where what differs does not grow by the same number."""
    if [name for name, _ in before] != [name for name, _ in after]:
        return None
    steps = {name: new - old for (name, old), (_, new) in zip(before, after, strict=True) if new != old}
    same = len(set(steps.values())) == 1 and min(_of(after, frozenset(steps))) >= 1
    return _line(after, frozenset(steps)) if same else None


def _line(values: Values, growing: frozenset[str]) -> Sizes:
    """n is the least of what grows."""
    least = min(_of(values, growing))
    return tuple((name, symbol(_N) + (value - least) if name in growing else value) for name, value in values)


def grown_on(sizes: Sizes) -> frozenset[str]:
    """The symbols that are no numbers."""
    return frozenset(name for name, size in sizes if isinstance(size, SymDim))


def is_line(sizes: Sizes) -> bool:
    """Whether some sizes are known only when a run shows them."""
    return bool(grown_on(sizes))


def place_on(line: Sizes, values: Values) -> int | None:
    """n for these values; None where they do not lie on the line."""
    found: set[int] = set()
    for (name, size), (given, value) in zip(line, values, strict=True):
        if name != given or (isinstance(size, int) and size != value):
            return None
        if isinstance(size, SymDim):
            found.add(value - evaluate(size, {_N: 0}))
    return found.pop() if len(found) == 1 and min(found) >= 1 else None
