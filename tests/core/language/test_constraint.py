"""Constrained output: masks of tokens against Python's `re` and `json`, and errors of grammars."""

from __future__ import annotations

import contextlib
import json
import re

import numpy as np
import pytest
import tokenizers

from lathe.core.errors import GrammarError
from lathe.core.language.constraint import Constraint, Grammar, GrammarCompiler
from lathe.core.language.tokenizer import Tokenizer

TEXTS = [
    '{"name": "Ada", "age": 36, "tags": ["x", "y"]} true false null yes no maybe',
    "2026-11-27 09:41 a quick brown fox, ein größeres Maß, 3.14e-5",
]
VOCABULARY = 320  # more than the tokenizer has: the logits of some models are padded


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(TEXTS, trainer)
    return Tokenizer(library, (library.token_to_id("<end>"),))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCABULARY)


def sampled(constraint: Constraint, tokenizer: Tokenizer, seed: int, most: int = 80) -> tuple[str, bool]:
    """A text of random allowed tokens, and whether it ended."""
    numbers = np.random.default_rng(seed)
    tokens: list[int] = []
    for _ in range(most):
        allowed = np.flatnonzero(constraint.allowed())
        assert allowed.size
        assert allowed.max() < tokenizer.library.get_vocab_size()
        token = int(numbers.choice(allowed))
        if token in tokenizer.ends:
            assert constraint.is_complete
            return tokenizer.decode(tokens), True
        constraint.accept(token)
        tokens.append(token)
    return tokenizer.decode(tokens), False


@pytest.mark.parametrize("pattern", [r"[a-f]{3}[0-9]+", r"(yes|no)( maybe)*", r"\d{4}-\d{2}-\d{2}", "größ(er|ter)"])
def test_random_tokens_match_the_regular_expression(
    compiler: GrammarCompiler, tokenizer: Tokenizer, pattern: str
) -> None:
    ended = 0
    for seed in range(20):
        text, is_ended = sampled(compiler.constraint(Grammar("regex", pattern)), tokenizer, seed)
        assert not is_ended or re.fullmatch(pattern, text)
        ended += is_ended
    assert ended


@pytest.mark.parametrize("pattern", [r"[a-f]{1,3}", r"x?y*z"])
def test_a_token_is_allowed_where_a_match_can_follow(
    compiler: GrammarCompiler, tokenizer: Tokenizer, pattern: str
) -> None:
    """The oracle: all texts of up to four characters, and their prefixes."""
    letters = sorted(set(re.sub(r"[^a-z]", "", "abcdefxyz")))
    texts = [""]
    for _ in range(4):
        texts += [text + letter for text in texts[-(len(letters) ** 4) :] for letter in letters if len(text) < 4]
    matches = {text for text in set(texts) if re.fullmatch(pattern, text)}
    prefixes = {text[:end] for text in matches for end in range(len(text) + 1)}
    allowed = compiler.constraint(Grammar("regex", pattern)).allowed()
    for letter in letters:
        assert allowed[tokenizer.library.token_to_id(letter)] == (letter in prefixes), letter


def test_objects_of_a_schema_are_valid(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ada", "x"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    found = []
    for seed in range(30):
        text, is_ended = sampled(compiler.constraint(Grammar("json_schema", json.dumps(schema))), tokenizer, seed)
        if is_ended:
            content = json.loads(text)
            assert set(content) == {"name", "age"}
            assert content["name"] in {"Ada", "x"}
            assert 0 <= content["age"] <= 99
            found.append(text)
    assert found


def test_a_choice_ends_at_its_end(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    texts = {sampled(compiler.constraint(Grammar("choice", '["yes", "no \\"q\\"", "größer"]')), tokenizer, seed)
             for seed in range(40)}  # fmt: skip
    assert texts == {("yes", True), ('no "q"', True), ("größer", True)}


def test_gbnf_is_a_grammar_too(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = Grammar("lark", 'root ::= sum\nsum ::= digit ("+" digit)*\ndigit ::= [0-9]')
    texts = [sampled(compiler.constraint(grammar), tokenizer, seed) for seed in range(10)]
    assert any(is_ended for _, is_ended in texts)
    assert all(re.fullmatch(r"\d(\+\d)*", text) for text, is_ended in texts if is_ended)


def test_every_json_object_is_allowed(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    constraint = compiler.constraint(Grammar("json_object"))
    tokens = tokenizer.encode('{"a": [1, {"b": null}]}')
    assert constraint.count_allowed([*tokens, tokens[0]]) == len(tokens)
    for token in tokens:
        constraint.accept(token)
    assert constraint.is_complete
    assert set(np.flatnonzero(constraint.allowed())) == set(tokenizer.ends)


def test_copies_and_constraints_of_one_grammar_are_independent(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = Grammar("regex", "ab|ac")
    first = compiler.constraint(grammar)
    a, b, c = (tokenizer.library.token_to_id(letter) for letter in "abc")
    first.accept(a)
    other = first.copy()
    first.accept(b)
    assert first.is_complete
    assert not other.is_complete
    assert other.allowed()[c]
    assert compiler.constraint(grammar).allowed()[a]


def test_a_token_that_does_not_follow_is_refused(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    constraint = compiler.constraint(Grammar("regex", "ab"))
    with pytest.raises(GrammarError):
        constraint.accept(tokenizer.library.token_to_id("b"))


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("regex", "(a"), "regex: "),
        (Grammar("json_schema", "{"), "json_schema: expected JSON"),
        (Grammar("json_schema", "[1]"), "json_schema: expected an object, got list"),
        (Grammar("json_schema", '{"type": "strange"}'), "json_schema: "),
        (Grammar("json_schema", "false"), "json_schema: "),
        (Grammar("choice", "[]"), "choice: expected a list"),
        (Grammar("choice", '["a", 1]'), "choice: expected a list"),
        (Grammar("lark", "start: missing"), "lark: "),
        (Grammar("lark", "start: start"), "NoExtension"),
        (Grammar("lark", 'root ::= "a" other'), "lark: GBNF: Rule 'other' not found"),
        (Grammar("lark", "root ::= [a\\"), "lark: GBNF: "),
        (Grammar("lark", "root ::= " + "(" * 10_000), "lark: GBNF: maximum recursion depth"),
        (Grammar("lark", "root ::= " + "\n" * 20_000), "lark: expected at most 16384 characters of GBNF, got 20009"),
        (Grammar("regex", "a" * 300_000), "regex: expected at most 262144 characters, got 300000"),
        (Grammar("json_schema", "[" * 100_000), "json_schema: expected JSON"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_damaged_grammars_are_refused(compiler: GrammarCompiler, grammar: Grammar, message: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(message)):
        compiler.constraint(grammar)


def test_a_grammar_whose_texts_never_end_is_never_complete(compiler: GrammarCompiler) -> None:
    """It goes on, or the library gives up; no token that ends an answer is ever allowed."""
    constraint = compiler.constraint(Grammar("lark", 'start: "a" start'))
    with contextlib.suppress(GrammarError):
        for _ in range(50):
            (token, *_) = np.flatnonzero(constraint.allowed())
            assert not constraint.is_complete
            constraint.accept(int(token))
