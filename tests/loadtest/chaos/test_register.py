"""The linearizability search against every possible order, and against histories with known verdicts."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence

import pytest

from loadtest.chaos.linearizability import ANY, Entry, Value, find_violation

INF = math.inf


def write(invoked: float, end: float, value: Value, optional: bool = False) -> Entry:
    return Entry(invoked, end, value, True, optional, f"write {value}")


def read(invoked: float, end: float, value: Value) -> Entry:
    return Entry(invoked, end, value, False, said=f"read {value}")


GOOD = {
    "nothing": [],
    "unset at first": [read(0, 1, None), write(2, 3, 1), read(4, 5, 1)],
    "old or new while it is written": [write(0, 1, 1), write(2, 9, 2), read(3, 4, 1), read(5, 6, 2)],
    "a read that began before the write ended": [write(0, 1, 1), write(2, 4, 2), read(3, 6, 1)],
    "two writes at once, either last": [write(0, 9, 1), write(0, 9, 2), read(10, 11, 1)],
    "two writes at once, seen in turn": [write(0, 9, 1), write(0, 9, 2), read(1, 2, 2), read(3, 4, 1), read(10, 11, 1)],
    "an unknown write that took effect late": [write(0, 1, 1), write(2, INF, 2, True), read(3, 4, 1), read(8, 9, 2)],
    "an unknown write that took effect in time": [write(0, 1, 1), write(2, 5, 2, True), read(6, 7, 2)],
    "an unknown write that never took effect": [write(0, 1, 1), write(2, 5, 2, True), read(6, 7, 1)],
    "an unknown write of an unknown value": [write(0, 1, 1), write(2, 9, ANY, True), read(3, 4, 1), read(5, 6, 7)],
    "a known write of an unknown value": [write(0, 1, 1), write(2, 3, ANY), read(4, 5, 7), read(5, 6, 7)],
}
BAD = {
    "never written": [write(0, 1, 1), read(2, 3, 2)],
    "set, then unset": [write(0, 1, 1), read(2, 3, None)],
    "an acknowledged write that is lost": [write(0, 1, 1), write(2, 3, 2), read(4, 5, 1)],
    "back to the old one": [write(0, 1, 1), write(2, 9, 2), read(3, 4, 2), read(5, 6, 1)],
    "two clients see two orders": [write(0, 9, 1), write(0, 9, 2), read(1, 2, 1), read(3, 4, 2), read(5, 6, 1)],
    "an unknown write after its end": [write(0, 1, 1), write(2, 5, 2, True), read(6, 7, 1), read(8, 9, 2)],
    "an unknown write that is taken back": [write(0, 1, 1), write(2, INF, 2, True), read(3, 4, 2), read(5, 6, 1)],
    "before it was written": [write(0, 1, 1), read(2, 3, 2), write(4, 5, 2)],
    "an unknown value that is read as two values": [write(0, 1, 1), write(2, 3, ANY), read(4, 5, 7), read(6, 7, 8)],
    "an unknown value that is no value": [write(0, 1, 1), write(2, 3, ANY), read(4, 5, None)],
}


@pytest.mark.parametrize("entries", GOOD.values(), ids=GOOD)
def test_linearizable_histories_pass(entries: list[Entry]) -> None:
    assert find_violation(entries) is None
    assert is_register(entries)


@pytest.mark.parametrize("entries", BAD.values(), ids=BAD)
def test_histories_that_are_not_linearizable_fail(entries: list[Entry]) -> None:
    assert find_violation(entries) is not None
    assert not is_register(entries)


def test_a_violation_names_the_possible_values() -> None:
    found = find_violation([write(0, 1, 1), write(2, 3, 2), write(4, 9, 3), read(5, 6, 1)])
    assert str(found) == "read 1: the register may have been [2]; under way: write 3; read 1"


@pytest.mark.parametrize("seed", range(4))
def test_the_search_agrees_with_trying_every_order(seed: int) -> None:
    """Times and values are few, so most histories are close to both verdicts."""
    rng = random.Random(seed)
    verdicts = []
    for _ in range(500):
        entries = [random_history(rng) for _ in range(rng.randint(1, 6))]
        verdicts.append(is_register(entries))
        assert (find_violation(entries) is None) == verdicts[-1], entries
    assert 50 < sum(verdicts) < 450


def test_the_search_takes_time_in_proportion_to_the_history() -> None:
    """Five concurrent clients, with writes of unknown outcome throughout."""
    rng, entries, value = random.Random(1), list[Entry](), 0
    for at in range(20_000):
        if at % 4 == 0:
            value += 1
            entries.append(write(at, at + 0.5, value))
        elif at % 1000 == 1:
            entries.append(write(at, at + 900, ANY if at % 2000 == 1 else value + 10**6, True))
        else:
            entries.append(read(at + 0.6, at + 0.6 + rng.random(), value) if at % 4 != 3 else read(at, at + 0.1, value))
    began = time.thread_time()
    assert find_violation(entries) is None
    assert time.thread_time() - began < 5
    entries.append(read(30_000, 30_001, 1))
    assert find_violation(entries) is not None


def random_history(rng: random.Random) -> Entry:
    begin = rng.randint(0, 8)
    value: Value = rng.choice([1, 2, 3])
    if rng.random() < 0.5:
        return read(begin, begin + rng.randint(1, 4), rng.choice([value, value, None]))
    optional = rng.random() < 0.3
    end = INF if optional and rng.random() < 0.5 else begin + rng.randint(1, 4)
    return write(begin, end, ANY if rng.random() < 0.15 else value, optional)


def is_register(entries: Sequence[Entry]) -> bool:
    """Brute force: every choice of optional operations, every order of them, every value of the unknown."""
    return any(obeys(order) for order in orders(list(entries)))


def orders(entries: list[Entry]) -> Iterator[tuple[Entry, ...]]:
    optional = [entry for entry in entries if entry.optional]
    for count in range(len(optional) + 1):
        for left_out in itertools.combinations(range(len(optional)), count):
            gone = [optional[i] for i in left_out]
            chosen = [entry for entry in entries if not any(entry is other for other in gone)]
            for order in itertools.permutations(chosen):
                if all(order[j].end >= order[i].invoked for i in range(len(order)) for j in range(i + 1, len(order))):
                    yield order


def obeys(order: Sequence[Entry]) -> bool:
    value: Value = None
    for entry in order:
        if entry.writes or (value == ANY and entry.value is not None):
            value = entry.value
        elif entry.value != value:
            return False
    return True
