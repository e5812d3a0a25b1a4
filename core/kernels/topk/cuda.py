"""TopK on a GPU: the first elements of lines, in order.

Elements are compared as integers that have the same order, and equal ones by their indices, so that the order is total.
"""

from __future__ import annotations

from lathe.core.ir.types import DType
from lathe.core.kernels.cuda.algebra import Algebra, Reg
from lathe.core.kernels.cuda.lines import GREATEST, LEAST, SUM, register_dtype
from lathe.core.kernels.cuda.nest import split
from lathe.core.kernels.cuda.source import Source, Writer, scaled, text_of, total
from lathe.core.kernels.target import GpuTarget
from lathe.core.kernels.topk.cuda_spec import TopKSpec

_NOWHERE = (1 << 31) - 1
_NAN = {4: 0x7FC00000, 8: 0x7FF8000000000000}


def generate(spec: TopKSpec, target: GpuTarget) -> Source:
    w = Writer(spec.symbol)
    w.operand("x", spec.dtype)
    w.operand("y", spec.dtype)
    if spec.indices:
        w.operand("indices", DType.INT64)
    (_find_by_ranks if spec.ranks else _find_in_turn)(w, spec)
    return w.source(spec.tile.warps)


def _find_in_turn(w: Writer, spec: TopKSpec) -> None:
    """Write code that finds the results one after the other, each the first of those after the previous result."""
    tile, length = spec.tile, spec.length
    shape = f"({tile.rows}, {tile.columns})"
    line = w.let(f"tl.program_id(0) * {tile.rows} + tl.arange(0, {tile.rows})[:, None]", "line")
    inside = w.let(f"{line} < {text_of(spec.lines)}", "inside")
    least, most, kind = _range(spec)
    before = w.let(f"tl.full(({tile.rows}, 1), {most}, {kind})", "before")
    last = w.let(f"tl.full(({tile.rows}, 1), -1, tl.int32)", "last")
    with w.block(f"for j in range(0, {spec.count})"):
        best = w.let(f"tl.full({shape}, {least}, {kind})", "best")
        place = w.let(f"tl.full({shape}, -1, tl.int32)", "place")
        with w.block(f"for start in range(0, {length}, {tile.columns})"):
            k = w.let(f"start + tl.arange(0, {tile.columns})[None, :]", "k")
            key = _key(w, spec, _load(w, spec, line, k, f"{inside} & ({k} < {length})"))
            behind = f"({key} < {before}) | (({key} == {before}) & ({k} > {last}))"
            better = w.let(f"{inside} & ({k} < {length}) & ({behind}) & (({place} < 0) | ({key} > {best}))", "better")
            w.line(f"{best} = tl.where({better}, {key}, {best})")
            w.line(f"{place} = tl.where({better}, {k}, {place})")
        w.line(f"{before} = tl.reduce({best}, 1, {GREATEST})[:, None]")
        found = f"({place} >= 0) & ({best} == {before})"
        w.line(f"{last} = tl.reduce(tl.where({found}, {place}, {_NOWHERE}), 1, {LEAST})[:, None]")
        _store(w, spec, line, "j", last, _load(w, spec, line, last, inside), inside)


def _find_by_ranks(w: Writer, spec: TopKSpec) -> None:
    """Write code that finds the results by ranks: an element's rank is the number of elements that come before it."""
    tile, length = spec.tile, spec.length
    line = w.let(f"tl.program_id(0) // {spec.pieces}", "line")
    mine = w.let(f"(tl.program_id(0) % {spec.pieces}) * {tile.rows} + tl.arange(0, {tile.rows})[:, None]", "mine")
    inside = w.let(f"{mine} < {length}", "inside")
    value = _load(w, spec, line, mine, inside)
    own = _key(w, spec, value)
    count = w.let(f"tl.full(({tile.rows}, {tile.columns}), 0, tl.int32)", "count")
    with w.block(f"for start in range(0, {length}, {tile.columns})"):
        k = w.let(f"start + tl.arange(0, {tile.columns})[None, :]", "k")
        key = _key(w, spec, _load(w, spec, line, k, f"{k} < {length}"))
        before = f"({k} < {length}) & (({key} > {own}) | (({key} == {own}) & ({k} < {mine})))"
        w.line(f"{count} = {count} + ({before}).to(tl.int32)")
    rank = w.let(f"tl.reduce({count}, 1, {SUM})[:, None]", "rank")
    _store(w, spec, line, rank, mine, value, f"{inside} & ({rank} < {spec.count})")


def _load(w: Writer, spec: TopKSpec, line: str, k: str, mask: str) -> Reg:
    return Algebra(w).load("x", _at(w, spec, line, k, spec.length), spec.dtype, mask)


def _store(w: Writer, spec: TopKSpec, line: str, place: str, k: str, value: Reg, mask: str) -> None:
    """Write code that stores `value`, the element at index `k` of a line, as its result at index `place`.

    The index is stored too, if indices are an output.
    """
    to = w.let(_at(w, spec, line, place, spec.count), "to")
    Algebra(w).store("y", to, value, mask)
    if spec.indices:
        w.line(f"tl.store(indices + {to}, {k}.to(tl.int64), {mask})")


def _at(w: Writer, spec: TopKSpec, line: str, k: str, length: int) -> str:
    """The expression of the offset of the `k`-th of `length` elements of line `line`.

    It is a block even if all terms are scalars.
    """
    outer, inner = split(w, line, (spec.outer, spec.inner))
    return total([scaled(outer, length * spec.inner), scaled(k, spec.inner), inner, f"{line} * 0"])


def _key(w: Writer, spec: TopKSpec, value: Reg) -> str:
    """The variable of a signed integer that is greater for elements that come first.

    All zeros are equal, and so are all NaNs.
    """
    dtype, x = register_dtype(spec.dtype), value.name
    _, _, kind = _range(spec)
    if dtype.is_float:
        bits = w.let(f"tl.where({x} == 0, 0, {x}.to({kind}, bitcast=True))", "bits")
        known = w.let(f"tl.where({x} != {x}, {_NAN[dtype.itemsize]}, {bits})", "bits")
        key = f"tl.where({known} < 0, {known} ^ {(1 << (8 * dtype.itemsize - 1)) - 1}, {known})"
    elif dtype is DType.UINT64:
        key = f"({x} ^ {1 << 63}).to({kind}, bitcast=True)"
    else:
        key = f"{x}.to({kind})"
    return w.let(f"~({key})" if spec.least else key, "key")


def _range(spec: TopKSpec) -> tuple[int, int, str]:
    """The least and the greatest key, and the name of their type in Triton."""
    bits = 64 if spec.dtype.itemsize == 8 or spec.dtype is DType.UINT32 else 32
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1, f"tl.int{bits}"
