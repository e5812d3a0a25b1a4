"""Sequences of different lengths in one run, their tokens concatenated without padding: see passes/proofs/pack.py.

feeds -> items (rows of one feed) -> bins of at most `capacity` tokens -> token runs -> one run of whole sequences

One plan serves every mixture of lengths.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import SessionClosed
from lathe.core.ir.dim import symbols
from lathe.core.ir.types import ValueType
from lathe.core.passes.proofs.token_flow import ENDS, OFFSETS, POSITIONS, SEQUENCES, STARTS, TOKENS
from lathe.core.plan.plan import Port
from lathe.core.runtime.host.executable import Executable
from lathe.core.runtime.session.record import Record, run_recorded


@dataclass(frozen=True, slots=True)
class Item:
    """Sequences `first` to `last` (exclusive) of the feed with index `feed`, all `length` tokens long."""

    feed: int
    first: int
    last: int
    length: int

    @property
    def rows(self) -> int:
        return self.last - self.first

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True, slots=True)
class Feed:
    """The input of one caller: arrays by input, with `rows` sequences of `length` tokens each."""

    arrays: Mapping[str, NDArray[Any]]
    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


class PackedRuns:
    """Runs packed sequences: first the code for tokens, then the code for whole sequences, if there is any.

    Any number of threads may use it.
    """

    def __init__(self, tokens: Executable, sequences: Executable | None, outputs: Sequence[str], capacity: int) -> None:
        """`outputs`: the names of the model's outputs. `capacity`: the most tokens of a run.

        A longer sequence runs alone.
        """
        self.tokens, self.sequences, self.capacity = tokens, sequences, capacity
        self._outputs = tuple(outputs)
        self._axes = {port.name: _token_axis(port.type) for port in (*tokens.plan.inputs, *tokens.plan.outputs)}

    def run(self, feeds: Sequence[Feed], record: Record | None = None) -> list[dict[str, Any]]:
        """Outputs by name for each feed, in new arrays. `record` is called with each kernel that ran.

        Every feed must have at least one token. Errors are those of `Executable.run`.
        """
        if not feeds:
            return []
        found = _Results(len(feeds))
        bins = pack_bins(split_feeds(feeds, self.capacity), self.capacity)
        for items in bins:
            self._run_tokens(feeds, items, found, record)
        if self.sequences is not None:
            self._run_sequences(feeds, found, record)
        return [{name: outputs[name] for name in self._outputs} for outputs in found.join_parts()]

    @property
    def runners(self) -> tuple[Executable, ...]:
        return (self.tokens,) if self.sequences is None else (self.tokens, self.sequences)

    def close(self) -> None:
        self.tokens.close()
        if self.sequences is not None:
            self.sequences.close()

    def arrays(self, feeds: Sequence[Feed], items: Sequence[Item]) -> tuple[int, list[NDArray[Any]]]:
        """The number of tokens of these items, and the inputs for a run of the code for tokens, in its order."""
        lengths = np.repeat([item.length for item in items], [item.rows for item in items])
        marks = _packing_arrays(lengths)
        ports = self.tokens.plan.inputs
        given = [marks[p.name] if p.name in marks else self._concatenate(feeds, items, p.name) for p in ports]
        return int(lengths.sum()), given

    def _run_tokens(self, feeds: Sequence[Feed], items: Sequence[Item], found: _Results, record: Record | None) -> None:
        results = _run(self.tokens, *self.arrays(feeds, items), record)
        rows = sum(item.rows for item in items)
        for port, result in zip(self.tokens.plan.outputs, results, strict=True):
            if port.name in self._outputs:
                self._split(port, result, items, found)
            else:
                found.pools.setdefault(port.name, []).append((items, result[:rows]))

    def _concatenate(self, feeds: Sequence[Feed], items: Sequence[Item], name: str) -> NDArray[Any]:
        """The input `name` of all items as one array, their tokens one after the other along the token axis.

        Its first axis, that of the batch, has extent 1.
        """
        axis = self._axes[name]
        parts = [_flatten_rows(feeds[item.feed].arrays[name][item.first : item.last], axis) for item in items]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis)

    def _split(self, port: Port, result: NDArray[Any], items: Sequence[Item], found: _Results) -> None:
        axis, start = self._axes[port.name], 0
        for item in items:
            part = result[(slice(None),) * axis + (slice(start, start + item.tokens),)]
            found.parts[item.feed].setdefault(port.name, []).append((item.first, _restore_rows(part, axis, item)))
            start += item.tokens

    def _run_sequences(self, feeds: Sequence[Feed], found: _Results, record: Record | None) -> None:
        """Run the code for whole sequences once for all feeds, in their order, and add its outputs to `found`."""
        assert self.sequences is not None
        total = sum(feed.rows for feed in feeds)
        firsts = np.cumsum([0, *(feed.rows for feed in feeds)])
        arrays = []
        for port in self.sequences.plan.inputs:
            if port.name in found.pools:
                arrays.append(_rows_in_feed_order(found.pools[port.name], firsts, total, port))
            else:
                arrays.append(np.concatenate([feed.arrays[port.name] for feed in feeds]))
        results = _run(self.sequences, total, arrays, record)
        for port, result in zip(self.sequences.plan.outputs, results, strict=True):
            for feed in range(len(feeds)):
                found.parts[feed][port.name] = [(0, result[firsts[feed] : firsts[feed + 1]])]


def _run(executable: Executable, n: int, arrays: Sequence[NDArray[Any]], record: Record | None) -> list[Any]:
    return executable.run(n, arrays) if record is None else run_recorded(executable, n, arrays, record)


MakePacked: TypeAlias = Callable[[], PackedRuns]


class LazyPacked:
    """The packed code, compiled when it is first used."""

    def __init__(self, make: MakePacked) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._closed = False
        self.made: PackedRuns | None = None

    def get(self) -> PackedRuns:
        """The packed code; the first call compiles it, and raises whatever that raises.

        SessionClosed if `close` was called before it was compiled.
        """
        if self.made is None:
            with self._lock:
                if self._closed:
                    raise SessionClosed("the session is closed")
                self.made = self.made or self._make()
        return self.made

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self.made is not None:
                self.made.close()


class _Results:
    """Results so far.

    `parts`: for each feed, by output, pairs of a part's first row in the feed and its array. `pools`: by name, the
    values for the code for whole sequences: for each run of the code for tokens its items, and one row per sequence.
    """

    def __init__(self, feeds: int) -> None:
        self.parts: list[dict[str, list[tuple[int, NDArray[Any]]]]] = [{} for _ in range(feeds)]
        self.pools: dict[str, list[tuple[Sequence[Item], NDArray[Any]]]] = {}

    def join_parts(self) -> Iterator[dict[str, NDArray[Any]]]:
        for outputs in self.parts:
            yield {name: _concatenate_rows(parts) for name, parts in outputs.items()}


def split_feeds(feeds: Sequence[Feed], capacity: int) -> list[Item]:
    """The feeds as items of at most `capacity` tokens: a larger feed is divided into items of as many rows as fit.

    A single row with more tokens than `capacity` is an item of its own.
    """
    items = []
    for index, feed in enumerate(feeds):
        rows = max(capacity // feed.length, 1)
        items += [Item(index, first, min(first + rows, feed.rows), feed.length) for first in range(0, feed.rows, rows)]
    return items


def pack_bins(items: Sequence[Item], capacity: int) -> list[list[Item]]:
    """The items in bins of at most `capacity` tokens, by first-fit decreasing; a larger item has a bin of its own.

    The number of bins is at most 11/9 of the optimum plus a constant (Johnson 1973).
    """
    if sum(item.tokens for item in items) <= capacity:
        return [list(items)]
    bins: list[list[Item]] = []
    free: list[int] = []
    for item in sorted(items, key=lambda item: -item.tokens):
        place = next((i for i, room in enumerate(free) if room >= item.tokens), len(bins))
        if place == len(bins):
            bins.append([])
            free.append(capacity)
        bins[place].append(item)
        free[place] -= item.tokens
    return bins


def _packing_arrays(lengths: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    """The inputs that describe the packing of sequences of these lengths: int64 arrays by name.

    There are the offsets of the sequences, padded to one more than the number of tokens, and for each token the start
    and the last token of its sequence, the number of its sequence, and its position in it.
    """
    total = int(lengths.sum())
    ends = np.cumsum(lengths, dtype=np.int64)
    offsets = np.full(total + 1, total, np.int64)
    offsets[0], offsets[1 : len(ends) + 1] = 0, ends
    starts = np.repeat(ends - lengths, lengths)
    return {
        OFFSETS: offsets,
        STARTS: starts,
        ENDS: np.repeat(ends - 1, lengths),
        SEQUENCES: np.repeat(np.arange(len(lengths), dtype=np.int64), lengths),
        POSITIONS: np.arange(total, dtype=np.int64) - starts,
    }


def _flatten_rows(array: NDArray[Any], axis: int) -> NDArray[Any]:
    """An array [rows, ..., length, ...] as [1, ..., rows * length, ...], contiguous; `axis`: that of the length."""
    moved = np.moveaxis(array, 0, axis - 1)
    shape = (*moved.shape[: axis - 1], moved.shape[axis - 1] * moved.shape[axis], *moved.shape[axis + 1 :])
    return np.ascontiguousarray(moved.reshape(shape))[None]


def _restore_rows(array: NDArray[Any], axis: int, item: Item) -> NDArray[Any]:
    """The inverse of `_flatten_rows` for the tokens of one item."""
    split = array[0].reshape(*array.shape[1:axis], item.rows, item.length, *array.shape[axis + 1 :])
    return np.moveaxis(split, axis - 1, 0)


def _rows_in_feed_order(
    parts: Sequence[tuple[Sequence[Item], NDArray[Any]]], firsts: NDArray[Any], total: int, port: Port
) -> NDArray[Any]:
    """An input of the code for whole sequences: one row per sequence, in the order of the feeds.

    `parts`: the items of each run of the code for tokens, and a value with one row for each sequence of them. `firsts`:
    the number of sequences before each feed. `total`: the number of all sequences.
    """
    order = [
        row
        for items, _ in parts
        for item in items
        for row in range(item.first + int(firsts[item.feed]), item.last + int(firsts[item.feed]))
    ]
    rows = parts[0][1] if len(parts) == 1 else np.concatenate([array for _, array in parts])
    sorted_rows = np.empty_like(rows)
    sorted_rows[order] = rows
    return sorted_rows.reshape(port.type.evaluate({TOKENS: total}))  # type: ignore[union-attr]


def _concatenate_rows(parts: list[tuple[int, NDArray[Any]]]) -> NDArray[Any]:
    if len(parts) == 1:
        return np.ascontiguousarray(parts[0][1])
    return np.concatenate([array for _, array in sorted(parts, key=lambda part: part[0])])


def _token_axis(type_: ValueType) -> int:
    """The axis of a tensor type whose extent depends on the number of tokens."""
    return next(axis for axis, dim in enumerate(type_.dims) if TOKENS in symbols(dim))  # type: ignore[union-attr]
