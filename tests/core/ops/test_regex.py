"""Regular expressions against RE2 (through ONNX Runtime): which patterns are valid, and what they match."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import lathe
from lathe.core.ops.text import regex
from lathe.core.ops.text.regex import BadPattern, Pattern

TEXTS = [
    "", "a", "b", "ab", "aab", "abc", "abab", "A", "aB", "a b", " a", "a\n", "\n", "a\nb", "0", "09", "a1", "_", "-",
    "a-b", "]", "[", "{", "a{2}", "{,2}", "aa", "aaa", "aaaa", ".", "\\", "^", "$", "é", "É", "Ж", "ж", "ß", "1.5",
    "foo.bar", "\t", "\x0b", "\x0c", "k", "K", "K", "s", "ſ", "٣", "😀", "a😀", "x@y.com", "(", ")", "|", "a|b", "*",
    "Q", "E",
]  # fmt: skip

GOOD = r"""
    a(?i)* ab(?i)+ a*(?i)* a\Q\E*
    a ab a|b |a a* a+b? (a|b)* (?:ab)+ a{2} a{2,} a{0,3} a{2,3}? a*?b (a*)* (a+)+b . .* (?s).* (?s:.)* ^a$ a$ ^ $
    \Aa\z (?m)a$\nb (?m)^a$(?s:.)^b$ \bab\b a\b.* a\B.* .*\bb \B \b [ab] [^a] [^a]* [a-c]+ []a] [^]a] [a-] [-a]+
    [a-b-c]+ [\d] \d+ \D \w+ \W \s \S+ [^\d] [^\D] [\w-]+ [\s\S]* [[:alpha:]]+ [[:^alpha:]] [[:digit:][:space:]]+
    \pL+ \PL \p{Lu} \p{^Lu} \P{^Lu} [\pL\d]+ \p{Nd} \p{So} (?i)a (?i)ab (?i)[a-b]+ (?i)[^a] (?i)é (?i)k (?i)K (?i)s
    (?i:a)b a(?i)b (a(?i)b)?a (?i)a(?-i)b (?U)a+ (?P<name>a)b (?P<1>a) (?<name>a)b \x41 \x{61} \x{1F600} \141
    \t \n \. \_ \-
    \Qa|b\E \Qa|b \Q\E \Qab\E+ \Q*\E { a{ a{,2} {,2} a{2 a{x} } ] x{2}y (|a)+ () ()* (a|)*b [\]] [\x{61}-c]+ [\t\n]
    (?i)ß \a \v (a{1,3}){2} [\w.]+@[\w.]+\.com (\W|^)a(\W|$) ^* ^*a $a a^ \z\z (?ims)^A.b$ (?s-i). é+ [é-ж] (?i)[É]
    [[:word:]]+ [a[:digit:]b]+
"""

BAD = r"""
    ( ) (a a) * +a ? a** a+* a??+ a{2}{3} (*) |* [ [a [] [b-a] [a-\d] [z-a] a{1001} a{2,1} a{1,1001} \1 (a)\1 \8 \q
    \c \y \ (?=a) (?!a) (?<=a) (?<!a) (?>a) (?P=a) (?P<>a) (?P<a-b>c) (?P<a (?x)a (?i (? \pX \p{Xx} \p \p{L
    [[:foo:]] \x \xg1
    \x{110000} \x{} (?#a) a*+ \Z \G \h \K \e [[:x {2} a|{1,}
"""


def session(pattern: str) -> onnxruntime.InferenceSession:
    x = helper.make_tensor_value_info("x", TensorProto.STRING, ["n"])
    y = helper.make_tensor_value_info("y", TensorProto.BOOL, ["n"])
    node = helper.make_node("RegexFullMatch", ["x"], ["y"], pattern=pattern)
    model = helper.make_model(
        helper.make_graph([node], "regex", [x], [y]), opset_imports=[helper.make_opsetid("", 20)], ir_version=9
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def agree(pattern: str, texts: list[str]) -> None:
    (expected,) = session(pattern).run(None, {"x": np.array(texts, object)})
    ours = Pattern(pattern)
    assert {text: ours.matches(text) for text in texts} == dict(zip(texts, expected.tolist(), strict=True)), pattern


def test_matches_agree_with_re2() -> None:
    for pattern in ("", *GOOD.split()):
        agree(pattern, TEXTS)


def is_taken(pattern: str) -> bool:
    try:
        session(pattern)
    except onnxruntime.capi.onnxruntime_pybind11_state.Fail:
        return False
    return True


def test_invalid_patterns_are_refused() -> None:
    assert [pattern for pattern in BAD.split() if is_taken(pattern)] == []
    for pattern in BAD.split():
        with pytest.raises(BadPattern):
            Pattern(pattern)


PIECES = r"a b . [ab] [^a] \b \B ^ $ (?m)^ (?m)$ ( ) (?i) | * + ? {2} {0,2} {1,} \w \W \n A - [ ] \ { } , 1"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PIECES.split()), max_size=8).map("".join))
def test_random_patterns_are_valid_exactly_if_they_are_in_re2(pattern: str) -> None:
    if is_taken(pattern):
        agree(pattern, ["", "a", "ab", "ba", "aab", "A", "a\nb", "\n", "b a", "-", "1", "]", "{", "a,b"])
    else:
        with pytest.raises(BadPattern):
            Pattern(pattern)


def tokens_of_onnx_runtime(pattern: str, texts: list[str]) -> list[list[str]]:
    """The parts of each text that match, without empty ones: ONNX Runtime's Tokenizer searches with RE2."""
    (found,) = session_of(tokenizer(tokenexp=pattern)).run(None, {"x": np.array(texts, object)})
    return [[token for token in row if token != "<none>"] for row in found.tolist()]


def tokenizer(**attrs: Any) -> bytes:
    """A model of one Tokenizer."""
    x = helper.make_tensor_value_info("x", TensorProto.STRING, ["n"])
    y = helper.make_tensor_value_info("y", TensorProto.STRING, None)
    given = {"mark": 0, "mincharnum": 1, "pad_value": "<none>", **attrs}
    node = helper.make_node("Tokenizer", ["x"], ["y"], domain="com.microsoft", **given)
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "tokens", [x], [y])
    return bytes(helper.make_model(graph, opset_imports=imports, ir_version=9).SerializeToString())


def session_of(data: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(data, options)


def parts(pattern: str, text: str) -> list[str]:
    return [text[start:end] for start, end in Pattern(pattern).spans(text) if end > start]


SEARCHED = r"""
    a ab a|ab ab|a a* a+ a+? a*?b a{1,2} a{1,2}? (a|ab)(c|bcd) [a-c]+ [^a]+ \w+ \d+ \S+ \b\w (.) .+ .+? (?U)a+ (?U)a+?
    a.*b a.*?b \w+@\w+ (?i)A+ ^a a$ (?m)^\w+ (?m)\w+$ \Bb a|b|ab (a*)(b*) [A-Za-z]+|\d+ (?s).+ \pL+ é+ (a+|b)* a??b
"""


def test_searches_agree_with_re2() -> None:
    texts = [*(text for text in TEXTS if text), "aab abcd 12 a1", "xaaab\nab ba", "abcbcd aabbab", "foo bar@baz 3.14"]
    for pattern in SEARCHED.split():
        assert [parts(pattern, text) for text in texts] == tokens_of_onnx_runtime(pattern, texts), pattern


@pytest.mark.slow
@settings(max_examples=600)
@given(st.text("ab|*+?(){}1,.[]^$", min_size=1, max_size=9))
def test_random_searches_agree_with_re2(pattern: str) -> None:
    texts = ["aab abab", "ab1b,a", "bbaa.a|b", "aaaa", "(ab)*"]
    try:
        found = [parts(pattern, text) for text in texts]
    except BadPattern:
        return
    assert found == tokens_of_onnx_runtime(pattern, texts)


SEPARATORS = ["a,ab", "ab,a", "b,ab", "bc,ab", "ab,bc", "bc,abc", r"a|ab,\s+,c", "a,^b", r"(?i)B,a$", " "]


@pytest.mark.parametrize("mark", [0, 1])
@pytest.mark.parametrize("separators", SEPARATORS)
def test_separators_divide_the_text_one_after_the_other(separators: str, mark: int) -> None:
    data = tokenizer(separators=separators.split(","), mark=mark)
    for texts in (["xaby", "aab abab", "", "abcabc", "xabcx ", "ab\nbc abc", "éab ß"], ["a"], ["", ""], [" ", "ab"]):
        given = {"x": np.array(texts, object)}
        expected, ours = session_of(data).run(None, given)[0], lathe.interpret(lathe.load(data), given)["y"]
        assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("pattern", [r"\bzzz\b", "a{2,}"])
def test_texts_without_tokens_get_no_marks(pattern: str) -> None:
    data, given = tokenizer(tokenexp=pattern, mark=1), {"x": np.array(["a b", ""], object)}
    assert lathe.interpret(lathe.load(data), given)["y"].shape == session_of(data).run(None, given)[0].shape == (2, 0)


def test_a_search_with_many_states_can_be_stopped_soon() -> None:
    """A search calls `check` after a number of state visits, not of characters."""
    calls: list[None] = []
    assert list(Pattern("(a|b|c|d){900}x").spans("abcd" * 100, lambda: calls.append(None))) == []
    assert len(calls) > 20


def test_a_search_takes_no_exponential_time() -> None:
    """`re` needs hours for this."""
    began = time.process_time()
    assert list(Pattern("(a+)+b").spans("a" * 200)) == []
    assert time.process_time() - began < 5


def test_time_is_proportional_to_the_text() -> None:
    """Classic patterns for which backtracking takes exponential or high polynomial time."""
    text = "a" * 5_000 + "!"
    began = time.process_time()
    for pattern in ("(a+)+", "(a|a)*b", "(a|aa)+$", "(a*)*b", "(.*)(.*)(.*)(.*)(.*)(.*)[0-9]", "a{0,500}a{500}"):
        assert not Pattern(pattern).matches(text)
    assert time.process_time() - began < 20


@pytest.mark.parametrize(
    "pattern", ["(((a{1000}){1000}){1000})", "((((){1000}){1000}){1000}){1000}", "(" * 5_000 + ")" * 5_000]
)
def test_patterns_that_need_too_much_memory_are_refused(pattern: str) -> None:
    began = time.process_time()
    with pytest.raises(BadPattern):
        Pattern(pattern)
    assert time.process_time() - began < 10


def test_the_cache_of_states_is_bounded() -> None:
    pattern = Pattern("(a|b|.)*c")
    for start in range(0x10000, 0x30000, 0x400):
        assert not pattern.matches("".join(map(chr, range(start, start + 0x400))))
    assert pattern._steps <= 50_000
    assert pattern.matches("\U0002f800c")


def test_large_states_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prefix gives a new DFA state of up to 200 NFA states; stored states have 10,000 of them in total at most."""
    monkeypatch.setattr(regex, "_MOST_NFA_STATES", 10_000)
    pattern, choice = Pattern("[ab]*a[ab]{200}"), random.Random(1)
    text = "".join(choice.choice("ab") for _ in range(400))
    assert pattern.matches(text + "a" * 201)
    assert not pattern.matches(text + "b" * 201)
    assert sum(len(state.nfa_states) for state in pattern._dfa.values()) <= 10_000 + 202
