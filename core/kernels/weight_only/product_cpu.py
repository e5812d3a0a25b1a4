"""The common parts of the CPU kernels of products with weights of few bits: operands, panels, loops over blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lathe.core.codegen.lang import Kernel, Val
from lathe.core.ir.dim import product
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.result_writer import ResultWriter
from lathe.core.kernels.target import Target
from lathe.core.kernels.weight_only.spec import WeightOnlySpec

F32 = DType.FLOAT32


class Product:
    """The operands of one kernel, whose codes are stored as `stored`: int8, or words of codes."""

    def __init__(self, spec: WeightOnlySpec, target: Target, stored: DType) -> None:
        self.kernel = k = Kernel(spec, target)
        self.lanes = spec.tile.lanes
        offsets = [spec.offset_dtype] if spec.has_offsets else []
        dtypes = (F32, stored, spec.scale_dtype, *offsets, *spec.extra_dtypes, spec.dtype)
        operands = [k.operand(i, dtype) for i, dtype in enumerate(dtypes)]
        for at in range(2, 3 + spec.has_offsets):
            operands[at] = operands[at].converting(F32)
        self.a, self.codes, self.scales = operands[:3]
        self.offsets = operands[3] if spec.has_offsets else None
        self.first_scratch = len(dtypes)  # the number of the operand
        self.batch = spec.nest.take(range(spec.nest.rank - 1))
        self.moves = [k.dim(stride) for stride in spec.nest.loop(spec.nest.rank - 1)]
        self.entries = k.dim(product(self.batch.extents))
        self._steps, self._epilogue = (*spec.extra_steps, spec.y_step), spec.epilogue
        self._results = operands[3 + spec.has_offsets :]

    def results_at(self, places: Sequence[Val], first: Val) -> ResultWriter:
        """The writer of the results from column `first` on; `places` are the offsets of the extras and of Y."""
        operands = tuple(pointer.at(place) for pointer, place in zip(self._results, places, strict=True))
        return ResultWriter(self.kernel, self._epilogue, operands, self._steps).at_column(first)

    def offsets_of_row(self, row: Val) -> list[Val]:
        """The offsets of the extras and of Y, in elements, in row `row`."""
        return [row * move for move in self.moves[1:]]


class Panel:
    """The codes, scales and offsets of one panel: `columns` columns from column `first` on."""

    def __init__(self, of: Product, spec: WeightOnlySpec, first: Val, columns: int) -> None:
        self.kernel, self.lanes, self.columns = of.kernel, of.lanes, columns
        self.width = -(-columns // of.lanes)  # vectors
        tail = columns % of.lanes
        self.mask = of.kernel.lane_mask(tail, of.lanes) if tail else None
        self.codes = of.codes.at(first * -(-spec.depth // spec.per_word))
        self.scales = of.scales.at(first * spec.blocks)
        self.offsets = of.offsets.at(first * spec.blocks) if of.offsets is not None else None


def fold_blocks(
    kernel: Kernel, depth: int, block: int, init: Sequence[Val], body: Callable[[Val, int, list[Val]], list[Val]]
) -> list[Val]:
    """Carry values through `depth` rows in blocks of `block`; the last block may have fewer.

    `body(number, rows in it, values)` returns the next values.
    """
    whole, rest = divmod(depth, block)
    with kernel.fold(0, whole, init) as fold:
        fold.values = body(fold.index, block, list(fold.values))
    return body(kernel.index(whole), rest, list(fold.values)) if rest else list(fold.values)
