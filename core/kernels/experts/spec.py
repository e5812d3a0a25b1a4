"""ExpertProduct: rows are sorted by expert, and the rows of one expert are multiplied in register tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from lathe.core.ir.dim import product
from lathe.core.ir.graph import Array
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Operand, Out, Packed, Request, Scratch
from lathe.core.kernels.shared.nest import Nest, broadcast_strides, has_plannable_types, is_plannable, traffic
from lathe.core.kernels.shared.panels import Tile, choose_tile, pack_panels, packed_size
from lathe.core.kernels.shared.words import WORD_BYTES

F32 = DType.FLOAT32
_NUMBER_BYTES = 8  # of an int64
_MOST_EXPERTS = 1 << 16


@dataclass(frozen=True)
class ExpertsSpec(KernelSpec):
    """Y[row] = W[expert[row]] @ X[row] for matrices W of [columns, depth].

    The loops of `nest` walk the rows; its operands are X, the experts and Y. `packed`: the transposes of the matrices
    lie in panels (`lathe.core.kernels.shared.panels`); otherwise each task copies its panel, whose elements are
    `w_steps` apart (from expert to expert, along the depth, along the columns).
    """

    family: ClassVar[str] = "experts"
    generator: ClassVar[str] = "experts.cpu"
    nest: Nest
    depth: int
    columns: int
    experts: int
    x_step: int  # stride of X along the depth
    w_steps: tuple[int, int, int]
    packed: bool
    index: DType
    tile: Tile

    @property
    def rows(self) -> Dim:
        return product(self.nest.extents)

    @property
    def matrix(self) -> int:
        """Elements from the weights of one expert to those of the next."""
        return packed_size(self.depth, self.columns, self.tile) if self.packed else self.w_steps[0]

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        """The offsets of sorted rows in X and Y; ends and numbers of the experts that have rows; a copied panel."""
        panel = () if self.packed else (Scratch(self.depth * self.tile.columns * WORD_BYTES),)
        return Scratch(self.rows * 2 * _NUMBER_BYTES), Scratch((2 * self.experts + 1) * _NUMBER_BYTES), *panel

    @property
    def summary(self) -> str:
        return f"experts({self.experts} of {self.depth}x{self.columns}, tile {self.tile})"


def experts(request: Request) -> KernelCall | None:
    """Selector of ExpertProduct of float32 by weights of known extents, none of them 0, for at most 65,536 experts.

    The columns of X must have a stride that is a number, those of Y must be contiguous. None for other nodes, and if
    generated code cannot compute a dimension.
    """
    node = request.node
    x, expert, weights = (node.required_input(index) for index in range(3))
    if not has_plannable_types(node) or x.dtype is not F32 or not 0 < _known(weights.shape[0]) <= _MOST_EXPERTS:
        return None
    count, columns, depth = map(_known, weights.shape)
    x_strides, y_strides = request.strides_of(x), request.strides_of(node.output)
    w_strides = tuple(map(_known, request.strides_of(weights)))
    if not depth or not columns or not isinstance(x_strides[-1], int) or y_strides[-1] != 1 or 0 in w_strides:
        return None
    leading = node.output.shape[:-1]
    steps = (
        broadcast_strides(x.shape[:-1], leading, x_strides[:-1]),
        request.walk(expert, leading),
        y_strides[:-1],
    )
    packed = request.constant(2) is not None
    spec = ExpertsSpec(
        nest=Nest(leading, steps).collapsed(),
        depth=depth,
        columns=columns,
        experts=count,
        x_step=x_strides[-1],
        w_steps=(0, 0, 0) if packed else (w_strides[0], w_strides[2], w_strides[1]),
        packed=packed,
        index=expert.dtype,
        tile=choose_tile(request.cpu, product(leading), columns, request.rank),
    )
    if not all(map(is_plannable, spec.nest.dims)):
        return None
    flops = spec.rows * (depth * columns * 2)
    unread = (count - 1) * depth * columns * WORD_BYTES  # if all rows go to one expert
    return KernelCall(spec, _operands(spec), flops=flops, bytes=traffic(node) - unread)


def _known(dim: Dim) -> int:
    """A dimension that is a number; 0 for any other."""
    return dim if isinstance(dim, int) else 0


def _operands(spec: ExpertsSpec) -> tuple[Operand, ...]:
    weights: Operand = In(2)
    if spec.packed:
        tile = spec.tile
        nbytes = spec.experts * spec.matrix * WORD_BYTES
        weights = Packed(2, f"experts{tile.columns}x{tile.lanes}", partial(_pack, tile=tile), nbytes)
    return (In(0), In(1), weights, Out(), *spec.scratch)


def _pack(array: Array, tile: Tile) -> Array:
    return pack_panels(np.swapaxes(array, 1, 2), tile)
