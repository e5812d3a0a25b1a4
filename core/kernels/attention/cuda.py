"""Attention on a GPU: a program keeps its queries in registers and reads keys and values once.

Sums are rescaled whenever a greater score appears (T. Dao et al. 2022, "FlashAttention").
"""

from __future__ import annotations

from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.attention.cuda_spec import AttentionSpec
from lathe.core.kernels.cuda.algebra import Algebra, Reg
from lathe.core.kernels.cuda.lines import GREATEST, SUM
from lathe.core.kernels.cuda.nest import Place, split
from lathe.core.kernels.cuda.product import edge_mask, join_masks, load_factors
from lathe.core.kernels.cuda.source import Source, Writer, scaled, text_of, total
from lathe.core.kernels.shared.cuda_product import OF_TF32
from lathe.core.kernels.shared.cuda_product_tiles import padded
from lathe.core.kernels.shared.cuda_tiling import blocks
from lathe.core.kernels.target import GpuTarget
from lathe.core.ops.nn.fused import scalar_body

_NONE = 'float("-inf")'


class _Program:
    """Variable names that all parts of a program use."""

    def __init__(self, w: Writer, spec: AttentionSpec) -> None:
        self.w, self.spec, tile = w, spec, spec.tile
        program = w.let("tl.program_id(0)", "program")
        rows = text_of(blocks(spec.queries, tile.queries))
        self.batch = split(w, w.let(f"{program} // {rows}", "batch"), spec.batch.extents)
        start = w.let(f"({program} % {rows}) * {tile.queries}", "start")
        self.query = w.let(f"{start} + tl.arange(0, {tile.queries})[:, None]", "q")
        self.query_mask = edge_mask(w, self.query, spec.queries, tile.queries)

    def offset(self, operand: int) -> str:
        """The expression of the offset of operand `operand`'s matrix for this program's batch index."""
        return Place(tuple(self.batch), (None,) * len(self.batch)).offset(self.spec.batch.strides[operand])

    def index(self, size: int, down: bool, hint: str, start: str = "") -> str:
        """A variable of the numbers 0 to `size` - 1, shaped [size, 1] if `down`, otherwise [1, size].

        `start` is text before the numbers, such as "first + "; `hint` begins the variable's name.
        """
        ways = ":, None" if down else "None, :"
        return self.w.let(f"{start}tl.arange(0, {size})[{ways}]", hint)


def generate(spec: AttentionSpec, target: GpuTarget) -> Source:
    w = Writer(spec.symbol)
    for name in ("q", "k", "v"):
        w.operand(name, spec.dtype)
    extras = [w.operand(f"x{i}", dtype) for i, dtype in enumerate(spec.extra_dtypes)]
    w.operand("y", spec.dtype)
    p = _Program(w, spec)
    queries = _queries(p)
    tile, wide = spec.tile, padded(spec.columns)
    greatest = w.let(f"tl.full(({tile.queries}, 1), {_NONE}, tl.float32)", "greatest")
    weight = w.let(f"tl.full(({tile.queries}, 1), 0.0, tl.float32)", "weight")
    sums = w.let(f"tl.full(({tile.queries}, {wide}), 0.0, tl.float32)", "sums")
    with w.block(f"for start in range(0, {text_of(spec.keys)}, {tile.keys})"):
        scores = _scores(p, queries, extras)
        best = w.let(f"tl.maximum({greatest}, tl.reduce({scores}, 1, {GREATEST})[:, None])", "best")
        shift = w.let(f"tl.where({best} == {_NONE}, 0.0, {best})", "shift")
        powers = w.let(f"tl.exp({scores} - {shift})", "powers")
        less = w.let(f"tl.exp({greatest} - {shift})", "less")
        w.line(f"{weight} = {weight} * {less} + tl.reduce({powers}, 1, {SUM})[:, None]")
        w.line(f"{sums} = {_add_values(p, powers, f'{sums} * {less}')}")
        w.line(f"{greatest} = {best}")
    column = p.index(wide, down=False, hint="c")
    at = total([p.offset(3 + len(extras)), *_steps(p.query, column, spec.y_steps)])
    mask = join_masks(p.query_mask, edge_mask(w, column, spec.columns, wide))
    whole = f"{sums} * {OF_TF32}" if spec.precision == "tf32" else sums
    result = f"tl.where({weight} > 0.0, {whole} / {weight}, 0.0)" if spec.guarded else f"{whole} / {weight}"
    Algebra(w).store("y", at, Reg(w.let(result), spec.dtype), mask)
    return w.source(tile.warps, tile.stages)


def _queries(p: _Program) -> str:
    """Write code that loads the queries as a block [queries, depth]; returns its variable."""
    depth = padded(p.spec.depth)
    d = p.index(depth, down=False, hint="d")
    at = total([p.offset(0), *_steps(p.query, d, p.spec.q_steps)])
    return load_factors(p.w, "q", at, p.spec.dtype, p.spec.dtype, p.query_mask, edge_mask(p.w, d, p.spec.depth, depth))


def _scores(p: _Program, queries: str, extras: list[str]) -> str:
    """Write code for the scores, a block [queries, keys] with minus infinity beyond the last key; returns its variable.

    The keys are those from the variable `start` on. `queries` is the block of queries, `extras` are the pointers of the
    epilogue's extra inputs.
    """
    w, spec, size, depth = p.w, p.spec, p.spec.tile.keys, padded(p.spec.depth)
    key, d = p.index(size, down=False, hint="j", start="start + "), p.index(depth, down=True, hint="d")
    inside = edge_mask(w, key, spec.keys, size)
    at = total([p.offset(1), *_steps(key, d, spec.k_steps)])
    keys = load_factors(w, "k", at, spec.dtype, spec.dtype, inside, edge_mask(w, d, spec.depth, depth))
    clear = f"tl.full(({spec.tile.queries}, {size}), 0.0, tl.float32)"
    scores = w.let(f'tl.dot({queries}, {keys}, {clear}, input_precision="{spec.precision}")', "scores")
    if spec.precision == "tf32":
        scores = w.let(f"{scores} * {OF_TF32}", "scores")
    scores = _apply_epilogue(p, scores, key, inside, extras)
    return scores if inside is None else w.let(f"tl.where({inside}, {scores}, {_NONE})", "scores")


def _apply_epilogue(p: _Program, scores: str, key: str, inside: str | None, extras: list[str]) -> str:
    """Write code that runs the epilogue on the block `scores`; returns the variable of the result.

    `key` are the indices of its keys, `inside` is the mask of those that exist (None: all).
    """
    if p.spec.epilogue is None:
        return scores
    e, values = Algebra(p.w), [Reg(scores, DType.FLOAT32)]
    facts = zip(extras, p.spec.extra_steps, p.spec.extra_dtypes, strict=True)
    for i, (pointer, steps, dtype) in enumerate(facts):
        at = total([p.offset(3 + i), *_steps(p.query, key, steps)])
        masks = (p.query_mask if steps[0] != 0 else None, inside if steps[1] != 0 else None)
        values.append(e.load(pointer, at, dtype, join_masks(*masks)))
    result: Reg = scalar_body(e, p.spec.epilogue, values)[0]
    return result.name


def _add_values(p: _Program, powers: str, sums: str) -> str:
    """The expression of `sums` plus the matrix product of `powers` and the values (rows of V) of the current keys."""
    w, spec, size, wide = p.w, p.spec, p.spec.tile.keys, padded(p.spec.columns)
    key, column = p.index(size, down=True, hint="j", start="start + "), p.index(wide, down=False, hint="c")
    masks = (edge_mask(w, key, spec.keys, size), edge_mask(w, column, spec.columns, wide))
    at = total([p.offset(2), *_steps(key, column, spec.v_steps)])
    values = load_factors(w, "v", at, spec.dtype, spec.dtype, *masks)
    return f'tl.dot({powers}.to(tl.{spec.dtype}), {values}, {sums}, input_precision="{spec.precision}")'


def _steps(first: str, second: str, steps: tuple[Dim, Dim]) -> list[str | None]:
    return [scaled(first, steps[0]), scaled(second, steps[1])]
