"""Shared parts of matrix products and convolutions on a GPU: kernels by tile, precision, split depth, the epilogue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product as product_of
from math import log

import numpy as np

from lathe.core.ir.graph import Array, Graph
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import Block, KernelCall, Operand, Scratch, by_batch, first_batches
from lathe.core.kernels.shared.cuda_product_tiles import HOPPER, SAMPLES, ProductTile, RankedTiles
from lathe.core.kernels.target import GpuTarget

F32, F16, BF16 = DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16
HALVES = frozenset({F16, BF16})
FACTORS = HALVES | {F32}
_OFFERED = 8  # tiles that the tuner may measure
I8 = DType.INT8
SPLIT = "tf32x3, split weights"  # see `precisions`
_TRUNCATED = 2.0**-11 / (2 * log(2))  # see `weights_for_tf32`
OF_TF32 = (1 + _TRUNCATED) ** 2  # a product of numbers over the mean TF32 product, which truncates both
TF32_BITS, HALF_OF_LAST_BIT = -0x2000, 0x1000  # of a float32, as int32: those that TF32 has, and half of the last one
SHIFT = 128  # subtracted from uint8, since tensor cores multiply int8


@dataclass(frozen=True)
class Results:
    """How sums are stored: the epilogue, whose first input has type `computed`, and the output Y.

    Along the columns the extra inputs and Y move by the steps given here; along the rows by a nest in the kernel's
    spec.
    """

    epilogue: Graph | None
    computed: DType
    extra_dtypes: tuple[DType, ...]
    extra_steps: tuple[Dim, ...]
    dtype: DType  # of Y
    y_step: Dim = 1


def precisions(element: DType, target: GpuTarget, has_packed_weights: bool = False) -> tuple[str, ...]:
    """How elements of this type are multiplied; the way that is expected to be fastest comes first.

    "ieee", "tf32" and "tf32x3" are Triton's `input_precision`. "tf32x3" makes three tensor core products of mantissa
    halves, and is nearly as exact as "ieee", which runs without tensor cores. `SPLIT` does the same with weights that
    were split when they were packed.
    """
    if element is not F32:
        return ("ieee",)
    if target.tf32:
        return ("tf32",)
    return (SPLIT if has_packed_weights else "tf32x3", "ieee")


def split_into_halves(array: Array) -> Array:
    """Two float32 arrays, stacked, whose sum is `array` up to 2**-22 of it, and which TF32 represents exactly.

    An infinity or NaN is in the first one; subnormal numbers may become 0.
    """
    first = _rounded_to_tf32(array)
    with np.errstate(invalid="ignore"):  # infinities
        second = np.where(np.isfinite(array), array - first, np.float32(0))
    return np.stack([first, _rounded_to_tf32(second)])


def weights_for_tf32(weights: Array) -> Array:
    """Float32 weights for products by TF32: rounded to nearest, and larger by what the other factors lose on average.

    Tensor cores truncate factors to 10 bits of mantissa. Without the correction, the results of all layers would be too
    small: those of ResNet-50 by 2 %, and with it they differ by 0.04 %, as if both factors were rounded. A number
    m * 2**e, with m from 1 to 2, loses 2**(e - 11) on average, so 2**-11 / m of itself. The mean over m, distributed by
    Benford's law, is 2**-11 / (2 ln 2). Integers get no correction, so products of small integers are exact.
    """
    is_whole = np.array_equal(weights, np.trunc(weights))
    return _rounded_to_tf32(weights if is_whole else weights * np.float32(1 + _TRUNCATED))


def _rounded_to_tf32(array: Array) -> Array:
    """The nearest float32 numbers with 10 bits of mantissa; what is not finite, or would become infinite, is kept."""
    bits = np.ascontiguousarray(array, np.float32).view(np.int32)
    rounded = ((bits + np.int32(HALF_OF_LAST_BIT)) & np.int32(TF32_BITS)).view(np.float32)
    return np.where(np.isfinite(array) & np.isfinite(rounded), rounded, array)


def needs_adjacent_depth(element: DType, target: GpuTarget) -> bool:
    """Whether the right factor should have the numbers of each column side by side.

    Tensor cores multiply bytes in this order only. So does wgmma (sm_90) for float32, while it transposes types of 16
    bits: in another order each number would be copied into shared memory by itself.
    """
    return element.itemsize == 1 or (element is F32 and target.arch >= HOPPER)


@dataclass(frozen=True, slots=True)
class TiledProduct:
    """All kernels of a product or convolution. `call` makes that of a tile and a precision.

    The first of `precisions` is the preferred one.
    """

    call: Callable[[ProductTile, str], KernelCall]
    tiles: RankedTiles
    precisions: tuple[str, ...]

    def preferred(self) -> KernelCall:
        """The kernels with the best tiles, each for its range of batch sizes."""
        best = [self.call(tile, self.precisions[0]) for tile in self.tiles.best]
        return by_batch(list(zip(first_batches(SAMPLES), best, strict=True)))

    def offers(self) -> Iterator[KernelCall]:
        """The kernels with up to eight tiles for each precision."""
        for precision, tile in product_of(self.precisions, self.tiles.tiles[:_OFFERED]):
            yield self.call(tile, precision)


def split_operands(tile: ProductTile, programs: Dim, parts: int) -> tuple[Operand, ...]:
    """The operands of a split depth: scratch for partial sums, and one counter per tile.

    There are no operands if `parts` is 1, or if the number of tiles, `programs`, is not known.

    The programs of a tile count themselves when they are done. The last program adds up all partial sums in order, and
    resets the counter to 0 for the next run.
    """
    if parts == 1 or not isinstance(programs, int):
        return ()
    sums = Scratch(programs * parts * tile.rows * tile.columns * F32.itemsize, shared=True)
    return sums, Block(f"counts{programs}", np.zeros(programs, np.int32))


def cast_array(array: Array, element: DType) -> Array:
    """A copy of the array, converted to the NumPy type of `element`."""
    return array.astype(element.numpy)
