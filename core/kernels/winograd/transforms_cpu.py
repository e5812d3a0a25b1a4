"""The transforms of Winograd's convolutions along one line (see `lathe.core.kernels.winograd.spec.Form`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import inf
from operator import add, sub

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.kernels.winograd.spec import Form, with_zeros


def image_line(k: Kernel, form: Form, line: Sequence[Val]) -> list[Val]:
    """The transform of a line of one part of the image: its values at all points (`form.image` times the line).

    The polynomials of p and -p are x + p and x - p times a common polynomial. A line of only `len(form.points)` values
    has no value at infinity.
    """
    rows: list[Val] = []
    for group in form.groups:
        common = with_zeros([point for point in form.points if point not in group])
        low = _linear_combination(k, common, line[: len(common)])
        if len(group) == 1:
            rows.append(low)
        else:
            high = _linear_combination(k, common, line[1 : len(common) + 1])
            rows += [k.ops.fma(low, point, high) for point in group]
    return [*rows, _linear_combination(k, with_zeros(form.points), line)] if len(line) > len(form.points) else rows


def result_line(k: Kernel, form: Form, line: Sequence[Val]) -> list[Val]:
    """The inverse transform of a line of products (`form.result` times the line).

    It uses the sums and differences of the values at p and -p.
    """
    at = dict(zip((*form.points, inf), line, strict=True))
    even, odd = ([reduce(join, (at[point] for point in group)) for group in form.groups] for join in (add, sub))
    rows = []
    for power in range(form.output):
        end = {form.output - 1: [(1.0, at[inf])]}.get(power, [])
        values = odd if power % 2 else even
        factors = [group[0] ** power * form.scale(group[0]) for group in form.groups]
        terms = [*zip(factors, values, strict=True), *end]
        rows.append(_linear_combination(k, [factor for factor, _ in terms], [value for _, value in terms]))
    return rows


def _linear_combination(k: Kernel, factors: Sequence[float], values: Sequence[Val]) -> Val:
    """The sum of values times factors; factors of 0, 1 and -1 take no multiplication."""
    pairs = sorted(((f, v) for f, v in zip(factors, values, strict=True) if f), key=lambda pair: pair[0] != 1)
    first, value = pairs[0]
    total = value if first == 1 else value * first
    for factor, value in pairs[1:]:
        if factor in (1, -1):
            total = total + value if factor == 1 else total - value
        else:
            total = k.ops.fma(value, factor, total)
    return total
