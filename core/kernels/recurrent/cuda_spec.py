"""The steps of recurrent layers on a GPU, all in one launch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product as product_of

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import Dim
from lathe.core.kernels.call import KernelCall, Packed, Request, Scratch
from lathe.core.kernels.recurrent import spec as on_cpu
from lathe.core.kernels.shared.cuda_product import F32, precisions
from lathe.core.kernels.shared.cuda_product_tiles import LEAST, ProductTile
from lathe.core.kernels.shared.cuda_tiling import blocks

_TILES = tuple(
    ProductTile(*facts) for facts in ((16, 64, 32, 4, 3), (16, 128, 32, 8, 3), (32, 64, 32, 8, 3), (64, 32, 32, 8, 2))
)


@dataclass(frozen=True)
class RecurrentSpec(on_cpu.Recurrence):
    """The recurrent weights are one operand, [directions, gates, hidden, hidden], with the output unit last.

    A program runs `tile.rows` rows through time in one direction, and computes `tile.columns` units at a time. Threads
    exchange data through scratch, [buffers, directions, batch, hidden]: the state before and after a step, then an
    LSTM's cell before and after it, or a GRU's update gate and reset state.
    """

    tile: ProductTile
    precision: str

    @property
    def buffers(self) -> int:
        """The number of state buffers in scratch."""
        return 2 + {"RNN": 0, "GRU": 0 if self.linear_before_reset else 2, "LSTM": 2}[self.cell]

    @property
    def buffer(self) -> Dim:
        """Elements of one state buffer, [directions, batch, hidden]."""
        return self.batch * (len(self.backwards) * self.hidden)

    @property
    def summary(self) -> str:
        exact = "" if self.precision == "ieee" else f" by {self.precision}"
        return f"{self.cell.lower()} steps {self.tile}{exact}, {len(self.backwards)} direction(s)"


def recurrent(request: Request) -> KernelCall | None:
    """Selector of RecurrentSteps (RNN, GRU and LSTM) of float32 with constant weights R.

    None for other nodes, if generated code cannot compute a dimension, and for activations that no kernel computes, or
    that differ by direction: see the CPU's `recurrence_of`.
    """
    return next(_calls(request), None)


def other_tiles(request: Request) -> Iterable[KernelCall]:
    """Offers of the layer of `recurrent` with every candidate tile and precision, the selector's own included.

    No offers for nodes that `recurrent` does not cover.
    """
    return _calls(request)


def _calls(request: Request) -> Iterator[KernelCall]:
    """The calls with each precision and tile, few rows first: batches rarely have a row for each multiprocessor."""
    facts = on_cpu.recurrence_of(request)
    if facts is None:
        return
    most = max(LEAST, 1 << (facts.hidden - 1).bit_length())
    tiles = dict.fromkeys(
        ProductTile(tile.rows, min(tile.columns, most), min(tile.depth, most), tile.warps, tile.stages)
        for tile in _TILES
    )
    for precision, tile in product_of(precisions(F32, request.gpu), tiles):
        spec = RecurrentSpec(**facts.facts, tile=tile, precision=precision)
        scratch = Scratch(spec.buffer * (spec.buffers * F32.itemsize), shared=True)
        call = on_cpu.call_of(request, spec, [Packed(1, "units", _pack)], scratch)
        yield KernelCall(
            spec,
            call.operands,
            flops=call.flops,
            bytes=call.bytes,
            grid=(blocks(spec.batch, tile.rows), len(spec.backwards)),
        )


def _pack(r: Array) -> Array:
    """[D, G*H, H] as [D, G, H, H], with the output units as the last axis."""
    directions, _, hidden = r.shape
    return np.ascontiguousarray(r.reshape(directions, -1, hidden, hidden).transpose(0, 1, 3, 2))
