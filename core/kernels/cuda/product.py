"""Shared code of matrix products and convolutions on a GPU: tiles of programs, products, split depth, epilogue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.cuda.algebra import Algebra, Reg, type_name
from lathe.core.kernels.cuda.nest import Place
from lathe.core.kernels.cuda.source import Writer, text_of
from lathe.core.kernels.shared.cuda_product import HALF_OF_LAST_BIT, SPLIT, TF32_BITS, Results
from lathe.core.kernels.shared.cuda_product_tiles import ProductTile
from lathe.core.kernels.shared.cuda_tiling import blocks
from lathe.core.ops.nn.fused import scalar_body

_GROUP = 8  # row tiles whose programs run in turn for the same columns, so that factors are still in the cache


@dataclass(frozen=True, slots=True)
class ProgramTile:
    """Variable names of a program's tile: batch index, rows [rows, 1], columns [1, columns], and masks.

    A mask is None if all rows, or columns, are inside.
    """

    batch: str
    rows: str
    columns: str
    row_mask: str | None
    column_mask: str | None


def program_tile(w: Writer, tile: ProductTile, rows: Dim, columns: Dim) -> ProgramTile:
    """Write code that computes which tile this program has, from its number; returns the variables.

    Programs run through all tiles of one batch index before those of the next.
    """
    high, wide = text_of(blocks(rows, tile.rows)), text_of(blocks(columns, tile.columns))
    program = w.let("tl.program_id(0)", "program")
    batch = w.let(f"{program} // ({high} * {wide})", "batch")
    within = w.let(f"{program} % ({high} * {wide})", "tile")
    band = w.let(f"{within} // ({_GROUP} * {wide})", "band")
    height = w.let(f"tl.minimum({high} - {band} * {_GROUP}, {_GROUP})", "height")
    row = w.let(f"{band} * {_GROUP} + ({within} % ({_GROUP} * {wide})) % {height}", "row")
    column = w.let(f"({within} % ({_GROUP} * {wide})) // {height}", "column")
    r = w.let(f"{row} * {tile.rows} + tl.arange(0, {tile.rows})[:, None]", "r")
    c = w.let(f"{column} * {tile.columns} + tl.arange(0, {tile.columns})[None, :]", "c")
    return ProgramTile(batch, r, c, edge_mask(w, r, rows, tile.rows), edge_mask(w, c, columns, tile.columns))


def edge_mask(w: Writer, index: str, extent: Dim, size: int) -> str | None:
    """A mask of the indices below `extent`; None if blocks of `size` fill the extent exactly."""
    if isinstance(extent, int) and extent % size == 0:
        return None
    return w.let(f"{index} < {text_of(extent)}", "inside")


def join_masks(*masks: str | None) -> str | None:
    """The expression of the conjunction of the masks that are not None; None if all are."""
    return " & ".join(mask for mask in masks if mask is not None) or None


def zero_sums(w: Writer, tile: ProductTile, element: DType = DType.FLOAT32) -> str:
    """Write a block of accumulators for products of `element`, all zero; returns its variable."""
    kind = "tl.float32" if element.is_float else "tl.int32"
    return w.let(f"tl.full(({tile.rows}, {tile.columns}), 0, {kind})", "sums")


def load_factors(
    w: Writer, pointer: str, offset: str, dtype: DType, element: DType, *masks: str | None, outside: int = 0
) -> str:
    """Load a block of factors of type `dtype` as `element`, with `outside` where a mask is false; returns its name.

    From uint8, `outside` included, 128 is subtracted, which gives int8.
    """
    mask, nothing = join_masks(*masks), repr(float(outside) if dtype.is_float else outside)
    loaded = w.let(f"tl.load({pointer} + {offset}{f', {mask}, other={nothing}' if mask else ''})", "factors")
    if dtype is DType.UINT8:  # subtract 128
        return w.let(f"({loaded} ^ 128).to(tl.int8, bitcast=True)", "factors")
    return loaded if dtype is element else w.let(f"{loaded}.to({type_name(element)})", "factors")


def multiply(w: Writer, sums: str, left: str, right: str, precision: str, element: DType = DType.FLOAT32) -> None:
    """Add the product of two blocks of `element` to `sums`, which `zero_sums` has made.

    For integers the type of the sums is stated, because Triton 3.6 assumes float32.
    """
    kind = "" if element.is_float else ", out_dtype=tl.int32"
    w.line(f'{sums} = tl.dot({left}, {right}, {sums}, input_precision="{precision}"{kind})')


def multiply_weights(
    w: Writer, sums: str, left: str, load: Callable[[str | None], str], size: Dim, precision: str, element: DType
) -> None:
    """Add the product of a block and a block of weights to `sums`.

    `load(offset)` writes code that loads the block of weights at an offset in elements (None: 0), and returns its
    variable. `size`: the number of weights, after which the second halves begin if the precision is `SPLIT`.
    """
    right = load(None)
    if precision == SPLIT:
        multiply_split(w, sums, left, right, load(text_of(size)))
    else:
        multiply(w, sums, left, right, precision, element)


def multiply_split(w: Writer, sums: str, left: str, high: str, low: str) -> None:
    """Add the product of a block of float32 and the sum of two blocks, `high` and `low`, to `sums`, by three of TF32.

    The left block is split in registers: the upper bits, and the rest, rounded to what TF32 represents. An infinity or
    NaN is multiplied by `high` alone, since its products with `high` and `low` may have different signs. The product of
    the rest and `low` is too small to matter (CUTLASS example 27 does the same).

    The three products are summed from 0, and then added to `sums`: tensor cores round sums towards zero, so that over
    thousands of steps the error would grow to 1e-4 of the result (measured on an H100), while this addition rounds to
    nearest.
    """
    bits = w.let(f"{left}.to(tl.int32, bitcast=True)", "bits")
    first = w.let(f"({bits} & {TF32_BITS}).to(tl.float32, bitcast=True)", "first")
    finite = w.let(f'tl.abs({left}) < float("inf")', "finite")
    rest = w.let(f"tl.where({finite}, {left} - {first}, 0.0)", "rest")
    rest = w.let(f"({rest}.to(tl.int32, bitcast=True) + {HALF_OF_LAST_BIT}).to(tl.float32, bitcast=True)", "rest")
    upper = w.let(f"tl.where({finite}, {first}, 0.0)", "upper")
    part = w.let(f'tl.dot({rest}, {high}, input_precision="tf32")', "part")
    for x, y in ((upper, low), (first, high)):
        part = w.let(f'tl.dot({x}, {y}, {part}, input_precision="tf32")', "part")
    w.line(f"{sums} = {sums} + {part}")


def depth_range(w: Writer, depth: Dim, step: int, parts: int) -> str:
    """The text of the arguments of `range` for a loop over the depth in steps of `step`.

    If `parts` is above 1, the loop covers one part of the depth, whose number is the program's along the second axis.
    """
    if parts == 1:
        return f"0, {text_of(depth)}, {step}"
    part = text_of(blocks(blocks(depth, step), parts) * step)
    first = w.let(f"tl.program_id(1) * {part}", "first")
    return f"{first}, tl.minimum({first} + {part}, {text_of(depth)}), {step}"


@contextmanager
def last_program_of_tile(w: Writer, size: ProductTile, programs: Dim, parts: int, sums: str) -> Iterator[str]:
    """Code written inside runs once per tile, in the last of its `parts` programs to end.

    Yields the variable of the sums of all parts; `sums` is that of one program's. `programs` is the number of tiles.
    Programs exchange sums through the operands of `lathe.core.kernels.shared.cuda_product.split_operands`. With one
    part the code runs in every program, and `sums` itself is yielded.
    """
    if parts == 1:
        yield sums
        return
    rows, columns = (
        f"tl.arange(0, {extent})[{ways}]" for extent, ways in ((size.rows, ":, None"), (size.columns, "None, :"))
    )
    area = size.rows * size.columns
    place = w.let(f"{rows} * {size.columns} + {columns}", "place")
    mine = f"partial + (tl.program_id(1) * {text_of(programs)} + tl.program_id(0)) * {area} + {place}"
    w.line(f"tl.store({mine}, {sums})")
    w.line("tl.debug_barrier()")  # all threads store their sums before one of them counts
    done = w.let("tl.atomic_add(counts + tl.program_id(0), 1)", "done")
    with w.block(f"if {done} == {parts - 1}"):
        whole = w.let(f"tl.full(({size.rows}, {size.columns}), 0.0, tl.float32)", "sums")
        with w.block(f"for part in range(0, {parts})"):
            theirs = f"partial + (part * {text_of(programs)} + tl.program_id(0)) * {area} + {place}"
            w.line(f'{whole} = {whole} + tl.load({theirs}, cache_modifier=".cg")')
        w.line("tl.store(counts + tl.program_id(0), 0)")
        yield whole


def split_pointers(w: Writer, parts: int) -> None:
    """Declare the pointers `partial` and `counts` of `split_operands`, if the depth is split (`parts` above 1)."""
    if parts > 1:
        w.operand("partial", DType.FLOAT32)
        w.operand("counts", DType.INT32)


def finish(
    w: Writer, results: Results, here: Place, moves: Sequence[tuple[Dim, ...]], pointers: Sequence[str], sums: str,
    tile: ProgramTile,
) -> None:  # fmt: skip
    """Write code that runs the epilogue on the block `sums` and stores Y.

    `pointers` are the names of the extras' and Y's pointers, `moves` their strides along the loops of `here`.
    """
    e = Algebra(w)
    values = [Reg(sums, results.computed)]
    *extras, (y, to) = zip(pointers, moves, strict=True)
    for (pointer, strides), dtype in zip(extras, results.extra_dtypes, strict=True):
        values.append(e.load(pointer, here.offset(strides), dtype, here.mask(strides)))
    result = values[0] if results.epilogue is None else scalar_body(e, results.epilogue, values)[0]
    # A Y that does not move along the rows or columns still needs one address per sum.
    whole = f"{here.offset(to)} + {tile.rows} * 0 + {tile.columns} * 0"
    e.store(y, whole, result, join_masks(tile.row_mask, tile.column_mask))
