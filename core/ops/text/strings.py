"""Operators on strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import Dim, DType, TensorType, ValueType
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, OpDef, Required, RowAxis, register
from lathe.core.ops.opdef.type_rules import Kind, broadcast_rows, broadcast_shapes, check_kind, fits, untouched_rows
from lathe.core.ops.text.regex import BadPattern, Pattern, compile_pattern

STRING = Kind("string", frozenset({DType.STRING}))


def strings(items: Sequence[str], shape: Sequence[int]) -> Array:
    """An array of this shape with the strings `items`, of dtype object."""
    array = np.empty(len(items), object)
    array[:] = items
    return array.reshape(tuple(shape))


@register
class StringConcat(OpDef):
    """Concatenates pairs of strings, with broadcasting."""

    inputs = "X, Y"
    outputs = "Z"
    zero_gradient = "strings have no gradients"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, STRING)
        check_kind(c, 1, STRING)
        return [TensorType(DType.STRING, broadcast_shapes(c, [c.shape(0), c.shape(1)]))]

    def reference(self, c: Call, x: Array, y: Array) -> Array:
        pairs = np.broadcast(x, y)
        return strings([str(a) + str(b) for a, b in pairs], pairs.shape)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return broadcast_rows(c, axes)


@register
class StringSplit(OpDef):
    """The parts of each string between delimiters, along a new last axis padded with "", and the number of parts.

    Without a delimiter, runs of white space separate parts, and surrounding white space is dropped. Each string is cut
    at most `maxsplit` times, if that is given.
    """

    inputs = "X"
    outputs = "Y, Z"
    attrs = {"delimiter": None, "maxsplit": None}
    zero_gradient = "strings have no gradients"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, STRING)
        shape = c.shape(0)
        parts = None if shape is None else (*shape, c.fresh_dim("parts"))
        return [TensorType(DType.STRING, parts), TensorType(DType.INT64, shape)]

    def reference(self, c: Call, x: Array) -> tuple[Array, Array]:
        limit = c.attr("maxsplit")
        found = [str(item).split(c.attr("delimiter") or None, -1 if limit is None else limit) for item in x.ravel()]
        counts = np.array([len(parts) for parts in found], np.int64)
        widest = int(counts.max(initial=0))
        filled = [part for parts in found for part in (*parts, *[""] * (widest - len(parts)))]
        return strings(filled, (*x.shape, widest)), counts.reshape(x.shape)


@register
class RegexFullMatch(OpDef):
    """Whether each whole string matches `pattern`, in RE2's syntax."""

    inputs = "X"
    outputs = "Y"
    attrs = {"pattern": Required("text")}
    open_ended = True  # the time grows with the pattern and with the length of each text
    zero_gradient = "strings have no gradients"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, STRING)
        self._compile_pattern(c)
        return [TensorType(DType.BOOL, c.shape(0))]

    def _compile_pattern(self, c: Infer | Call) -> Pattern:
        try:
            return compile_pattern(c.attr("pattern"))
        except BadPattern as error:
            return c.fail(f"pattern {c.attr('pattern')!r} is not a regular expression: {error}")

    def reference(self, c: Call, x: Array) -> Array:
        pattern = self._compile_pattern(c)
        return np.array([pattern.matches(str(item), c.check) for item in x.ravel()], np.bool_).reshape(x.shape)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return untouched_rows(c, axes, ())


_CHANGES: dict[str, Callable[[str], str]] = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}


@register
class StringNormalizer(OpDef):
    """The strings that are not in `stopwords`, optionally in lower or upper case; one empty string if none remains.

    Stopwords are compared without case unless `is_case_sensitive`. `locale` has no effect: case follows the Unicode
    tables.
    """

    agreeing = True
    inputs = "X"
    outputs = "Y"
    attrs = {"case_change_action": "NONE", "is_case_sensitive": 0, "locale": None, "stopwords": ()}
    zero_gradient = "strings have no gradients"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        check_kind(c, 0, STRING)
        if c.attr("case_change_action") not in _CHANGES:
            c.fail(f"case_change_action is {c.attr('case_change_action')!r}, expected one of {', '.join(_CHANGES)}")
        shape = c.shape(0)
        if shape is None:
            return [TensorType(DType.STRING, None)]
        if not (len(shape) == 1 or (len(shape) == 2 and fits(shape[:1], (1,)))):
            c.fail(f"X is {c.tensor(0)}, expected [C] or [1,C]")
        kept: Dim = c.fresh_dim("kept") if c.attr("stopwords") or shape[-1] == 0 else shape[-1]
        return [TensorType(DType.STRING, (*shape[:-1], kept))]

    def reference(self, c: Call, x: Array) -> Array:
        compared = str if c.attr("is_case_sensitive") else str.lower
        stopwords = {compared(word) for word in c.attr("stopwords")}
        change = _CHANGES[c.attr("case_change_action")]
        kept = [change(str(item)) for item in x.ravel() if compared(str(item)) not in stopwords] or [""]
        return strings(kept, (*x.shape[:-1], len(kept)))
