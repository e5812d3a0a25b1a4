"""Tokenizer of com.microsoft, which scikit-learn's converter emits before TfIdfVectorizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

from lathe.core.ir.graph import Array
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, NodeView, OpDef, Required, RowAxis, register
from lathe.core.ops.opdef.type_rules import check_kind
from lathe.core.ops.text.regex import BadPattern, Pattern, compile_pattern
from lathe.core.ops.text.strings import STRING, strings

_START, _END = "\x02", "\x03"

Cut = Callable[[str], list[str]]


@register
class Tokenizer(OpDef):
    """The tokens of each string of [C] or [N,C] along a new last axis, padded with `pad_value`.

    Tokens are the matches of `tokenexp`, or the text between matches of `separators` (each character for a single empty
    separator). As in ONNX Runtime, the first separator divides the text, and each further one the parts before it made.
    Empty tokens, and those of fewer than `mincharnum` characters, are dropped; `mark` adds start and end tokens if any
    string has tokens.
    """

    inputs = "X"
    outputs = "Y"
    domain = "com.microsoft"
    attrs = {
        "mark": Required("integer"),
        "mincharnum": Required("integer"),
        "pad_value": Required("text"),
        "separators": (),
        "tokenexp": None,
    }
    zero_gradient = "strings have no gradients"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, STRING)
        self._splitter(c)
        shape = c.shape(0)
        if shape is not None and len(shape) not in (1, 2):
            c.fail(f"X is {c.tensor(0)}, expected [C] or [N,C]")
        return [TensorType(DType.STRING, None if shape is None else (*shape, c.fresh_dim("tokens")))]

    def _splitter(self, c: NodeView) -> Cut:
        """The function that splits one string into tokens. ModelError for invalid or contradictory attributes."""
        expression, separators = c.attr("tokenexp"), c.attr("separators")
        if bool(expression) == bool(separators):
            c.fail("has both or neither of tokenexp and separators, expected one of them")
        if separators == ("",) or expression == ".":  # ONNX Runtime takes both for each character, newlines as well
            return list
        patterns = [self._pattern(c, text) for text in ((expression,) if expression else separators)]
        check = c.check if isinstance(c, Call) else bool
        if expression:
            return lambda text: [text[start:end] for start, end in patterns[0].spans(text, check)]
        return lambda text: reduce(
            lambda parts, pattern: [token for part in parts for token in _text_between(pattern, part, check)],
            patterns,
            [text],
        )

    def _pattern(self, c: NodeView, text: str) -> Pattern:
        try:
            return compile_pattern(text)
        except BadPattern as error:
            c.fail(f"{text!r} is not a regular expression: {error}")

    def reference(self, c: Call, x: Array) -> Array:
        cut, least = self._splitter(c), c.attr("mincharnum")
        found = [[token for token in cut(str(item)) if len(token) >= max(least, 1)] for item in x.ravel()]
        if c.attr("mark") and any(found):  # otherwise ONNX Runtime returns no columns
            found = [[_START, *tokens, _END] for tokens in found]
        widest = max(map(len, found), default=0)
        filled = [token for tokens in found for token in (*tokens, *[c.attr("pad_value")] * (widest - len(tokens)))]
        return strings(filled, (*x.shape, widest))

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        if axes[0] is None:
            return [None]
        return MixesRows("the number of tokens that Tokenizer pads to depends on all rows")


def _text_between(pattern: Pattern, text: str, check: Callable[[], object]) -> list[str]:
    """The parts of `text` before, between and after matches; unlike `re.split`, without the matches of groups."""
    spans = list(pattern.spans(text, check))
    starts = [0, *(end for _, end in spans)]
    return [text[start:end] for start, end in zip(starts, [*(start for start, _ in spans), len(text)], strict=True)]
