"""Regular expressions with RE2's syntax, except scripts (`\\p{Greek}`) and bytes (`\\C`), matched without backtracking.

ONNX requires RE2 (https://github.com/google/re2/wiki/Syntax). Python's `re` has another syntax, and backtracks: a
pattern in an uploaded model could take exponential time while holding the interpreter lock. Here a pattern becomes a
nondeterministic automaton (NFA), so that one match takes time linear in the text for any pattern. The sets of states
that texts reach are cached as states of a deterministic automaton (Thompson, 1968). Whole strings are matched, or the
longest parts of a text that begin as early as possible. So greediness makes no difference, and groups capture nothing.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import itemgetter
from typing import TypeAlias

MOST_STATES = 20_000  # the most NFA states of a pattern
MOST_REPEATS = 1000  # the greatest n and m in {n,m}, as in RE2
_MOST_TRANSITIONS = 50_000  # the most transitions between deterministic states that are cached
_CHARS_PER_CHECK = 100_000  # the characters between two calls of `check`: cached steps over them take milliseconds
_VISITS_PER_CHECK = 10_000  # the same for searches, which visit NFA states: each visit takes about a microsecond
_MOST_NFA_STATES = 1_000_000  # the most NFA states in all cached deterministic states, tens of bytes each


class BadPattern(ValueError):
    """The text is no valid pattern, or its automaton is too large; the message says why."""


# A set of characters: those in any of the ranges (both ends included), or accepted by any of the tests.
Range: TypeAlias = tuple[int, int]
Test: TypeAlias = Callable[[str], bool]


@dataclass(frozen=True)
class Chars:
    ranges: tuple[Range, ...] = ()
    tests: tuple[Test, ...] = ()
    negated: bool = False
    folded: bool = False  # ignores case

    def has(self, char: str) -> bool:
        forms = _forms(char) if self.folded else (char,)
        return any(map(self._has, forms)) != self.negated

    def _has(self, char: str) -> bool:
        code = ord(char)
        return any(low <= code <= high for low, high in self.ranges) or any(test(char) for test in self.tests)


def _forms(char: str) -> set[str]:
    """A character, its lower and upper case, and the lower and upper case of these; only single characters."""
    first = {char, char.lower(), char.upper()}
    return {form for one in first for form in (one, one.lower(), one.upper()) if len(form) == 1}


_DIGIT = Chars(((48, 57),))
_SPACE = Chars(((9, 10), (12, 13), (32, 32)))
_WORD = Chars(((48, 57), (65, 90), (95, 95), (97, 122)))
_ANY, _ANY_BUT_NEWLINE = Chars(negated=True), Chars(((10, 10),), negated=True)
_PERL = {"d": _DIGIT, "s": _SPACE, "w": _WORD}
_POSIX: dict[str, tuple[Range, ...]] = {
    "alnum": ((48, 57), (65, 90), (97, 122)), "alpha": ((65, 90), (97, 122)), "ascii": ((0, 127),),
    "blank": ((9, 9), (32, 32)), "cntrl": ((0, 31), (127, 127)), "digit": ((48, 57),), "graph": ((33, 126),),
    "lower": ((97, 122),), "print": ((32, 126),), "punct": ((33, 47), (58, 64), (91, 96), (123, 126)),
    "space": ((9, 13), (32, 32)), "upper": ((65, 90),), "word": _WORD.ranges, "xdigit": ((48, 57), (65, 70), (97, 102)),
}  # fmt: skip
_CONTROL = {"a": 7, "f": 12, "t": 9, "n": 10, "r": 13, "v": 11}
# General categories of Unicode with their subcategories.
_CATEGORIES = {"C": "cfos", "L": "lmotu", "M": "cen", "N": "dlo", "P": "cdefios", "S": "ckmo", "Z": "lps"}

# The syntax tree of a pattern.


@dataclass(frozen=True)
class Assertion:
    """A zero-width assertion: "A"/"z" start/end of the text, "^"/"$" of a line, "b"/"B" a word boundary or none."""

    kind: str


@dataclass(frozen=True)
class Concatenation:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alternation:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repetition:
    part: Node
    least: int
    most: int | None


Node: TypeAlias = Chars | Assertion | Concatenation | Alternation | Repetition


@dataclass(frozen=True)
class _Flags:
    i: bool = False  # ignore case
    m: bool = False  # multi-line: ^ and $ also match at line ends
    s: bool = False  # a dot also matches a newline


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.text, self.at, self.flags = pattern, 0, _Flags()

    def parse(self) -> Node:
        found = self._alternation()
        if self.at < len(self.text):
            raise BadPattern("unexpected )")
        return found

    def _take(self, expected: str) -> bool:
        if not self.text.startswith(expected, self.at):
            return False
        self.at += len(expected)
        return True

    def _next(self, what: str) -> str:
        if self.at >= len(self.text):
            raise BadPattern(f"{what} is not ended")
        self.at += 1
        return self.text[self.at - 1]

    def _alternation(self) -> Node:
        parts = [self._concatenation()]
        while self._take("|"):
            parts.append(self._concatenation())
        return parts[0] if len(parts) == 1 else Alternation(tuple(parts))

    def _concatenation(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            one = self._atom()
            parts += one if isinstance(one, list) else [self._repetition(one)]
            if not one and parts:  # a repetition after flags, as in a(?i)*, applies to the node before them
                parts[-1] = self._repetition(parts[-1])
        return Concatenation(tuple(parts))

    def _atom(self) -> Node | list[Node]:
        """A node that may be repeated; a list of nodes otherwise: none for flags, the characters of \\Q..\\E."""
        char = self._next("the pattern")
        match char:
            case "(":
                return self._group()
            case "[":
                return self._class()
            case "\\":
                return self._escape()
            case ".":
                return _ANY if self.flags.s else _ANY_BUT_NEWLINE
            case "^":
                return Assertion("^" if self.flags.m else "A")
            case "$":
                return Assertion("$" if self.flags.m else "z")
            case "*" | "+" | "?" | "{":
                self.at -= 1
                if self._bounds() is not None:
                    raise BadPattern(f"nothing that {char} could repeat")
                self.at += 1
        return self._literal(char)

    def _literal(self, char: str) -> Chars:
        return Chars(((ord(char), ord(char)),), folded=self.flags.i)

    def _group(self) -> Node | list[Node]:
        before = self.flags
        if self._take("?"):
            if self._take("P<") or (self.text[self.at : self.at + 1] == "<" and self._take("<")):
                name = self._until(">", "the name of a group")
                if not (name and name.replace("_", "a").isalnum()):
                    raise BadPattern(f"{name!r} is no name of a group")
            elif self._set_flags():
                return []
        found = self._alternation()
        if not self._take(")"):
            raise BadPattern("missing )")
        self.flags = before
        return found

    def _set_flags(self) -> bool:
        """Sets `flags` from the text up to a colon or the end of the group; returns True for the end, as in (?i)."""
        value = True
        while True:
            match char := self._next("a group"):
                case ":" | ")":
                    return char == ")"
                case "-" if value:
                    value = False
                case "i" | "m" | "s":
                    self.flags = replace(self.flags, **{char: value})
                case "U":
                    pass  # greediness makes no difference where the longest match counts
                case _:
                    raise BadPattern(f"(?{char} is not known")

    def _until(self, end: str, what: str) -> str:
        stop = self.text.find(end, self.at)
        if stop < 0:
            raise BadPattern(f"{what} is not ended")
        found, self.at = self.text[self.at : stop], stop + len(end)
        return found

    def _repetition(self, node: Node) -> Node:
        before = None
        while (bounds := self._bounds()) is not None:
            if before is not None:
                raise BadPattern(f"two repetitions one after the other: {self.text[before : self.at]}")
            before = self.at - 1
            self._take("?")
            node = Repetition(node, *bounds)
        return node

    def _bounds(self) -> tuple[int, int | None] | None:
        """Reads a repetition: its least and greatest number (None: no limit); None if none follows.

        A brace that is no repetition is a literal.
        """
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        end = self.text.find("}", self.at)
        if self.text[self.at : self.at + 1] != "{" or end < 0:
            return None
        least, comma, most = self.text[self.at + 1 : end].partition(",")
        if not (least.isascii() and least.isdecimal() and (not most or (most.isascii() and most.isdecimal()))):
            return None
        numbers = int(least[:9]), int(most[:9]) if most else None if comma else int(least[:9])
        if numbers[0] > MOST_REPEATS or (numbers[1] is not None and not numbers[0] <= numbers[1] <= MOST_REPEATS):
            raise BadPattern(f"repetitions {self.text[self.at : end + 1]}: expected at most {MOST_REPEATS}, in order")
        self.at = end + 1
        return numbers

    # -- escapes and classes

    def _escape(self) -> Node | list[Node]:
        char = self._next("an escape")
        if char in "AzbB":
            return Assertion(char)
        if char == "Q":
            end = self.text.find("\\E", self.at)
            quoted, self.at = (self.text[self.at :], len(self.text)) if end < 0 else (self.text[self.at : end], end + 2)
            last = [self._repetition(self._literal(quoted[-1]))] if quoted else []
            return [*map(self._literal, quoted[:-1]), *last]
        return self._class_escape(char) or self._literal(self._character(char))

    def _class_escape(self, char: str) -> Chars | None:
        r"""The characters of \d, \s, \w, \pL and similar escapes; None for other escapes."""
        if char.lower() in _PERL:
            return replace(_PERL[char.lower()], negated=char.isupper(), folded=False)
        if char not in "pP":
            return None
        name = self._next("a category")
        if name == "{":
            name = self._until("}", "a category")
        negated = (char == "P") != name.startswith("^")
        name = name.removeprefix("^")
        if name != "Any" and not (name[:1] in _CATEGORIES and name[1:] in ("", *_CATEGORIES[name[0]])):
            raise BadPattern(f"category {name!r} is not known; general ones are, scripts are not")
        return Chars(tests=(lambda one: name == "Any" or unicodedata.category(one).startswith(name),), negated=negated)

    def _character(self, char: str) -> str:
        """The character that the escape of backslash and `char` (n, x41, 101) stands for. BadPattern for others."""
        if char in _CONTROL:
            return chr(_CONTROL[char])
        if char == "x":
            return self._hexadecimal()
        if char in "01234567":
            digits = char
            while len(digits) < 3 and self.text[self.at : self.at + 1] in tuple("01234567"):
                digits += self._next("an escape")
            if char != "0" and len(digits) == 1:
                raise BadPattern(f"\\{char}: what a group has matched cannot be referred to")
            return chr(int(digits, 8))
        if char.isascii() and not char.isalnum():
            return char
        raise BadPattern(f"escape \\{char} is not known")

    def _hexadecimal(self) -> str:
        digits = self._until("}", "a code") if self._take("{") else self._next("a code") + self._next("a code")
        try:
            if not digits.isalnum():
                raise ValueError
            return chr(int(digits, 16))
        except (ValueError, OverflowError) as error:
            raise BadPattern(f"\\x{digits} is no code of a character") from error

    def _class(self) -> Chars:
        negated = self._take("^")
        ranges, tests = list[Range](), list[Test]()
        first = True
        while first or not self._take("]"):
            first = False
            kind = self._posix_class() or self._class_escape_in_class()
            if kind is not None:
                plain = not kind.negated and not kind.tests
                ranges += kind.ranges if plain else ()
                tests += () if plain else (kind.has,)
                continue
            low = self._member()
            high = low
            if self.text.startswith("-", self.at) and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self._member()
            if high < low:
                raise BadPattern(f"range {low}-{high} is the wrong way round")
            ranges.append((ord(low), ord(high)))
        return Chars(tuple(ranges), tuple(tests), negated, self.flags.i)

    def _posix_class(self) -> Chars | None:
        end = self.text.find(":]", self.at)
        if not self.text.startswith("[:", self.at) or end < 0:
            return None
        name = self.text[self.at + 2 : end]
        self.at = end + 2
        if name.removeprefix("^") not in _POSIX:
            raise BadPattern(f"class [:{name}:] is not known")
        return Chars(_POSIX[name.removeprefix("^")], negated=name.startswith("^"))

    def _class_escape_in_class(self) -> Chars | None:
        if not self.text.startswith("\\", self.at) or self.text[self.at + 1 : self.at + 2] not in tuple("dDsSwWpP"):
            return None
        self.at += 2
        return self._class_escape(self.text[self.at - 1])

    def _member(self) -> str:
        char = self._next("a class")
        return self._character(self._next("an escape")) if char == "\\" else char


# The NFA of a pattern: a state either reads a character, or has epsilon transitions.


@dataclass
class _NfaState:
    chars: Chars | None = None  # the characters that it reads; None: epsilon transitions
    assertion: str = ""  # a condition of the epsilon transitions, see `Assertion`
    then: list[int] = field(default_factory=list)  # the next states


class _Builder:
    """Builds the NFA of a syntax tree: `build` adds a node before state `then`, and returns its first state."""

    def __init__(self) -> None:
        self.states: list[_NfaState] = [_NfaState()]  # state 0 accepts
        self._built = 0

    def add(self, state: _NfaState) -> int:
        if len(self.states) >= MOST_STATES:
            raise BadPattern(f"it has more than {MOST_STATES} states")
        self.states.append(state)
        return len(self.states) - 1

    def build(self, node: Node, then: int) -> int:
        self._built += 1
        if self._built > 10 * MOST_STATES:  # nested repetitions of nothing add no states
            raise BadPattern("it repeats too much")
        match node:
            case Chars():
                return self.add(_NfaState(chars=node, then=[then]))
            case Assertion(kind):
                return self.add(_NfaState(assertion=kind, then=[then]))
            case Concatenation(parts):
                for part in reversed(parts):
                    then = self.build(part, then)
                return then
            case Alternation(parts):
                return self.add(_NfaState(then=[self.build(part, then) for part in parts]))
            case Repetition(part, least, most):
                return self._repeat(part, least, most, then)

    def _repeat(self, part: Node, least: int, most: int | None, then: int) -> int:
        if most is None:
            fork = self.add(_NfaState(then=[then]))
            self.states[fork].then.append(self.build(part, fork))
            then = fork
        else:
            end = then
            for _ in range(most - least):
                then = self.add(_NfaState(then=[end, self.build(part, then)]))
        for _ in range(least):
            then = self.build(part, then)
        return then


_NOTHING, _NEWLINE, _LETTER, _OTHER = range(4)  # classes of neighbouring characters, for assertions


def _char_class(char: str) -> int:
    return _NEWLINE if char == "\n" else _LETTER if _WORD.has(char) else _OTHER


_ASSERTIONS: dict[str, Callable[[int, int], bool]] = {
    "A": lambda before, after: before == _NOTHING,
    "z": lambda before, after: after == _NOTHING,
    "^": lambda before, after: before in (_NOTHING, _NEWLINE),
    "$": lambda before, after: after in (_NOTHING, _NEWLINE),
    "b": lambda before, after: (before == _LETTER) != (after == _LETTER),
    "B": lambda before, after: (before == _LETTER) == (after == _LETTER),
}


class _DfaState:
    """A state of the deterministic automaton: a set of NFA states, and the class of the previous character."""

    __slots__ = ("before", "next", "nfa_states")

    def __init__(self, nfa_states: frozenset[int], before: int) -> None:
        self.nfa_states, self.before = nfa_states, before
        self.next: dict[str, _DfaState] = {}


class _Checks:
    """Calls `check` at the first `count`, and again after every 10,000 visits of states."""

    def __init__(self, check: Callable[[], object]) -> None:
        self._check, self._left = check, 0

    def count(self, visits: int) -> None:
        self._left -= visits
        if self._left <= 0:
            self._left = _VISITS_PER_CHECK
            self._check()


class Pattern:
    """A compiled pattern. Any number of threads may match with it."""

    def __init__(self, text: str) -> None:
        """BadPattern if `text` is no valid pattern."""
        builder = _Builder()
        try:
            self._start = builder.build(_Parser(text).parse(), 0)
        except RecursionError as error:
            raise BadPattern("it is nested too deeply") from error
        self._states = builder.states
        self._dfa: dict[tuple[frozenset[int], int], _DfaState] = {}
        self._clear_cache()

    def matches(self, text: str, check: Callable[[], object] = bool) -> bool:
        """Whether the whole of `text` matches. `check` is called regularly, and may raise to stop the match."""
        state = self._first
        for start in range(0, len(text), _CHARS_PER_CHECK):
            check()
            for char in text[start : start + _CHARS_PER_CHECK]:
                found = state.next.get(char)
                if found is None:
                    check()
                    found = self._step(state, char)
                state = found
                if not state.nfa_states:
                    return False
        return 0 in self._epsilon_closure(state, _NOTHING)

    def spans(self, text: str, check: Callable[[], object] = bool) -> Iterator[tuple[int, int]]:
        """The starts and ends of the matches in a text, from left to right and without overlaps.

        Each match begins as early as possible, and is the longest one from there (RE2 with `longest_match`); it may be
        empty. To find one, the search may read the text to its end. `check` is called regularly, and may raise to stop
        the search.
        """
        at, checks = 0, _Checks(check)
        while at <= len(text) and (found := self._first_span(text, at, checks)) is not None:
            yield found
            at = found[1] + (found[0] == found[1])

    def _first_span(self, text: str, begin: int, checks: _Checks) -> tuple[int, int] | None:
        """The first match at or after `begin`; None if there is none."""
        threads: dict[int, int] = {}  # NFA states, each with the earliest start of a match that reaches it
        best: tuple[int, int] | None = None
        before = _char_class(text[begin - 1]) if begin else _NOTHING
        for at in range(begin, len(text) + 1):
            if best is None:
                threads.setdefault(self._start, at)
            after = _char_class(text[at]) if at < len(text) else _NOTHING
            reached = self._earliest_starts(threads, before, after)
            checks.count(1 + len(reached))
            if 0 in reached and (best is None or reached[0] <= best[0]):
                best = reached[0], at
            threads = {}
            for state, start in reached.items() if at < len(text) else ():
                chars, then = self._states[state].chars, self._states[state].then
                if chars is not None and (best is None or start <= best[0]) and chars.has(text[at]):
                    threads[then[0]] = min(start, threads.get(then[0], start))
            if best is not None and not threads:
                return best
            before = after
        return best

    def _earliest_starts(self, threads: Mapping[int, int], before: int, after: int) -> dict[int, int]:
        """The threads after epsilon transitions between characters of these classes."""
        reached: dict[int, int] = {}
        for first, start in sorted(threads.items(), key=itemgetter(1)):
            waiting = [first]
            while waiting:
                state = waiting.pop()
                if state in reached:
                    continue
                reached[state] = start
                node = self._states[state]
                if node.chars is None and (not node.assertion or _ASSERTIONS[node.assertion](before, after)):
                    waiting += node.then
        return reached

    def _clear_cache(self) -> None:
        for known in tuple(self._dfa.values()):
            known.next = {}  # breaks reference cycles, so that the memory is freed at once
        self._first = _DfaState(frozenset((self._start,)), _NOTHING)
        self._dfa = {(self._first.nfa_states, _NOTHING): self._first}
        self._steps = self._cached_states = 0

    def _step(self, state: _DfaState, char: str) -> _DfaState:
        beside = _char_class(char)
        nfa_states = frozenset(
            then
            for index in self._epsilon_closure(state, beside)
            if (chars := self._states[index].chars) is not None and chars.has(char)
            for then in self._states[index].then
        )
        if self._steps >= _MOST_TRANSITIONS or self._cached_states >= _MOST_NFA_STATES:
            self._clear_cache()
        self._steps += 1
        after = self._dfa.setdefault((nfa_states, beside), _DfaState(nfa_states, beside))
        if after.nfa_states is nfa_states:
            self._cached_states += len(nfa_states)
        state.next[char] = after
        return after

    def _epsilon_closure(self, state: _DfaState, after: int) -> set[int]:
        """The NFA states in `state` and behind its epsilon transitions, before a character of class `after`."""
        seen, waiting = set(state.nfa_states), [*state.nfa_states]
        while waiting:
            at = self._states[waiting.pop()]
            if at.chars is None and (not at.assertion or _ASSERTIONS[at.assertion](state.before, after)):
                new = [then for then in at.then if then not in seen]
                seen.update(new)
                waiting += new
        return seen


@lru_cache(64)
def compile_pattern(text: str) -> Pattern:
    """The compiled pattern of a text, cached. BadPattern if it is not valid."""
    return Pattern(text)
