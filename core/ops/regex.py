"""Regular expressions with RE2's syntax, matched in time proportional to the text, whatever the pattern.

ONNX asks for RE2's (https://github.com/google/re2/wiki/Syntax). Python's `re` has another syntax and goes back and
forth: a pattern of an uploaded model could take it for ever, holding the interpreter's lock. Here a pattern becomes a
nondeterministic automaton; the sets of states that texts lead to are kept as states of a deterministic one (Thompson,
1968). Only whole strings are matched, so it makes no difference which of several ways matches, and groups capture
nothing.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeAlias

MOST_STATES = 20_000  # of the automaton of a pattern
MOST_REPEATS = 1000  # in {n,m}, as in RE2
_MOST_KNOWN = 50_000  # steps from one deterministic state to the next that are remembered
_AT_ONCE = 100_000  # characters whose steps are known, milliseconds
_MOST_PLACES = 1_000_000  # states of the automaton in the deterministic ones, tens of bytes each


class BadPattern(ValueError):
    """The pattern is none; the message says where."""


# What one character must be: inside any of the ranges, or of the predicates; both ends of a range belong to it.
Range: TypeAlias = tuple[int, int]
Test: TypeAlias = Callable[[str], bool]


@dataclass(frozen=True)
class Chars:
    ranges: tuple[Range, ...] = ()
    tests: tuple[Test, ...] = ()
    negated: bool = False
    folded: bool = False  # upper and lower case are the same

    def has(self, char: str) -> bool:
        forms = _forms(char) if self.folded else (char,)
        return any(map(self._has, forms)) != self.negated

    def _has(self, char: str) -> bool:
        code = ord(char)
        return any(low <= code <= high for low, high in self.ranges) or any(test(char) for test in self.tests)


def _forms(char: str) -> set[str]:
    """A character in all its cases."""
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
_CATEGORIES = {"C": "cfos", "L": "lmotu", "M": "cen", "N": "dlo", "P": "cdefios", "S": "ckmo", "Z": "lps"}  # and kinds

# A pattern as a tree.


@dataclass(frozen=True)
class Place:
    """Nothing, at a place like this: "A" begin or "z" end of the text, "^" or "$" of a line, "b" or "B" a word's."""

    kind: str


@dataclass(frozen=True)
class Joined:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Either:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repeated:
    part: Node
    least: int
    most: int | None


Node: TypeAlias = Chars | Place | Joined | Either | Repeated


@dataclass(frozen=True)
class _Flags:
    i: bool = False  # upper and lower case are the same
    m: bool = False  # ^ and $ are those of lines, too
    s: bool = False  # a dot is a newline, too


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.text, self.at, self.flags = pattern, 0, _Flags()

    def parse(self) -> Node:
        found = self._either()
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

    def _either(self) -> Node:
        parts = [self._joined()]
        while self._take("|"):
            parts.append(self._joined())
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _joined(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            one = self._one()
            parts += one if isinstance(one, list) else [self._repeated(one)]
            if not one and parts:  # what follows flags repeats what stands before them
                parts[-1] = self._repeated(parts[-1])
        return Joined(tuple(parts))

    def _one(self) -> Node | list[Node]:
        """What may be repeated; a list for what is no node: flags, and quoted characters but the last."""
        char = self._next("the pattern")
        match char:
            case "(":
                return self._group()
            case "[":
                return self._class()
            case "\\":
                return self._escaped()
            case ".":
                return _ANY if self.flags.s else _ANY_BUT_NEWLINE
            case "^":
                return Place("^" if self.flags.m else "A")
            case "$":
                return Place("$" if self.flags.m else "z")
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
        found = self._either()
        if not self._take(")"):
            raise BadPattern("missing )")
        self.flags = before
        return found

    def _set_flags(self) -> bool:
        """Read flags up to a colon, or to the end of the group: whether it is that."""
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
                    pass  # whether as much or as little as possible is taken: a whole string matches or does not
                case _:
                    raise BadPattern(f"(?{char} is not known")

    def _until(self, end: str, what: str) -> str:
        stop = self.text.find(end, self.at)
        if stop < 0:
            raise BadPattern(f"{what} is not ended")
        found, self.at = self.text[self.at : stop], stop + len(end)
        return found

    def _repeated(self, node: Node) -> Node:
        before = None
        while (bounds := self._bounds()) is not None:
            if before is not None:
                raise BadPattern(f"two repetitions one after the other: {self.text[before : self.at]}")
            before = self.at - 1
            self._take("?")
            node = Repeated(node, *bounds)
        return node

    def _bounds(self) -> tuple[int, int | None] | None:
        """The numbers of a repetition; None where none comes, and a brace stands for itself."""
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

    def _escaped(self) -> Node | list[Node]:
        char = self._next("an escape")
        if char in "AzbB":
            return Place(char)
        if char == "Q":
            end = self.text.find("\\E", self.at)
            quoted, self.at = (self.text[self.at :], len(self.text)) if end < 0 else (self.text[self.at : end], end + 2)
            last = [self._repeated(self._literal(quoted[-1]))] if quoted else []
            return [*map(self._literal, quoted[:-1]), *last]
        return self._kind(char) or self._literal(self._character(char))

    def _kind(self, char: str) -> Chars | None:
        r"""What \d, \pL and their like stand for."""
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
        """The character that an escape stands for."""
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
            kind = self._named() or self._escaped_kind()
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

    def _named(self) -> Chars | None:
        end = self.text.find(":]", self.at)
        if not self.text.startswith("[:", self.at) or end < 0:
            return None
        name = self.text[self.at + 2 : end]
        self.at = end + 2
        if name.removeprefix("^") not in _POSIX:
            raise BadPattern(f"class [:{name}:] is not known")
        return Chars(_POSIX[name.removeprefix("^")], negated=name.startswith("^"))

    def _escaped_kind(self) -> Chars | None:
        if not self.text.startswith("\\", self.at) or self.text[self.at + 1 : self.at + 2] not in tuple("dDsSwWpP"):
            return None
        self.at += 2
        return self._kind(self.text[self.at - 1])

    def _member(self) -> str:
        char = self._next("a class")
        return self._character(self._next("an escape")) if char == "\\" else char


# A pattern as an automaton: a state either takes a character, or leads on without one.


@dataclass
class _State:
    takes: Chars | None = None  # the next state is the only one of `then`
    where: str = ""  # only here may one go on, see Place
    then: list[int] = field(default_factory=list)


class _Builder:
    """Appends states for a tree; each method is given the state to go on to and returns where to begin."""

    def __init__(self) -> None:
        self.states: list[_State] = [_State()]  # the first one: all is matched
        self._built = 0

    def add(self, state: _State) -> int:
        if len(self.states) >= MOST_STATES:
            raise BadPattern(f"it has more than {MOST_STATES} states")
        self.states.append(state)
        return len(self.states) - 1

    def build(self, node: Node, then: int) -> int:
        self._built += 1
        if self._built > 10 * MOST_STATES:  # of nothing, many times
            raise BadPattern("it repeats too much")
        match node:
            case Chars():
                return self.add(_State(takes=node, then=[then]))
            case Place(kind):
                return self.add(_State(where=kind, then=[then]))
            case Joined(parts):
                for part in reversed(parts):
                    then = self.build(part, then)
                return then
            case Either(parts):
                return self.add(_State(then=[self.build(part, then) for part in parts]))
            case Repeated(part, least, most):
                return self._repeat(part, least, most, then)

    def _repeat(self, part: Node, least: int, most: int | None, then: int) -> int:
        if most is None:
            fork = self.add(_State(then=[then]))
            self.states[fork].then.append(self.build(part, fork))
            then = fork
        else:
            end = then
            for _ in range(most - least):
                then = self.add(_State(then=[end, self.build(part, then)]))
        for _ in range(least):
            then = self.build(part, then)
        return then


_NOTHING, _NEWLINE, _LETTER, _OTHER = range(4)  # what stands beside a place


def _beside(char: str) -> int:
    return _NEWLINE if char == "\n" else _LETTER if _WORD.has(char) else _OTHER


_HOLDS: dict[str, Callable[[int, int], bool]] = {
    "A": lambda before, after: before == _NOTHING,
    "z": lambda before, after: after == _NOTHING,
    "^": lambda before, after: before in (_NOTHING, _NEWLINE),
    "$": lambda before, after: after in (_NOTHING, _NEWLINE),
    "b": lambda before, after: (before == _LETTER) != (after == _LETTER),
    "B": lambda before, after: (before == _LETTER) == (after == _LETTER),
}


class _Known:
    """A deterministic state: where one may be, and what stands before."""

    __slots__ = ("before", "next", "places")

    def __init__(self, places: frozenset[int], before: int) -> None:
        self.places, self.before = places, before
        self.next: dict[str, _Known] = {}


class Pattern:
    """A compiled pattern. Any number of threads may match with it."""

    def __init__(self, text: str) -> None:
        """Raises BadPattern."""
        builder = _Builder()
        try:
            self._begin = builder.build(_Parser(text).parse(), 0)
        except RecursionError as error:
            raise BadPattern("it is nested too deeply") from error
        self._states = builder.states
        self._known: dict[tuple[frozenset[int], int], _Known] = {}
        self._forget()

    def matches(self, text: str, check: Callable[[], object] = bool) -> bool:
        """Whether the whole of `text` matches. `check` is called before whatever takes long; its error ends this."""
        state = self._first
        for start in range(0, len(text), _AT_ONCE):
            check()
            for char in text[start : start + _AT_ONCE]:
                found = state.next.get(char)
                if found is None:
                    check()
                    found = self._step(state, char)
                state = found
                if not state.places:
                    return False
        return 0 in self._reached(state, _NOTHING)

    def _forget(self) -> None:
        for known in tuple(self._known.values()):
            known.next = {}  # they refer to each other: so their memory goes at once
        self._first = _Known(frozenset((self._begin,)), _NOTHING)
        self._known = {(self._first.places, _NOTHING): self._first}
        self._steps = self._places = 0

    def _step(self, state: _Known, char: str) -> _Known:
        beside = _beside(char)
        places = frozenset(
            then
            for index in self._reached(state, beside)
            if (takes := self._states[index].takes) is not None and takes.has(char)
            for then in self._states[index].then
        )
        if self._steps >= _MOST_KNOWN or self._places >= _MOST_PLACES:
            self._forget()
        self._steps += 1
        after = self._known.setdefault((places, beside), _Known(places, beside))
        if after.places is places:
            self._places += len(places)
        state.next[char] = after
        return after

    def _reached(self, state: _Known, after: int) -> set[int]:
        """All places that lead on from a state without a character."""
        seen, waiting = set(state.places), [*state.places]
        while waiting:
            at = self._states[waiting.pop()]
            if at.takes is None and (not at.where or _HOLDS[at.where](state.before, after)):
                new = [then for then in at.then if then not in seen]
                seen.update(new)
                waiting += new
        return seen


@lru_cache(64)
def compiled(text: str) -> Pattern:
    """The pattern of a text; raises BadPattern."""
    return Pattern(text)
