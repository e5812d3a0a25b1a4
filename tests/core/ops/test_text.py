"""Operators on strings against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

import lathe
from lathe.core.errors import ModelError
from tests.core.ops.small_models import agree, model

N = helper.make_node


def texts(*items: Any) -> Any:
    return np.array(items, object)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (texts("a", "bc"), texts("-x", "")),
        (texts(["a"], ["b"]), texts("1", "2", "3")),
        (texts("naïve"), texts(" ☃")),
        (np.empty((0, 2), object), texts("b")),
    ],
)
def test_concat_broadcasts(x: Any, y: Any) -> None:
    agree([N("StringConcat", ["x", "y"], ["z"])], {"x": x, "y": y}, "z")


@pytest.mark.parametrize("attrs", [{}, {"delimiter": ""}, {"delimiter": "-"}, {"delimiter": "-", "maxsplit": 1}])
def test_split(attrs: dict[str, Any]) -> None:
    x = texts(["a-b-c", "  hello   world "], ["a", "--"])
    agree([N("StringSplit", ["x"], ["parts", "counts"], **attrs)], {"x": x}, "parts", "counts")


@pytest.mark.parametrize(("delimiter", "parts"), [("-", [[""]]), ("", [[]])])
def test_split_of_an_empty_string(delimiter: str, parts: list[list[str]]) -> None:
    """As in ONNX's reference: an empty string is one part with a delimiter, and no part without one."""
    data = model([N("StringSplit", ["x"], ["y", "n"], delimiter=delimiter)], {"x": texts("")}, ["y", "n"])
    result = lathe.interpret(lathe.load(data), {"x": texts("")})
    assert result["y"].tolist() == parts
    assert result["n"].tolist() == [len(parts[0])]


@pytest.mark.parametrize("pattern", [r"www\.[\w.-]+\.\bcom\b", r"(\W|^)[\w.\-]{0,25}@(yahoo|gmail)\.com(\W|$)", ""])
def test_regular_expressions_match_whole_strings(pattern: str) -> None:
    x = texts(["www.google.com", "www.facebook.com!"], ["account@gmail.com", ""])
    agree([N("RegexFullMatch", ["x"], ["y"], pattern=pattern)], {"x": x}, "y")


@pytest.mark.parametrize("change", ["NONE", "LOWER", "UPPER"])
@pytest.mark.parametrize("sensitive", [0, 1])
@pytest.mark.parametrize("x", [texts("Monday", "tuesday", "MONDAY"), texts(["monday", "Sunday"]), texts("monday")])
def test_normalizer(change: str, sensitive: int, x: Any) -> None:
    attrs = {"case_change_action": change, "is_case_sensitive": sensitive, "stopwords": ["monday", "Tuesday"]}
    agree([N("StringNormalizer", ["x"], ["y"], locale="C", **attrs)], {"x": x}, "y")


NUMBERS = {
    "ngram_counts": [0, 4],
    "ngram_indexes": [0, 1, 2, 3, 4, 5, 6],
    "pool_int64s": [2, 3, 5, 4, 5, 6, 7, 8, 6, 7],
}
WORDS = {"ngram_counts": [0, 2, 4], "ngram_indexes": [2, 0, 3, 1], "pool_strings": ["a", "b", "a", "b", "b", "b", "a"]}
ROWS = np.int64([[1, 1, 3, 3, 3, 7, 5], [8, 6, 7, 5, 6, 8, 5]])


@pytest.mark.sample(5)
@pytest.mark.parametrize("mode", ["TF", "IDF", "TFIDF"])
@pytest.mark.parametrize(("shortest", "longest", "skips"), [(1, 1, 0), (2, 2, 0), (2, 2, 5), (1, 2, 3)])
@pytest.mark.parametrize("x", [ROWS, ROWS[1].astype(np.int32)])
def test_ngrams_of_numbers(mode: str, shortest: int, longest: int, skips: int, x: Any) -> None:
    lengths = {"min_gram_length": shortest, "max_gram_length": longest, "max_skip_count": skips}
    weights = {"weights": [0.5, 1.0, 2.0, 3.0, 0.25, 1.5, 7.0]}
    agree([N("TfIdfVectorizer", ["x"], ["y"], mode=mode, **NUMBERS, **lengths, **weights)], {"x": x}, "y")


def test_ngrams_of_words() -> None:
    lengths = {"min_gram_length": 1, "max_gram_length": 3, "max_skip_count": 1}
    node = N("TfIdfVectorizer", ["x"], ["y"], mode="TF", **WORDS, **lengths)
    agree([node], {"x": texts(["a", "b", "b", "a"], ["b", "b", "a", "c"])}, "y")


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (N("RegexFullMatch", ["x"], ["y"], pattern="("), "is not a regular expression"),
        (N("StringNormalizer", ["x"], ["y"], case_change_action="TITLE"), "expected one of NONE, LOWER, UPPER"),
        (N("StringConcat", ["x", "n"], ["y"]), "is int64, expected string"),
    ],
)
def test_invalid_attributes_are_refused_at_load(node: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        lathe.load(model([node], {"x": texts("a"), "n": np.int64([1])}, ["y"]))


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ({"max_gram_length": 0}, "counts n-grams of 1 to 0 tokens, 0 skipped; expected 1 or more"),
        ({"min_gram_length": 0}, "counts n-grams of 0 to 2 tokens"),
        ({"max_skip_count": -1}, "-1 skipped"),
        ({"ngram_counts": [-(2**63), 4]}, r"ngram_counts is \[-9223372036854775808, 4\], expected growing positions"),
        (
            {"ngram_indexes": [0, 1, 2, 3, 4, 5]},
            "has 6 ngram_indexes, expected one for each n-gram of the pool, at least",
        ),
        ({"ngram_counts": [4, 0]}, r"ngram_counts is \[4, 0\], expected growing positions up to 10"),
    ],
)
def test_ngrams_that_cannot_be_counted(attrs: dict[str, Any], message: str) -> None:
    given = {**NUMBERS, "min_gram_length": 1, "max_gram_length": 2, "max_skip_count": 0, "mode": "TF", **attrs}
    with pytest.raises(ModelError, match=message):
        lathe.load(model([N("TfIdfVectorizer", ["x"], ["y"], **given)], {"x": ROWS}, ["y"]))


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0,), (0, 0)])
def test_ngrams_of_no_tokens(shape: tuple[int, ...]) -> None:
    attrs = {**NUMBERS, "min_gram_length": 1, "max_gram_length": 2, "max_skip_count": 0, "mode": "TF"}
    x = np.zeros(shape, np.int64)
    found = lathe.interpret(lathe.load(model([N("TfIdfVectorizer", ["x"], ["y"], **attrs)], {"x": x}, ["y"])), {"x": x})
    assert found["y"].shape == (*shape[:-1], 7) and not found["y"].any()


def test_ngrams_longer_than_any_row() -> None:
    """Lengths and gaps beyond the row's end cost nothing."""
    attrs = {**NUMBERS, "min_gram_length": 1, "max_gram_length": 2**40, "max_skip_count": 2**40, "mode": "TF"}
    agree_with_shorter = {**attrs, "max_gram_length": 7, "max_skip_count": 7}
    long, short = (
        lathe.interpret(
            lathe.load(model([N("TfIdfVectorizer", ["x"], ["y"], **each)], {"x": ROWS}, ["y"])), {"x": ROWS}
        )
        for each in (attrs, agree_with_shorter)
    )
    np.testing.assert_array_equal(long["y"], short["y"])
