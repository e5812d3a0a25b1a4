"""Constrained output: the tokens that may come next, so that the text matches a JSON schema, pattern or grammar.

The library `llguidance` (MIT, of the extra `text`; also used by vLLM and llama.cpp) reads the grammars and computes the
masks. It takes about 50 us for a mask and limits the size of grammars itself.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import GrammarError, UnsupportedError
from lathe.core.language.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark"]
_MOST_CHARACTERS = 1 << 18  # of a grammar: far above hand-written ones, and parsed in about a second
_MOST_GBNF = 1 << 14  # characters; the translation is in Python, and takes 0.1 s for a chain of as many rules
# Far below the library's own limits, with which a pattern such as a{9999}{99} takes ten seconds; so limited, 0.2 s.
_LIMITS = {"initial_lexer_fuel": 100_000, "max_lexer_states": 50_000}
_MOST_KEPT = 64  # compiled grammars of one tokenizer; one takes up to some megabytes


@dataclass(frozen=True)
class Grammar:
    """A set of texts. `text` depends on `kind`:

    - `json_schema`: a JSON schema. https://json-schema.org
    - `json_object`: empty. Every JSON object belongs to the set.
    - `regex`: a regular expression in the syntax of Rust's crate `regex`. It matches the whole text.
    - `choice`: a JSON list of strings. The text is one of them.
    - `lark`: a context-free grammar in the syntax of Lark, whose first rule is `start`, or in GBNF, whose rules have
      `::=` and whose first rule is `root`.
    """

    kind: Kind
    text: str = ""


class GrammarCompiler:
    """Makes constraints for the tokens of one tokenizer. Any number of threads may use it.

    UnsupportedError if the library `llguidance` is missing or cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        """`vocabulary`: the number of logits of the model, which may exceed the tokens of the tokenizer."""
        self.vocabulary = vocabulary
        self._library = _library()
        if not tokenizer.ends:
            raise UnsupportedError("constrained output needs a token that ends an answer", where="tokenizer")
        self._tokens = self._read_tokens(tokenizer)
        self._lock = threading.Lock()
        self._compiled: dict[Grammar, Any] = {}

    def constraint(self, grammar: Grammar) -> Constraint:
        """A constraint at the start of its text.

        GrammarError if the grammar is damaged, too large, or uses what the library cannot express.
        """
        with self._lock:
            found = self._compiled.get(grammar)
        if found is None:
            found = self._compile(grammar)
            with self._lock:
                if len(self._compiled) >= _MOST_KEPT:
                    self._compiled.pop(next(iter(self._compiled)))
                self._compiled[grammar] = found
        return Constraint(found.deep_copy(), self.vocabulary)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if (length := len(grammar.text)) > _MOST_CHARACTERS:
            raise GrammarError(f"{grammar.kind}: expected at most {_MOST_CHARACTERS} characters, got {length}")
        limits = self._library.LLParserLimits(**_LIMITS)
        matcher: LLMatcher = self._library.LLMatcher(self._tokens, self._source(grammar), log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(f"{grammar.kind}: {_first_line(matcher.get_error())}")
        if not Constraint(matcher, self.vocabulary).allowed().any():  # raises if the grammar has no finite text
            raise GrammarError(f"{grammar.kind}: no text matches it")
        return matcher

    def _source(self, grammar: Grammar) -> str:
        """The grammar in the form of the library."""
        matcher, text = self._library.LLMatcher, grammar.text
        if grammar.kind == "regex":
            return str(matcher.grammar_from_regex(text))
        if grammar.kind == "lark":
            return str(matcher.grammar_from_lark(_lark(text)))
        if grammar.kind == "json_object":
            return str(matcher.grammar_from_json_schema('{"type": "object"}'))
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"{grammar.kind}: expected JSON: {error}") from None
        if grammar.kind == "choice":
            return str(matcher.grammar_from_lark(_alternatives(content)))
        if not isinstance(content, dict | bool):
            raise GrammarError(f"json_schema: expected an object, got {type(content).__name__}")
        return str(matcher.grammar_from_json_schema(text))

    def _read_tokens(self, tokenizer: Tokenizer) -> Any:
        text = tokenizer.library.to_str()
        try:
            return self._library.LLTokenizer(text, n_vocab=self.vocabulary, eos_token=list(tokenizer.ends))
        except (ValueError, OverflowError, RuntimeError) as error:
            raise UnsupportedError(
                f"constrained output cannot use this tokenizer: {_first_line(str(error))}", where="tokenizer"
            ) from None


class Constraint:
    """The state of one text within its grammar. One thread at a time may use it."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._bits = np.zeros((vocabulary + 31) // 32, np.int32)

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next: bool [vocabulary].

        The tokens that end an answer are among them if the text so far is complete; they alone are if it cannot go on.
        GrammarError if the library gives up, for example because a text became too ambiguous.
        """
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        return np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._vocabulary].view(np.bool_)

    def accept(self, token: int) -> None:
        """Append a token. GrammarError if it was not allowed; the constraint then stays in error."""
        if not self._matcher.consume_token(token):
            self._check()
            raise GrammarError(f"token {token} does not continue the constrained text")

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first on, may follow each other next. Changes nothing."""
        return int(self._matcher.validate_tokens(list(tokens)))

    def copy(self) -> Constraint:
        """A constraint in the same state, which then goes its own way."""
        return Constraint(self._matcher.deep_copy(), self._vocabulary)

    @property
    def is_complete(self) -> bool:
        """Whether the text so far belongs to the grammar."""
        return bool(self._matcher.is_accepting())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"constrained output: {_first_line(self._matcher.get_error())}")


def _alternatives(choices: Any) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise GrammarError("choice: expected a list of one or more non-empty strings")
    return "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)


def _lark(text: str) -> str:
    """A grammar in the syntax of Lark; GBNF, which llama.cpp and XGrammar read, is translated."""
    if "::=" not in text:
        return text
    if len(text) > _MOST_GBNF:
        raise GrammarError(f"lark: expected at most {_MOST_GBNF} characters of GBNF, got {len(text)}")
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # the translator raises errors of its own, and IndexError for a text that is cut off
        raise GrammarError(f"lark: GBNF: {_first_line(str(error))}") from None


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]


def _library() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError:
        raise UnsupportedError("needs the library llguidance: install the extra 'text'", where="grammar") from None
    return llguidance
