"""Convolutions and transposed convolutions on a GPU, as implicit matrix products in any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import gcd, prod
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from lathe.core.ir.dim import evaluate
from lathe.core.ir.graph import Array, Node, Value
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Operand, Out, Packed, Request
from lathe.core.kernels.conv.spec import extra_indices, inplace_extras, windows_along
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.cuda_image import Image, has_computable_epilogue, results_of, spatial, strided_image
from lathe.core.kernels.shared.cuda_product import (
    F32,
    FACTORS,
    HALVES,
    I8,
    SHIFT,
    SPLIT,
    Results,
    TiledProduct,
    needs_adjacent_depth,
    precisions,
    split_into_halves,
    weights_for_tf32,
)
from lathe.core.kernels.shared.cuda_product_tiles import ProductTile, ranked_tiles
from lathe.core.kernels.shared.cuda_tiling import blocks
from lathe.core.kernels.shared.nest import Nest, has_plannable_types, traffic
from lathe.core.kernels.shared.window import Window
from lathe.core.ops.nn.conv import transposed_cuts
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.registry import Infer

_LEAST_DEPTH = 16
_LEAST_SHORT_DEPTH = 32  # of types of 16 or 8 bits: a shallower step waits more often than it saves indices


@dataclass(frozen=True)
class ConvSpec(KernelSpec):
    """Implicit matrix product: rows are output pixels, columns output channels, depth is (window place, input channel).

    The loops of `pixels` are batch and spatial axes, its operands the extras and Y. `weight_steps` are strides of the
    weights along groups, window places, input and output channels; `weight` is their type in memory. If `transposed`,
    rows are the places over which windows slide, and the image has one pixel for each window. `fill` is the value that
    pads the image.

    Bytes: the image is uint8, the weights are int8, but tensor cores multiply int8 only. So 128 is subtracted from the
    image, and the operand after the weights holds the correction of the sums.
    """

    family: ClassVar[str] = "conv"
    generator: ClassVar[str] = "conv.cuda"
    image: Image
    groups: int
    channels: int  # input channels of a group
    columns: int  # output channels of a group
    weight: DType
    weight_steps: tuple[int, int, int, int]
    pixels: Nest
    results: Results
    transposed: bool
    tile: ProductTile
    precision: str
    fill: int = 0

    @property
    def element(self) -> DType:
        """The type of the factors in the product: int8 for an image of uint8, otherwise the image's type."""
        return I8 if self.image.dtype is DType.UINT8 else self.image.dtype

    @property
    def rows(self) -> Dim:
        return self.image.reached if self.transposed else self.image.pixels

    @property
    def depth(self) -> int:
        return self.image.places * self.channels

    @property
    def by_channels(self) -> bool:
        """Whether a step of the depth stays at one place of the window."""
        return self.channels % self.tile.depth == 0

    @property
    def summary(self) -> str:
        kernel = "x".join(map(str, self.image.kernel))
        exact = "" if self.precision == "ieee" else f" by {self.precision}"
        return f"{'transposed ' * self.transposed}conv {self.element} {kernel} {self.tile}{exact}"


def conv(request: Request) -> KernelCall | None:
    """Selector of Conv and FusedConv of images, results and weights whose spatial sizes are numbers, in any layout.

    The types are float32, float16 and bfloat16, with weights of the same type or float32, and uint8 by constant int8
    weights (FusedConv). None for other nodes, if generated code cannot compute a dimension, if the padding is not known
    or is not zero (floats), if the epilogue has operators that are not elementwise, and for depthwise convolutions of
    floats, which have a kernel of their own.
    """
    kernels = _convolution(request)
    return kernels.preferred() if kernels is not None else None


def other_tiles(request: Request) -> Iterable[KernelCall]:
    """Offers of the convolution of `conv` with other tiles and precisions, the selector's own included.

    No offers for nodes that `conv` does not cover.
    """
    kernels = _convolution(request)
    return kernels.offers() if kernels is not None else ()


def transposed(request: Request) -> KernelCall | None:
    """Selector of ConvTranspose of float32, float16 and bfloat16 whose spatial sizes are numbers, in any layout.

    The weights have the same type, or float32 for narrow images. None for other nodes, if generated code cannot compute
    a dimension, if the padding is not known, and for depthwise ones, which have a kernel of their own.
    """
    kernels = _transposed(request)
    return kernels.preferred() if kernels is not None else None


def other_tiles_of_transposed(request: Request) -> Iterable[KernelCall]:
    """Offers of the convolution of `transposed` with other tiles and precisions, the selector's own included.

    No offers for nodes that `transposed` does not cover.
    """
    kernels = _transposed(request)
    return kernels.offers() if kernels is not None else ()


def _convolution(request: Request) -> TiledProduct | None:
    """The kernels of a convolution; None if it is not covered."""
    node, (x, w) = request.node, request.node.inputs[:2]
    if x is None or w is None or not (_are_bytes(request) or (is_covered(node) and not is_depthwise(node, w))):
        return None
    windows = conv_windows(node, x, w)
    if windows is None:
        return None
    groups = int(attribute(node, "group"))
    outputs, channels, *kernel = sizes_of(w)
    outputs, places = outputs // groups, prod(kernel)
    operands: tuple[Operand, ...] = (In(1),)
    by_precision: dict[str, tuple[Operand, ...]] = {}
    dtype, steps = w.dtype, (outputs * channels * places, 1, places, channels * places)
    if w.dtype is I8:
        shift = Packed(1, "offsets", _offsets)
        operands = (Packed(1, f"depth{I8}", partial(_pack_by_outputs, element=I8)), shift)
        steps = (outputs * places * channels, channels, 1, places * channels)
    elif request.constant(1) is not None:
        dtype = x.dtype
        if needs_adjacent_depth(dtype, request.gpu):
            pack = partial(_pack_by_outputs, element=dtype)
            operands = (Packed(1, f"depth{dtype}", pack),)
            in_halves = partial(_pack_as, pack=pack, change=split_into_halves)
            by_precision[SPLIT] = (Packed(1, "depth in halves", in_halves),)
            steps = (outputs * places * channels, channels, 1, places * channels)
        else:
            pack = partial(_pack, groups=groups, element=dtype)
            operands = (Packed(1, f"places{groups}{dtype}", pack),)
            steps = (places * channels * outputs, channels * outputs, outputs, 1)
        rounded = partial(_pack_as, pack=pack, change=weights_for_tf32)
        by_precision["tf32"] = (replace(operands[0], key=f"{operands[0].key} for tf32", pack=rounded),)
    facts = (strided_image(request, x, windows), groups, channels, outputs, dtype, steps)
    return _kernels(request, operands, facts, False, by_precision)


def _transposed(request: Request) -> TiledProduct | None:
    """The kernels of a transposed convolution; None if it is not covered."""
    node, (x, w) = request.node, request.node.inputs[:2]
    if x is None or w is None or not is_covered(node) or is_depthwise(node, w):
        return None
    windows = transposed_windows(node, x, w)
    if windows is None:
        return None
    groups = int(attribute(node, "group"))
    inputs, outputs, *kernel = sizes_of(w)
    channels, places = inputs // groups, prod(kernel)
    steps = (channels * outputs * places, 1, outputs * places, places)
    facts = (strided_image(request, x, windows), groups, channels, outputs, w.dtype, steps)
    return _kernels(request, (In(1),), facts, True)


def conv_windows(node: Node, x: Value, w: Value) -> tuple[Window, ...] | None:
    """The windows of a convolution along its spatial axes; None if a size is not a number or the padding unknown."""
    return windows_along(node, spatial(node, x), spatial(node, node.output), w.shape[2:])


def transposed_windows(node: Node, x: Value, w: Value) -> tuple[Window, ...] | None:
    """The windows of a transposed convolution: they slide over the results, one for each pixel of the image.

    None if a size is not a number, or the padding cannot be computed.
    """
    counts, sizes, kernel = spatial(node, x), spatial(node, node.output), sizes_of(w)[2:]
    known = [dim for dim in (*counts, *sizes) if isinstance(dim, int)]
    if len(known) != 2 * len(kernel):
        return None
    ones = (1,) * len(kernel)
    strides, dilations = (attribute(node, name) or ones for name in ("strides", "dilations"))
    cuts = transposed_cuts(Infer(registry.get(node.op), node, {}), known[: len(kernel)], kernel)
    if cuts is None:
        return None
    facts = zip(known[len(kernel) :], known[: len(kernel)], kernel, strides, dilations, cuts, strict=True)
    return tuple(
        Window(size, count, extent, stride, dilation, cut, 0) for size, count, extent, stride, dilation, cut in facts
    )


def _kernels(
    request: Request,
    weights: tuple[Operand, ...],
    facts: tuple[Image, int, int, int, DType, tuple[int, int, int, int]],
    is_transposed: bool,
    by_precision: Mapping[str, tuple[Operand, ...]] = MappingProxyType({}),
) -> TiledProduct:
    """The kernels with the operands `weights` for the weights, or those in `by_precision`, where it has some."""
    node, (_, groups, channels, columns, *_) = request.node, facts
    pixels, results = results_of(request, extra_indices(node))
    extras = [In(i) for i in extra_indices(node)]
    tile = ProductTile(_LEAST_DEPTH, _LEAST_DEPTH, _LEAST_DEPTH, 1, 1)
    fill = int(attribute(node, "pad_value")) if node.op == "FusedConv" else 0
    base = ConvSpec(*facts, pixels, results, is_transposed, tile, "ieee", fill)
    least = _LEAST_DEPTH if base.element is F32 else _LEAST_SHORT_DEPTH

    def call(tile: ProductTile, precision: str) -> KernelCall:
        return KernelCall(
            replace(base, tile=tile, precision=precision),
            (In(0), *by_precision.get(precision, weights), *extras, Out()),
            inplace=inplace_extras(node),
            strided=(In(0), *extras, Out()),
            flops=base.rows * (2 * groups * columns * base.depth),
            bytes=traffic(node),
            grid=(groups * blocks(base.rows, tile.rows) * blocks(columns, tile.columns),),
        )

    ways = precisions(base.element, request.gpu, SPLIT in by_precision)
    sizes = (base.rows, columns, base.depth, groups)
    tiles = ranked_tiles(request.gpu, *sizes, base.element, 2 if SPLIT in ways else 1)
    fitted = tiles.changed(partial(_by_channels, channels=channels, least=least))
    return TiledProduct(call, fitted, ways)


def _by_channels(tile: ProductTile, channels: int, least: int) -> ProductTile:
    """The tile with its depth reduced to the greatest common divisor with `channels`, if that is at least `least`.

    Then each step of the depth stays at one place of the window. Otherwise the tile is unchanged.
    """
    common = gcd(channels, tile.depth)
    return replace(tile, depth=common) if common >= least else tile


def is_covered(node: Node) -> bool:
    """Whether the node is a convolution of floats, padded (if at all) with zeros, whose weights have a known shape.

    The weights have the image's type, or float32 for an image of narrow floats. Generated code must be able to compute
    all dimensions of the node, and a GPU kernel must be able to run its epilogue.
    """
    x, w = node.inputs[:2]
    padded = node.op == "FusedConv" and attribute(node, "pad_value")
    if x is None or w is None or x.dtype not in FACTORS or padded or not _has_known_sizes(node, x, w):
        return False
    return w.dtype is x.dtype or (x.dtype in HALVES and w.dtype is F32)


def _are_bytes(request: Request) -> bool:
    """Whether the node is a FusedConv of uint8 by constant int8 weights, into which a pass turns ConvInteger."""
    node, (x, w) = request.node, request.node.inputs[:2]
    if node.op != "FusedConv" or x is None or w is None or (x.dtype, w.dtype) != (DType.UINT8, I8):
        return False
    return request.constant(1) is not None and _has_known_sizes(node, x, w)


def _has_known_sizes(node: Node, x: Value, w: Value) -> bool:
    known = has_plannable_types(node) and all(isinstance(dim, int) for dim in w.shape)
    return known and len(x.shape) >= 3 and has_computable_epilogue(node)


def is_depthwise(node: Node, weight: Value) -> bool:
    """Whether each channel is convolved separately: `weight` is [groups, 1, ...] with several groups."""
    groups = int(attribute(node, "group"))
    return groups > 1 and weight.shape[:2] == (groups, 1)


def sizes_of(value: Value) -> list[int]:
    """The shape of a value as ints. KeyError if it has symbols."""
    return [evaluate(dim, {}) for dim in value.shape]


def _pack(weight: Array, groups: int, element: DType) -> Array:
    """[O, I/groups, K...] as [groups, K..., I/groups, O/groups]: output channels are contiguous."""
    apart = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
    return np.ascontiguousarray(apart.transpose(0, 3, 2, 1).astype(element.numpy))


def _pack_by_outputs(weight: Array, element: DType) -> Array:
    """[O, I/groups, K...] as [O, K..., I/groups]: the numbers that are added up for an output channel are adjacent."""
    return np.ascontiguousarray(weight.reshape(*weight.shape[:2], -1).transpose(0, 2, 1).astype(element.numpy))


def _pack_as(weight: Array, pack: Callable[[Array], Array], change: Callable[[Array], Array]) -> Array:
    return change(pack(weight))


def _offsets(weight: Array) -> Array:
    """The int32 number per output channel to add to its sums, because `SHIFT` is subtracted from the image.

    The number is `SHIFT` times the sum of the channel's weights.
    """
    return SHIFT * weight.reshape(len(weight), -1).sum(1, dtype=np.int32)
