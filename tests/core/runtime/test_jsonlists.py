"""The native parser of JSON number lists against Python's json and orjson: the same bits, or not parsed."""

from __future__ import annotations

import json
import os
import random
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import inf, nextafter, prod
from pathlib import Path

import numpy as np
import orjson
import pytest

from lathe.core.codegen.json_numbers import READERS
from lathe.core.runtime.host.json_lists import json_lists

EDGES = """
0 -0 0.0 -0.0 0e5 -0e5 -0E-0 0.0e400 1e-400 1e-99999 0e99999 1e308 1.7976931348623157e308 1.7976931348623158e308
179769313486231570000000000000000000000000000000000000000000000000000000000000000000000000000000000000e207 2.5e-324
4.9e-324 5e-324 2.4703282292062327e-324 2.4703282292062328e-324 2.2250738585072011e-308 2.2250738585072012e-308
2.2250738585072014e-308 9007199254740991 9007199254740992 9007199254740993 9007199254740994 9007199254740995
9007199254740993.0000000000000000001 9223372036854775807 9223372036854775808 -9223372036854775808 -9223372036854775809
18446744073709551615 18446744073709551616 -18446744073709551616 36893488147419103232 -36893488147419103232
123456789012345678901234567890 1e22 1e23 8.5e22 1e-22 1e-23 3.4028235e38 3.4028235677973366e38 3.5e38 1e-45 7e-46
1.00000005960464477539062500000000000000000000000001 1.000000059604644775390625
0.00000000000000000000000000000000000001 NaN Infinity -Infinity 1e0000001 1E+5 1e+05 12345678 123456789
1234567812345678 12345678.12345678
"""
NO_NUMBERS = """
01 -01 00 1. 1.e5 .5 +1 - -- 1e 1e+ 1e- 0.1e 1e1.5 0x10 1_000 1,5 nan NAN -NaN inf Inf Infinit infinity -infinity null
true "1" {} 1e400 179769313486231570e300 123456789012345678901234567890e290 -1e400 1.8e308 1e308000 0.1.2 1-2 1e5e5
1ee5 NaNN ١ 1e99999999 /1 :1 9: 1/
"""
INTEGERS = [np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)]


def read(text: str | bytes, dtype: object, shape: Sequence[int], around: bytes = b"") -> np.ndarray | None:
    """The array, or None if the reader declines; checks that reading ends at the list's end."""
    text = text.encode() if isinstance(text, str) else text
    array = np.empty(tuple(shape), np.dtype(dtype))  # type: ignore[call-overload]
    assert json_lists().can_read(array.dtype, array.shape, 2 * array.size)
    end = json_lists().read(around + text + around, len(around), array)
    assert end in (None, len(around) + len(text))
    return None if end is None else array


def bits(array: np.ndarray) -> list[int]:
    return list(array.reshape(-1).view(f"u{array.itemsize}").tolist())


def assert_reads(words: Sequence[str], separator: str = ", ") -> None:
    """Each word must become the float64 and float32 that Python and NumPy make of it."""
    text = "[" + separator.join(words) + "]"
    expected = np.array([float(value) for value in json.loads(text)])
    for dtype in (np.float64, np.float32):
        got = read(text, dtype, [len(words)])
        assert got is not None
        with np.errstate(over="ignore"):
            wanted = bits(expected.astype(dtype))
        if (found := bits(got)) != wanted:
            wrong = next(index for index, value in enumerate(wanted) if found[index] != value)
            pytest.fail(f"{words[wrong]} became {got[wrong]!r}, expected {expected[wrong]!r}")


def any_double(rng: random.Random) -> float:
    """Any bits that are a finite number: as many tiny ones as huge ones."""
    while True:
        value = float(struct.unpack("d", rng.randbytes(8))[0])
        if abs(value) < inf and value == value:
            return value


def digits(rng: random.Random, count: int) -> str:
    return "".join(rng.choices("0123456789", k=count))


def any_word(rng: random.Random) -> str:
    """A number of any form that JSON allows."""
    further = digits(rng, rng.choice([0, 0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 18, 19, 25]))
    whole = rng.choice(["0", str(rng.randint(1, 9)) + further])
    fraction = rng.choice(["", "." + "0" * rng.choice([0, 0, 1, 3, 8, 20]) + digits(rng, rng.randint(1, 24))])
    power = str(rng.randint(0, 280)).zfill(rng.randint(1, 4))
    exponent = rng.choice(["", "", rng.choice("eE") + rng.choice(["", "+", "-"]) + power])
    return rng.choice(["", "-"]) + whole + fraction + exponent


def halfway(rng: random.Random) -> str:
    """All digits of the midpoint of two float64, or of a number that differs by 1 in the last digit."""
    low = abs(any_double(rng)) % 1e15 or 1.0
    middle = (Fraction(low) + Fraction(nextafter(low, inf))) / 2
    scale = middle.denominator.bit_length() - 1  # denominator 2**scale: `scale` decimals are exact
    number = middle.numerator * 5**scale + rng.choice([-1, 0, 0, 1])
    return f"{number}e-{scale}" if scale < 5_000 else "0"


FORMS: dict[str, Callable[[random.Random], str]] = {
    "shortest": lambda rng: repr(any_double(rng)),
    "of single precision": lambda rng: repr(struct.unpack("f", rng.randbytes(4))[0]),
    "decimals": lambda rng: f"{rng.uniform(-1000, 1000):.{rng.randint(0, 8)}f}",
    "few decimals": lambda rng: f"{rng.uniform(-12, 12):.{rng.randint(0, 10)}f}",
    "rounded": lambda rng: repr(round(rng.random(), 4)),
    "seventeen digits": lambda rng: f"{any_double(rng):.17e}",
    "uniform": lambda rng: repr(rng.random()),
    "many decimals": lambda rng: f"{rng.random():.30f}",
    "integers": lambda rng: str(rng.getrandbits(rng.randint(1, 64)) - rng.getrandbits(rng.randint(1, 63))),
    "any": any_word,
    "halfway": halfway,
    "subnormal": lambda rng: repr(struct.unpack("d", struct.pack("Q", rng.getrandbits(52)))[0]),
    "short beside powers of two": lambda rng: f"{2.0 ** rng.randint(-1074, 1000):.{rng.randint(1, 18)}e}",
}


@pytest.mark.sample(5, native=True)
@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_rounded_as_python_rounds_them(form: str) -> None:
    rng = random.Random(form)
    words = [FORMS[form](rng) for _ in range(20_000 if form != "halfway" else 50)]
    assert_reads([word.replace("nan", "NaN").replace("inf", "Infinity") for word in words])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", range(10))
def test_many_numbers_are_rounded_as_python_rounds_them(form: str, part: int) -> None:
    rng = random.Random(f"{form} {part}")
    for _ in range(10):
        words = [FORMS[form](rng) for _ in range(20_000 if form != "halfway" else 50)]
        assert_reads([word.replace("nan", "NaN").replace("inf", "Infinity") for word in words])


@pytest.mark.parametrize("separator", [",", ", ", ",  ", " ,", " , ", ",\n\t"])
def test_numbers_of_few_digits_between_all_kinds_of_spaces(separator: str) -> None:
    rng = random.Random(separator)
    words = [FORMS[rng.choice(["few decimals", "few decimals", "rounded", "any"])](rng) for _ in range(5_000)]
    assert_reads(words, separator)
    for count in range(1, 40):  # the last numbers are too near to the end to load a whole word
        assert_reads(words[:count], separator)


def test_all_numbers_of_one_digit_before_the_point_and_few_behind_it() -> None:
    for places in range(1, 6):
        words = [f"{whole // 10**places}.{whole % 10**places:0{places}}" for whole in range(10 ** (places + 1))]
        assert_reads(words)
        assert_reads([f"-{word}" for word in words], ",")


def test_numbers_at_the_edges() -> None:
    assert_reads(EDGES.split())
    assert_reads(["0." + "0" * 400 + "1", "1" + "0" * 300, "0." + "123456789" * 500, "123456789" * 30 + "." + "0" * 99])


def test_invalid_numbers_are_not_parsed() -> None:
    for word in NO_NUMBERS.split():
        assert read(f"[{word}]", np.float64, [1]) is None, word
        assert read(f"[1,{word}, 2]", np.float32, [3]) is None, word
        for start in ("", "0.", "-0.25"):  # some words are numbers after such a start
            text = f"[0.5, {start}{word}, 1.25, 2.5, 3.5]"
            got = read(text, np.float64, [5])
            assert got is None or got.tolist() == json.loads(text)


def test_integers_are_read_within_their_range() -> None:
    rng = random.Random(1)
    for dtype in INTEGERS:
        limits = np.iinfo(dtype)
        edges = {int(limit) + step for limit in (limits.min, limits.max) for step in (-1, 0, 1)}
        edges |= {0, 1, -1, 9, 10, 10**8, 10**8 - 1, 10**16, 10**19, 10**19 - 1, 2 * 10**19, 3 * 10**19, 10**20}
        edges |= {2**64 - 1, 2**64, 2**64 + 5}
        values = [rng.randint(int(limits.min), int(limits.max)) >> rng.randint(0, 63) for _ in range(5_000)]
        got = read(json.dumps(values), dtype, [len(values)])
        assert got is not None and got.tolist() == values
        for value in edges:
            got = read(f"[{value}]", dtype, [1])
            assert (None if got is None else got.tolist()) == ([value] if limits.min <= value <= limits.max else None)
        assert (array := read("[-0]", dtype, [1])) is not None and array.tolist() == [0]
        for word in ("1.0", "1e2", "01", "-", "", "1 2", "true", "NaN", "null", "--1", "0x1", "1" * 400):
            assert read(f"[{word}]", dtype, [1]) is None, word


def test_booleans() -> None:
    rng = random.Random(2)
    values = rng.choices([True, False], k=1000)
    got = read(json.dumps(values), np.bool_, [1000])
    assert got is not None and got.tolist() == values
    for word in ("1", "0", "True", "tru", "truee", "fals", "falsee", "null", "", '"true"'):
        assert read(f"[{word}]", np.bool_, [1]) is None, word


SHAPES = [(6,), (1,), (2, 3), (2, 1, 3), (1, 1, 6), (3, 2, 1, 1), (1, 1), (2, 3, 4), (5, 1, 1, 2)]


def nested(flat: list[object], shape: Sequence[int]) -> list[object]:
    for size in reversed(shape[1:]):
        flat = [flat[at : at + size] for at in range(0, len(flat), size)]
    return flat


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lists_are_flat_or_nested_as_the_shape(shape: tuple[int, ...]) -> None:
    flat: list[object] = list(range(prod(shape)))
    for spaces in (None, 2):
        for depth in range(1, len(shape) + 1):
            # A less deeply nested list is accepted if the inner dimensions have one element.
            given = nested(flat, shape[:depth]) if depth > 1 else flat
            got = read(json.dumps(given, indent=spaces), np.float64, shape)
            if depth > 1 and prod(shape[:depth]) != prod(shape):
                assert got is None
            else:
                assert (
                    got is not None
                    and got.shape == shape
                    and bits(got) == bits(np.arange(prod(shape), dtype=np.float64))
                )


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("[[1,2,3],[4,5,6]]", (2, 3)),
        ("[[1,2],[3,4],[5,6]]", (3, 2)),
        ("[1,2,3,4,5,6]", (2, 3)),
        ("[0.25, -1.5,2.0625,3.5, 4.03125, 5.5]", (2, 3)),
    ],
)
def test_damaged_lists_are_not_parsed(text: str, shape: tuple[int, ...]) -> None:
    """Of all lists that differ in one or two characters, those are parsed that Python reads in the same shape."""
    characters = '[],1 2.e-"{}\n\x00'
    damaged = {
        text[:at] + c + text[at + skip :]
        for at in range(len(text) + 1)
        for c in ("", *characters)
        for skip in (0, 1, 2)
    }
    read_by_both = 0
    for one in damaged:
        try:
            expected: object = orjson.loads(one)
        except orjson.JSONDecodeError:
            expected = None
        got = read(one, np.float64, shape) if ends_plainly(one) else None
        if got is None:
            good = isinstance(expected, list) and np.shape(flat_or_nested(expected)) in (shape, (6,))
            assert not good or not ends_plainly(one), one
        else:
            assert np.array_equal(np.array(expected, np.float64).reshape(shape), got), one
            read_by_both += 1
    assert read_by_both > 3


INSTEAD = """
0.5-3.5 0.5_3.5 0.5_-3.5 -_3.5 --3.5 3.5.5 3..5 .5 3. 33.5 - 3, 3.5, ,3.5 __3.5 _3.5 3.5_ -0.0 0.123456789 0.12345678
-0.12345678 3/5 3:5 3.5/ 3.5: /3.5 3.-5 3.5- -.5 3._5 3_.5 03.5 00.5 3.5e1 3.5e 3.5] [3.5 ] [ +3.5 3+5 _ , . 7 -7 0
"""


@pytest.mark.parametrize("separator", [",", ", "])
@pytest.mark.parametrize("shape", [(30,), (2, 15)], ids=str)
def test_damaged_lists_longer_than_a_block_are_not_parsed(shape: tuple[int, ...], separator: str) -> None:
    rng = random.Random(2)
    numbers: list[object] = [round(rng.uniform(-9, 9), rng.randint(1, 8)) for _ in range(30)]
    text = json.dumps(nested(numbers, shape), separators=(separator, ":"))
    half = len(text) // 2  # part of the second half is read number by number
    damaged = {
        text[:at] + c + text[at + skip :]
        for at in range(half)
        for c in ("", *"0-., e+][\n/:\x00\xff")
        for skip in (0, 1, 2)
    }
    words = list(re.finditer(r"[-.0-9]+", text))
    for word in words[:14]:
        damaged |= {
            text[: word.start()] + other.replace("_", " ") + text[word.end() :] for other in ("", *INSTEAD.split())
        }
    for one in damaged:
        assert_read_as_python_does(one, shape)


def assert_read_as_python_does(text: str, shape: tuple[int, ...]) -> None:
    """Lists that Python reads must give the same array; all other texts are not parsed."""
    if not ends_plainly(text):
        return
    try:
        expected = flat_or_nested(json.loads(text))
    except json.JSONDecodeError:
        expected = None
    is_good = expected is not None and expected.shape in (shape, (prod(shape),)) and bool(np.isfinite(expected).all())
    got = read(text.encode("latin-1"), np.float64, shape)
    if got is not None or (is_good and "e" not in text):  # exponents may be too large for the reader
        assert is_good and got is not None and expected is not None, text
        assert bits(got) == bits(expected), text


def ends_plainly(text: str) -> bool:
    """True if the text is a list from its first to its last character, so that its end can be compared."""
    return (
        text.startswith("[") and text.endswith("]") and text.count("]") == text.count("[") and not text.endswith("[]")
    )


def flat_or_nested(value: object) -> np.ndarray | None:
    try:
        return np.array(value, np.float64)
    except (TypeError, ValueError):
        return None


def test_no_access_outside_of_the_text_and_the_array() -> None:
    """The text may end after any byte; superfluous numbers are not stored."""
    text = b"[[1.25, 22.5e1, -12345678.12345678], [4, 5, 6]]"
    for stop in range(len(text)):
        block = np.full(8, 7.0)
        assert json_lists().read(text[:stop], 0, block[1:7].reshape(2, 3)) is None
        assert block[0] == block[7] == 7.0
    block = np.full(8, 7.0)
    assert json_lists().read(b"[1,2,3,4,5,6,7,8]", 0, block[1:7]) is None
    assert block[0] == block[7] == 7.0


def test_a_list_of_many_hard_numbers_is_not_parsed() -> None:
    """Each needs a call of Python, so the reader accepts some of them, but not many."""
    hard = "9007199254740993" + "0" * 30 + "1e-31"
    assert_reads([hard] * 60)
    assert read("[" + ",".join([hard] * 100) + "]", np.float64, [100]) is None


def test_supported_arrays() -> None:
    takes = json_lists().can_read
    assert takes(np.dtype(np.float32), (2, 3), 12) and takes(np.dtype(np.float32), (), 2)
    assert not takes(np.dtype(np.float16), (2,), 100) and not takes(np.dtype(np.object_), (2,), 100)
    assert not takes(np.dtype(np.float32), (2, 0), 100), "what has no elements shows no shape"
    assert not takes(np.dtype(np.float32), (2, 3), 11), "a text this short cannot have so many numbers"
    assert not takes(np.dtype(np.float32), (1,) * 33, 100)
    assert (array := read("[5]", np.float32, ())) is not None and array.tolist() == 5.0


def test_objects_are_compiled_once_per_machine(tmp_path: Path) -> None:
    """The second process links the object code of the first."""
    program = (
        "from lathe.core.runtime.host import json_lists as jsonlists; made = []\n"
        "compile_text = jsonlists.compile_text\n"
        "jsonlists.compile_text = lambda *given: (made.append(1), compile_text(*given))[1]\n"
        f"jsonlists.json_lists({str(tmp_path / 'store')!r}); print(len(made))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    made = [
        int(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, env=environment).stdout)
        for _ in range(2)
    ]
    assert made == [len(READERS), 0]
