"""Convolutions on a GPU: implicit matrix products, in either layout, and depthwise ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import gcd, prod
from typing import ClassVar

import numpy as np

from core.ir.dim import evaluate
from core.ir.graph import Array, Graph, Node, Value
from core.ir.types import Dim, DType
from core.kernels.catalog import body as bodies
from core.kernels.catalog.attributes import attribute
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Operand, Out, Packed, Request, covers, offers
from core.kernels.catalog.conv import extra_indices, inplace_extras, windows_along, with_bias
from core.kernels.catalog.cuda.elementwise import is_computable
from core.kernels.catalog.cuda.product import BF16, F32, FACTORS, ProductTile, Results, precisions, ranked_tiles
from core.kernels.catalog.cuda.tiling import blocks
from core.kernels.catalog.nest import Nest, has_plannable_types, traffic
from core.kernels.catalog.pool import Window

_OFFERED = 4  # tiles
_LEAST_DEPTH = 16
_DEPTHWISE_TILES = ((64, 32, 4), (16, 64, 4), (128, 16, 4))  # pixels, channels, warps


@dataclass(frozen=True)
class Image:
    """How convolutions walk an image [batch, spatial ..., channels], whatever its layout: strides in elements."""

    batch: Dim
    windows: tuple[Window, ...]
    batch_step: Dim
    steps: tuple[Dim, ...]  # along the spatial axes
    channel_step: Dim
    dtype: DType

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(window.count for window in self.windows)

    @property
    def kernel(self) -> tuple[int, ...]:
        return tuple(window.kernel for window in self.windows)

    @property
    def pixels(self) -> Dim:
        """Results of one channel."""
        return self.batch * prod(self.counts)


@dataclass(frozen=True)
class ConvSpec(KernelSpec):
    """Rows are output pixels, columns output channels of a group, depth is (window place, input channel of a group).

    The loops of `pixels` are batch and spatial axes, its operands the extras and Y. `weight_steps` are strides of the
    weights along groups, window places, input and output channels; they lie in memory as `weight`.
    """

    family: ClassVar[str] = "conv"
    image: Image
    groups: int
    channels: int  # input channels of a group
    columns: int  # output channels of a group
    weight: DType
    weight_steps: tuple[int, int, int, int]
    pixels: Nest
    results: Results
    element: DType
    tile: ProductTile
    precision: str

    @property
    def places(self) -> int:
        """In a window."""
        return prod(self.image.kernel)

    @property
    def by_channels(self) -> bool:
        """Whether a step of the depth stays at one place of the window."""
        return self.channels % self.tile.depth == 0

    @property
    def summary(self) -> str:
        kernel = "x".join(map(str, self.image.kernel))
        exact = "" if self.precision == "ieee" else f" by {self.precision}"
        return f"conv {self.element} {kernel} {self.tile}{exact}"


@dataclass(frozen=True)
class DepthwiseSpec(KernelSpec):
    """Every channel has a window of its own: a program makes some pixels of neighbouring channels."""

    family: ClassVar[str] = "depthwise"
    image: Image
    channels: int
    weight: DType
    weight_steps: tuple[int, int]  # along window places and channels
    pixels: Nest
    results: Results
    rows: int
    columns: int
    warps: int

    @property
    def summary(self) -> str:
        return f"depthwise {'x'.join(map(str, self.image.kernel))}, {self.rows} pixels by {self.columns} channels"


@covers("FusedConv", "Conv", device="cuda")
def conv(request: Request) -> KernelCall | None:
    """None for other types, and where the size of an image or of a window is not a number."""
    return next(_calls(request), None)


@offers("FusedConv", "Conv", device="cuda")
def other_tiles(request: Request) -> Iterable[KernelCall]:
    return _calls(request)


def _calls(request: Request) -> Iterator[KernelCall]:
    node = request.node
    image, w = image_of(request), node.inputs[1]
    if image is None or w is None or not _is_covered(node):
        return
    pixels, results = results_of(request, extra_indices(node))
    extras = [In(i) for i in extra_indices(node)]
    groups = int(attribute(node, "group"))
    outputs, channels, *_ = _sizes(w)
    call = partial(
        KernelCall,
        inplace=inplace_extras(node),
        strided=(In(0), *extras, Out()),
        flops=node.output.tensor.size * (2 * channels * prod(image.kernel)),
        bytes=traffic(node),
    )
    if groups > 1 and channels == 1 and outputs == groups:
        yield from _depthwise(request, image, groups, pixels, results, call)
        return
    operand, dtype, steps = _weights(request, image, groups)
    facts = (image, groups, channels, outputs // groups, dtype, steps, pixels, results, image.dtype)
    rows, columns, depth = image.pixels, outputs // groups, channels * prod(image.kernel)
    tiles = ranked_tiles(request.gpu, rows, columns, depth, groups, image.dtype)
    for precision in precisions(image.dtype, request.gpu):
        for tile in islice(dict.fromkeys(_by_channels(tile, channels) for tile in tiles), _OFFERED):
            spec = ConvSpec(*facts, tile, precision)
            grid = (groups * blocks(rows, tile.rows) * blocks(columns, tile.columns),)
            yield call(spec, (In(0), operand, *extras, Out()), grid=grid)


def _by_channels(tile: ProductTile, channels: int) -> ProductTile:
    """The tile, or one of less depth if that makes its steps stay at one place of the window."""
    common = gcd(channels, tile.depth)
    return replace(tile, depth=common) if common >= _LEAST_DEPTH else tile


def _depthwise(
    request: Request, image: Image, channels: int, pixels: Nest, results: Results, call: partial[KernelCall]
) -> Iterator[KernelCall]:
    operand, dtype, steps = _weights(request, image, channels)
    for rows, columns, warps in _DEPTHWISE_TILES:
        facts = (image, channels, dtype, (steps[1], steps[0]), pixels, results, rows, columns, warps)
        extras = (In(i) for i in extra_indices(request.node))
        grid = (blocks(image.pixels, rows) * blocks(channels, columns),)
        yield call(DepthwiseSpec(*facts), (In(0), operand, *extras, Out()), grid=grid)


def _is_covered(node: Node) -> bool:
    x, w, epilogue = node.inputs[0], node.inputs[1], node.attrs.get("epilogue")
    if x is None or w is None or x.dtype not in FACTORS or attribute(node, "pad_value"):
        return False
    if epilogue is not None and not (isinstance(epilogue, Graph) and is_computable(epilogue)):
        return False
    known = all(isinstance(dim, int) for dim in w.shape)
    return known and (w.dtype is x.dtype or (x.dtype, w.dtype) == (BF16, F32))


def image_of(request: Request) -> Image | None:
    """How the node's first input is walked; None where a size is not a number."""
    node, x, w = request.node, request.node.inputs[0], request.node.inputs[1]
    if x is None or w is None or not has_plannable_types(node) or len(x.shape) < 3:
        return None
    batch, *spatial, channel = image_axes(node, len(x.shape))
    sizes, counts = ([value.shape[axis] for axis in spatial] for value in (x, node.output))
    windows = windows_along(node, sizes, counts, w.shape[2:])
    strides = request.strides_of(x)
    if windows is None:
        return None
    steps = tuple(strides[axis] for axis in spatial)
    return Image(x.shape[batch], windows, strides[batch], steps, strides[channel], x.dtype)


def image_axes(node: Node, rank: int) -> tuple[int, ...]:
    """The axes of an image as [batch, spatial ..., channels]."""
    last = attribute(node, "layout") == "NHWC"
    return tuple(range(rank)) if last else (0, *range(2, rank), 1)


def results_of(request: Request, extras: Sequence[int]) -> tuple[Nest, Results]:
    """Pixels with the extras and Y as operands, and what becomes of sums. The first extra may be a bias."""
    node, y = request.node, request.node.output
    axes = image_axes(node, len(y.shape))
    values = [value for i in extras if (value := node.inputs[i]) is not None]
    walks = [_walk(request, node, value, axes) for value in values]
    strides = request.strides_of(y)
    walks.append(tuple(strides[axis] for axis in axes))
    pixels = Nest(tuple(y.shape[axis] for axis in axes[:-1]), tuple(walk[:-1] for walk in walks)).collapsed()
    body, bias = node.attrs.get("epilogue"), node.input(2)
    epilogue = body if isinstance(body, Graph) else None
    if bias is not None:
        epilogue = with_bias(epilogue, bias.dtype)
    steps = tuple(walk[-1] for walk in walks)
    canonical = bodies.canonical(epilogue, {}) if epilogue is not None else None
    computed = canonical.inputs[0].dtype if canonical is not None else y.dtype
    return pixels, Results(canonical, computed, tuple(v.dtype for v in values), steps[:-1], y.dtype, steps[-1])


def _walk(request: Request, node: Node, value: Value, axes: tuple[int, ...]) -> tuple[Dim, ...]:
    """Strides of what the epilogue reads, in the order of `axes`. A bias has one number for each channel."""
    if value is node.input(2):
        return (*(0 for _ in axes[1:]), 1)
    strides = request.walk(value, node.output.shape)
    return tuple(strides[axis] for axis in axes)


def _weights(request: Request, image: Image, groups: int) -> tuple[Operand, DType, tuple[int, int, int, int]]:
    """The operand, its type, and its strides along groups, places, input and output channels. A constant is laid out
    with output channels side by side."""
    w = request.node.inputs[1]
    if w is None:
        raise ValueError(f"{request.node} has no weights")
    outputs, channels, *kernel = _sizes(w)
    outputs, places = outputs // groups, prod(kernel)
    if request.constant(1) is None:
        return In(1), w.dtype, (outputs * channels * places, 1, places, channels * places)
    pack = partial(_pack, groups=groups, element=image.dtype)
    steps = (places * channels * outputs, channels * outputs, outputs, 1)
    if groups > 1 and channels == outputs == 1:
        steps, pack = (1, groups, 1, 1), partial(_pack_depthwise, element=image.dtype)
    return Packed(1, f"places{groups}{image.dtype}", pack), image.dtype, steps


def _sizes(value: Value) -> list[int]:
    """The shape of a value that depends on nothing."""
    return [evaluate(dim, {}) for dim in value.shape]


def _pack(weight: Array, groups: int, element: DType) -> Array:
    """[O, I/groups, K...] as [groups, K..., I/groups, O/groups]."""
    apart = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
    return np.ascontiguousarray(apart.transpose(0, 3, 2, 1).astype(element.numpy))


def _pack_depthwise(weight: Array, element: DType) -> Array:
    """[C, 1, K...] as [K..., C]."""
    return np.ascontiguousarray(weight.reshape(weight.shape[0], -1).T.astype(element.numpy))
