"""Convolutions of channels-last images with constant weights: `FusedConv` and `Conv` of float32 or words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import ClassVar

import numpy as np

from lathe.core.ir.dim import product
from lathe.core.ir.dims import has_only_sizes
from lathe.core.ir.graph import Array, Graph, Node
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Packed, Request, Scratch
from lathe.core.kernels.gemm.spec import GemmSpec
from lathe.core.kernels.shared import body as bodies
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.nest import Nest, broadcast_strides, has_plannable_types, row_major, traffic
from lathe.core.kernels.shared.panels import (
    SHORT_EPILOGUE,
    Tile,
    choose_tile,
    is_deferred,
    is_staged,
    pack_panels,
    row_pitch,
    stage_bytes,
)
from lathe.core.kernels.shared.window import Window
from lathe.core.kernels.shared.words import WORD_BYTES, count_in_words, element_of, pack_words, word_of_bytes
from lathe.core.kernels.target import Target
from lathe.core.ops.nn.conv import conv_pads
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.registry import Infer

F32, F16 = DType.FLOAT32, DType.FLOAT16
FEW_CHANNELS = 16  # with fewer, the contiguous channels of a pixel are too short: rows of the window are gathered first
_POINTER_BYTES = 8


@dataclass(frozen=True)
class Finish:
    """How results are finished and stored: the epilogue, its extra inputs, and the output Y.

    `pixels` walks the output's batch and spatial axes with the extra inputs and Y as operands. `extra_steps` are the
    strides of the extras along the channels.
    """

    epilogue: Graph | None
    pixels: Nest
    extra_steps: tuple[int, ...]
    extra_dtypes: tuple[DType, ...]
    dtype: DType

    @property
    def deferred(self) -> bool:
        """Whether the epilogue runs after all sums of a block are stored (`panels.is_deferred`)."""
        return is_deferred(self.epilogue, self.dtype, 1)

    @property
    def staged(self) -> bool:
        """Whether the sums of a tile go through scratch before the epilogue (`panels.is_staged`)."""
        return is_staged(self.epilogue, self.dtype, 1)


@dataclass(frozen=True)
class ConvSpec(KernelSpec):
    """Implicit matrix product: rows are output pixels, columns output channels, depth is (window place, channel).

    With `gathers`, each tile of pixels first copies its windows into rows (im2col for one tile). Otherwise a table
    holds the offset of each contiguous run of elements in the window of each pixel; runs outside the image point at
    `fill`. `element` is the type in words of the image (`lathe.core.kernels.shared.words`): channels, and all sizes
    that follow from them, count words.

    Groups narrower than a vector are computed `pair` at a time: they count as one group, in which every output channel
    reads the input channels of its own part only.
    """

    family: ClassVar[str] = "conv"
    generator: ClassVar[str] = "conv.cpu"
    batch: Dim
    windows: tuple[Window, ...]
    groups: int
    channels: int  # input channels of a group
    columns: int  # output channels of a group
    finish: Finish
    gathers: bool
    tile: Tile
    element: DType = F32
    fill: int = 0  # a word
    pair: int = 1

    @property
    def taps(self) -> int:
        """The number of places in the window."""
        return prod(window.kernel for window in self.windows)

    @property
    def depth(self) -> int:
        """The number of products per result, in words: places of the window times channels that a result reads."""
        return self.taps * self.channels // self.pair

    @property
    def sizes(self) -> tuple[Dim, ...]:
        """The extents of the image along its spatial axes."""
        return tuple(window.size for window in self.windows)

    @property
    def counts(self) -> tuple[Dim, ...]:
        """The number of results along each spatial axis."""
        return tuple(window.count for window in self.windows)

    @property
    def pixels(self) -> Dim:
        """The number of output pixels in the whole batch."""
        return product((self.batch, *self.counts))

    @property
    def reaches(self) -> tuple[bool, ...]:
        """For each axis, whether a window can reach outside the image."""
        return tuple(window.inside != (0, window.count) for window in self.windows)

    @property
    def padded(self) -> bool:
        """Whether a window can reach outside the image."""
        return any(self.reaches)

    @property
    def row(self) -> int:
        """The number of words in one row of a window: its columns times the channels."""
        return self.windows[-1].kernel * self.channels

    @property
    def has_whole_rows(self) -> bool:
        """Whether rows of a window are runs: contiguous in the image, and completely inside or outside it."""
        return self.groups == self.pair == 1 and self.windows[-1].dilation == 1 and not self.reaches[-1]

    @property
    def run(self) -> int:
        """The number of words in a run, to which one entry of the table points."""
        return self.row if self.has_whole_rows else self.channels

    @property
    def runs(self) -> int:
        """The number of runs in a window."""
        return self.taps * self.channels // self.run

    @property
    def row_elements(self) -> int:
        """Words of scratch for one gathered window: the copy of its last line may write a whole vector too many."""
        return (-(-self.depth // self.tile.lanes) + 1) * self.tile.lanes

    @property
    def widened_words(self) -> int:
        """Words of scratch for a run of each pixel of a tile as float32; 0 unless the image is float16."""
        longest = self.row if self.gathers else self.run
        return self.tile.rows * row_pitch(longest, self.tile) if self.element is F16 and self.pair == 1 else 0

    @property
    def summary(self) -> str:
        kernel = "x".join(str(window.kernel) for window in self.windows)
        kind = "" if self.element is F32 else f"{self.element} "
        paired = "" if self.pair == 1 else f", {self.pair} groups per vector"
        return f"conv {kind}{kernel} {self.tile}, {'gathered windows' if self.gathers else 'implicit'}{paired}"


@dataclass(frozen=True)
class DynamicConvSpec(ConvSpec):
    """A `ConvSpec` for images with dynamic extents.

    `image` and `results` hold the extents of the image and of the results; those of the windows are 0.
    """

    image: tuple[Dim, ...] = ()
    results: tuple[Dim, ...] = ()

    @property
    def sizes(self) -> tuple[Dim, ...]:
        return self.image

    @property
    def counts(self) -> tuple[Dim, ...]:
        return self.results

    @property
    def reaches(self) -> tuple[bool, ...]:
        """For each axis, whether there is padding: only then a window can reach outside the image."""
        return tuple(window.before > 0 or window.after > 0 for window in self.windows)


def implicit_gemm(request: Request) -> KernelCall | None:
    """Selector of channels-last Conv and FusedConv with constant weights and image sizes that are numbers.

    The types are float32, bfloat16 or float16 x float32, and uint8 x int8. A 1x1 convolution without stride, padding
    and groups becomes a matrix product over pixels, if these are evenly spaced in memory. None for other nodes, if the
    padding is not known, if the epilogue has operators that are not elementwise, and if the input channels of a group
    do not fill words (2 elements of bfloat16, 4 bytes).
    """
    node = request.node
    weight = request.constant(1)
    windows = windows_of(node)
    if weight is None or windows is None or not is_covered(node):
        return None
    x, y, groups = node.required_input(0), node.output, int(attribute(node, "group"))
    element, columns = element_of(x.dtype, node.required_input(1).dtype), weight.shape[0] // groups
    channels = count_in_words(weight.shape[1], element) if element is not None else None
    if element is None or not isinstance(channels, int):
        return None
    wide = element in (F32, F16)  # a word holds one number
    pair = groups_per_vector(groups, channels, columns, request.cpu) if wide else 1
    groups, channels, columns = groups // pair, channels * pair, columns * pair
    single = groups == pair == 1
    is_point = single and all(w == Window(w.size, w.size, 1, 1, w.dilation, 0, 0) for w in windows)
    if is_point and (product := _product(request, weight, element, channels)) is not None:
        return product
    finish = finish_of(node, request)
    pixels = x.shape[0] * prod(window.count for window in windows)
    tile = choose_tile(request.cpu, pixels, columns, request.rank)
    key = f"conv{tile.columns}x{tile.lanes}g{groups}{element}"
    pack = Packed(1, key, partial(_pack, groups=groups, tile=tile, element=element))
    call = partial(
        KernelCall,
        inplace=() if finish.deferred else inplace_extras(node),
        flops=y.tensor.size * (2 * weight[0].size),
        bytes=traffic(node),
    )
    extras = [In(i) for i in extra_indices(node)]
    lines = strided_operands(request)
    fill = word_of_bytes(attribute(node, "pad_value")) if node.op == "FusedConv" else 0
    full = ConvSpec(x.shape[0], windows, groups, channels, columns, finish, False, tile, element, fill, pair)
    short = channels < FEW_CHANNELS and windows[-1].dilation == 1 and not full.has_whole_rows
    if single and short:
        full = dataclasses.replace(full, gathers=True)
    return call(full, (In(0), pack, *extras, Out(0), *_scratch(full, request.cpu)), strided=lines)


def pointwise(request: Request) -> KernelCall | None:
    """Selector of 1x1 Conv and FusedConv over images whose size is not a number, such as with `n` as a spatial axis.

    Images are channels-last and weights constant. The types are float32, bfloat16 or float16 x float32, and uint8 x
    int8. None for other nodes, if generated code cannot compute a dimension, with strides, padding or groups, if pixels
    are not evenly spaced in memory, if the epilogue has operators that are not elementwise, and if the input channels
    do not fill words (2 elements of bfloat16, 4 bytes).
    """
    node, weight = request.node, request.constant(1)
    if weight is None or not has_plannable_types(node) or not is_covered(node) or windows_of(node) is not None:
        return None
    x = node.required_input(0)
    if set(weight.shape[2:]) != {1} or x.shape[:-1] != node.output.shape[:-1] or int(attribute(node, "group")) != 1:
        return None
    element = element_of(x.dtype, node.required_input(1).dtype)
    channels = count_in_words(weight.shape[1], element) if element is not None else None
    return _product(request, weight, element, channels) if element is not None and isinstance(channels, int) else None


def dynamic_conv(request: Request) -> KernelCall | None:
    """Selector of channels-last Conv and FusedConv with constant weights, over images with dynamic extents.

    Images are float32, or uint8 with int8 weights. None for other nodes and types, if no extent of the image is dynamic
    or generated code cannot compute one, if the padding is not known, and if the channels of a group do not fill words.
    """
    node, weight = request.node, request.constant(1)
    if weight is None or not has_plannable_types(node) or not is_covered(node):
        return None
    x, y, groups = node.required_input(0), node.output, int(attribute(node, "group"))
    image, results = x.shape[1:-1], y.shape[1:-1]
    pads = conv_pads(Infer(registry.get(node.op), node, {}))
    known = all(isinstance(dim, int) or has_only_sizes(dim) for dim in (*image, *results))
    element = element_of(x.dtype, node.required_input(1).dtype)
    channels = count_in_words(weight.shape[1], element) if element is not None else None
    if pads is None or not known or not any(map(has_only_sizes, image)):
        return None
    if element not in (F32, DType.UINT8) or not isinstance(channels, int):
        return None
    strides, dilations = (attribute(node, name) or (1,) * len(image) for name in ("strides", "dilations"))
    facts = zip(weight.shape[2:], strides, dilations, pads, strict=True)
    windows = tuple(Window(0, 0, kernel, stride, dilation, *pad) for kernel, stride, dilation, pad in facts)
    columns = weight.shape[0] // groups
    pair = groups_per_vector(groups, channels, columns, request.cpu) if element is F32 else 1
    groups, channels, columns = groups // pair, channels * pair, columns * pair
    finish, tile = finish_of(node, request), choose_tile(request.cpu, product(y.shape[:-1]), columns, request.rank)
    pack = partial(_pack, groups=groups, tile=tile, element=element)
    fill = word_of_bytes(attribute(node, "pad_value")) if node.op == "FusedConv" else 0
    spec = DynamicConvSpec(
        x.shape[0], windows, groups, channels, columns, finish, False, tile, element, fill, pair, image, results
    )
    weights = Packed(1, f"conv{tile.columns}x{tile.lanes}g{groups}{element}", pack)
    extras = [In(i) for i in extra_indices(node)]
    return KernelCall(
        spec, (In(0), weights, *extras, Out(0), *_scratch(spec, request.cpu)),
        inplace=() if finish.deferred else inplace_extras(node),
        flops=y.tensor.size * (2 * weight[0].size),
        bytes=traffic(node),
        strided=strided_operands(request),
    )  # fmt: skip


def _product(request: Request, weight: Array, element: DType, channels: int) -> KernelCall | None:
    """The call of a 1x1 convolution as a matrix product; None if the image's pixels are not evenly spaced in memory.

    `channels` counts words of `element`.
    """
    node, columns, wide = request.node, len(weight), element in (F32, F16)
    pitch = request.pitch(node.required_input(0))
    if pitch is None:
        return None
    tile = choose_tile(request.cpu, prod(node.output.shape[:-1]), columns, request.rank)
    pack = Packed(
        1, f"conv{tile.columns}x{tile.lanes}g1{element}", partial(_pack, groups=1, tile=tile, element=element)
    )
    finish, lines = finish_of(node, request), strided_operands(request)
    spec = _pointwise(finish, channels, columns, pitch if wide else channels, tile, element)
    extras = [In(i) for i in extra_indices(node)]
    return KernelCall(
        spec, (In(0), pack, *extras, Out(0), *spec.scratch),
        inplace=() if finish.deferred else inplace_extras(node),
        flops=node.output.tensor.size * (2 * weight[0].size),
        bytes=traffic(node),
        strided=(In(0), *lines) if wide and lines else (),
    )  # fmt: skip


def groups_per_vector(groups: int, channels: int, columns: int, target: Target) -> int:
    """The number of groups that fill a vector side by side.

    1 unless a group has as many input channels (`channels`) as output channels (`columns`), at least two, that number
    divides the vector's lanes, and the number of `groups` is a multiple of the result.
    """
    count = target.lanes // columns
    fits = channels == columns > 1 and target.lanes % columns == 0 and groups % max(count, 1) == 0
    return count if fits else 1


def _pointwise(finish: Finish, channels: int, columns: int, step: Dim, tile: Tile, element: DType) -> GemmSpec:
    """The spec of a 1x1 convolution as a matrix product over pixels, which lie `step` words apart."""
    extents = finish.pixels.extents
    dense = row_major(extents)
    strides = (tuple(s * step for s in dense), (0,) * len(extents), *finish.pixels.strides)
    nest = Nest(extents, strides).collapsed()
    return GemmSpec(
        nest, channels, columns, 1, (columns, 1), finish.extra_steps, 1, True, finish.epilogue,
        finish.extra_dtypes, finish.dtype, tile, element,
    )  # fmt: skip


def _scratch(spec: ConvSpec, target: Target) -> tuple[Scratch, ...]:
    """Scratch operands: windows or the table of runs, widened runs, and staged sums, as far as they are needed."""
    widened, stage = spec.widened_words * WORD_BYTES, stage_bytes(spec.tile) if spec.finish.staged else 0
    return tuple(Scratch(nbytes) for nbytes in (_scratch_bytes(spec, target), widened, stage) if nbytes)


def _scratch_bytes(spec: ConvSpec, target: Target) -> int:
    """Bytes of scratch for the gathered windows of a tile; or for the table of runs and a run of `fill`."""
    if spec.gathers:
        return spec.tile.rows * spec.row_elements * F32.itemsize
    zeros = -(-spec.run // spec.tile.lanes) * target.vector_bytes
    return spec.runs * table_lanes(spec.tile) * _POINTER_BYTES + zeros


def table_lanes(tile: Tile) -> int:
    """Entries per run in the table: the tile's rows, rounded up to a power of two; at least 2."""
    return 1 << max(tile.rows - 1, 1).bit_length()


def _pack(weight: Array, groups: int, tile: Tile, element: DType) -> Array:
    """[O, I/groups, K...] as panels of [(K..., I/groups), O/groups] per group.

    `groups` may be smaller than that of the node: then several of the node's groups lie side by side.
    """
    columns = weight.shape[0] // groups
    last = np.moveaxis(weight, 1, -1).reshape(groups, columns, -1)
    return pack_panels(pack_words(np.swapaxes(last, 1, 2), element), tile)


def is_covered(node: Node) -> bool:
    """Whether the node is a channels-last convolution of types with a kernel, whose epilogue can be generated.

    Image and weights are float32, bfloat16 or float16 by float32, or uint8 by int8.
    """
    epilogue = node.attrs.get("epilogue")
    if epilogue is not None and not (isinstance(epilogue, Graph) and bodies.is_scalar(epilogue)):
        return False
    x, w = node.required_input(0), node.required_input(1)
    return attribute(node, "layout") == "NHWC" and element_of(x.dtype, w.dtype) is not None


def has_long_epilogue(node: Node) -> bool:
    """Whether the epilogue, with the bias added first, is so long that it is deferred or staged."""
    body, bias = node.attrs.get("epilogue"), node.input(2)
    return (bodies.cost(body) if isinstance(body, Graph) else 0) + (bias is not None) > SHORT_EPILOGUE


def windows_of(node: Node) -> tuple[Window, ...] | None:
    """The window along each spatial axis of a channels-last convolution.

    None if a size of the image, the result or the window, or the padding, is not known, the layout is another one, or
    types cannot be planned.
    """
    x, w = node.inputs[0], node.inputs[1]
    if x is None or w is None or not has_plannable_types(node) or attribute(node, "layout") != "NHWC":
        return None
    return windows_along(node, x.shape[1:-1], node.output.shape[1:-1], w.shape[2:])


def windows_along(
    node: Node, sizes: Sequence[Dim], counts: Sequence[Dim], kernels: Sequence[Dim]
) -> tuple[Window, ...] | None:
    """The window along each axis, for an image of `sizes` and a result of `counts`.

    Strides, dilations and padding are the node's. None if a size, count, kernel extent or the padding is not known.
    """
    pads = conv_pads(Infer(registry.get(node.op), node, {}))
    strides, dilations = (attribute(node, name) or (1,) * len(sizes) for name in ("strides", "dilations"))
    windows = []
    for size, count, kernel, stride, dilation, pad in zip(
        sizes, counts, kernels, strides, dilations, pads or (), strict=False
    ):
        if not isinstance(size, int) or not isinstance(count, int) or not isinstance(kernel, int):
            return None
        windows.append(Window(size, count, kernel, stride, dilation, *pad))
    return tuple(windows) if len(windows) == len(sizes) else None


def extra_indices(node: Node) -> list[int]:
    """The indices of the inputs that the epilogue reads: the bias (input 2) if there is one, then the extras."""
    return [i for i, value in enumerate(node.inputs) if i >= 2 and value is not None]


def strided_operands(request: Request) -> tuple[In | Out, ...]:
    """The bias, the extras and the output, if the channels of each are contiguous; otherwise an empty tuple.

    If they are contiguous, their pixels may have any strides, so these operands may lie inside other tensors.
    """
    node = request.node
    values = [node.output, *(node.required_input(i) for i in extra_indices(node))]
    even = all(value.shape[-1:] == (1,) or request.strides_of(value)[-1:] in ((), (1,)) for value in values)
    return (*(In(i) for i in extra_indices(node)), Out(0)) if even else ()


def finish_of(node: Node, request: Request | None = None) -> Finish:
    """The `Finish` of a convolution node: its epilogue, with the bias as the first extra input if there is one.

    `request` gives the strides of operands that lie inside other tensors; without it all are row-major.
    """
    values = [node.required_input(i) for i in extra_indices(node)]
    shape, inside = node.output.shape, request.strides if request is not None else {}
    strides = [broadcast_strides(value.shape, shape, inside.get(value)) for value in values]
    y = inside.get(node.output, row_major(shape))
    pixels = Nest(shape[:-1], (*(s[:-1] for s in strides), y[:-1])).collapsed()
    body = node.attrs.get("epilogue")
    epilogue = body if isinstance(body, Graph) else None
    bias = node.input(2)
    if bias is not None:
        epilogue = bodies.with_bias(epilogue, bias.dtype)
    return Finish(
        bodies.canonical(epilogue, {}) if epilogue is not None else None,
        pixels, tuple(int(bool(s[-1])) for s in strides), tuple(value.dtype for value in values), node.output.dtype,
    )  # fmt: skip


def inplace_extras(node: Node) -> tuple[int, ...]:
    """The indices of extras with the output's shape and element size, whose memory the output may reuse.

    Each element is read right before the result is stored in its place.
    """
    y = node.output
    return tuple(
        i
        for i in extra_indices(node)
        if i > 2 and (value := node.required_input(i)).shape == y.shape and value.dtype.itemsize == y.dtype.itemsize
    )
