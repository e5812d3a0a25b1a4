"""Convolutions of channels-last images with constant weights: `FusedConv` and `Conv` of float32 or words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import ClassVar

import numpy as np

from core.ir.dim import product
from core.ir.dims import is_sized
from core.ir.graph import Array, Graph, Node, Value
from core.ir.types import Dim, DType, TensorType
from core.kernels.catalog import body as bodies
from core.kernels.catalog.attributes import attribute
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Out, Packed, Request, Scratch, covers
from core.kernels.catalog.gemm import GemmSpec
from core.kernels.catalog.nest import Nest, broadcast_strides, has_plannable_types, row_major, traffic
from core.kernels.catalog.panels import (
    SHORT_EPILOGUE,
    Tile,
    choose_tile,
    is_deferred,
    is_staged,
    pack_panels,
    row_pitch,
    stage_bytes,
)
from core.kernels.catalog.pool import Window
from core.kernels.catalog.words import WORD_BYTES, element_of, in_words, pack_words, word_of
from core.kernels.target import Target
from core.ops import registry
from core.ops.conv import conv_pads, has_few_channels
from core.ops.registry import Infer, NodeView

F32, F16 = DType.FLOAT32, DType.FLOAT16
_FEW_CHANNELS = 16  # below, a pixel's channels are too short a run: whole rows of the window are gathered first
_POINTER_BYTES = 8
_WINOGRAD_SIZE = 6  # least results along an axis


@dataclass(frozen=True)
class Finish:
    """What happens to a result on its way to memory.

    `pixels` walks the output's batch and spatial axes with the extra inputs and Y as operands; `extra_steps` says how
    each extra moves from one channel to the next.
    """

    epilogue: Graph | None
    pixels: Nest
    extra_steps: tuple[int, ...]
    extra_dtypes: tuple[DType, ...]
    dtype: DType

    @property
    def deferred(self) -> bool:
        return is_deferred(self.epilogue, self.dtype, 1)

    @property
    def staged(self) -> bool:
        return is_staged(self.epilogue, self.dtype, 1)


@dataclass(frozen=True)
class ConvSpec(KernelSpec):
    """Implicit matrix product: rows are output pixels, columns output channels, depth is (window place, channel).

    `gathers`: each tile of pixels first copies its windows into rows; otherwise a table says where the window of each
    pixel meets the image, run by run of neighbouring elements, and runs outside point at `fill`. `element` is what
    words of the image hold (`core.kernels.catalog.words`): channels, and all that follows from them, count words.

    Groups narrower than a vector are made `pair` at a time: they count as one group, in which every output channel
    reads the input channels of its own part only.
    """

    family: ClassVar[str] = "conv"
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
        """Places in the window."""
        return prod(window.kernel for window in self.windows)

    @property
    def depth(self) -> int:
        """Products that make one result."""
        return self.taps * self.channels // self.pair

    @property
    def sizes(self) -> tuple[Dim, ...]:
        """The extents of the image along its axes."""
        return tuple(window.size for window in self.windows)

    @property
    def counts(self) -> tuple[Dim, ...]:
        """The results along each axis."""
        return tuple(window.count for window in self.windows)

    @property
    def pixels(self) -> Dim:
        """Output pixels of the whole batch."""
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
        """Elements of one row of a window, neighbours in the image."""
        return self.windows[-1].kernel * self.channels

    @property
    def has_whole_rows(self) -> bool:
        """Whether rows of a window are runs: neighbours in the image, all of them inside it or all outside."""
        return self.groups == self.pair == 1 and self.windows[-1].dilation == 1 and not self.reaches[-1]

    @property
    def run(self) -> int:
        """Elements that an entry of the table stands for."""
        return self.row if self.has_whole_rows else self.channels

    @property
    def runs(self) -> int:
        """Runs of a window."""
        return self.taps * self.channels // self.run

    @property
    def row_elements(self) -> int:
        """Room for one gathered window: the last run may write a whole vector beyond its end."""
        return (-(-self.depth // self.tile.lanes) + 1) * self.tile.lanes

    @property
    def widened_words(self) -> int:
        """Room for a run of every pixel of a tile as float32, where they are stored otherwise."""
        longest = self.row if self.gathers else self.run
        return self.tile.rows * row_pitch(longest, self.tile) if self.element is F16 and self.pair == 1 else 0

    @property
    def summary(self) -> str:
        kernel = "x".join(str(window.kernel) for window in self.windows)
        kind = "" if self.element is F32 else f"{self.element} "
        paired = "" if self.pair == 1 else f", {self.pair} groups per vector"
        return f"conv {kind}{kernel} {self.tile}, {'gathered windows' if self.gathers else 'implicit'}{paired}"


@dataclass(frozen=True)
class SizedConvSpec(ConvSpec):
    """The same over images whose extents are sizes of a table: `image` and `results` are the extents, and those of the
    windows are 0."""

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
        """Every window with padding may; without, a result has its whole window in the image."""
        return tuple(window.before > 0 or window.after > 0 for window in self.windows)


@covers("FusedConv", "Conv")
def conv(request: Request) -> KernelCall | None:
    """None for channels-first images, computed weights, unknown image sizes, other types, and depthwise ones."""
    node = request.node
    weight = request.constant(1)
    windows = windows_of(node)
    if weight is None or windows is None or not is_covered(node):
        return None
    if is_depthwise(node, weight, windows) or is_winograd(request, weight, windows):
        return None
    if is_lined(request, weight, windows):
        return None
    if is_direct(node, weight):
        return None
    x, y, groups = _value(node, 0), node.output, int(attribute(node, "group"))
    element, columns = element_of(x.dtype, _value(node, 1).dtype), weight.shape[0] // groups
    channels = in_words(weight.shape[1], element) if element is not None else None
    if element is None or not isinstance(channels, int):
        return None
    wide = element in (F32, F16)  # as words of one number
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
    lines = in_lines(request)
    fill = word_of(attribute(node, "pad_value"), element) if node.op == "FusedConv" else 0
    full = ConvSpec(x.shape[0], windows, groups, channels, columns, finish, False, tile, element, fill, pair)
    short = channels < _FEW_CHANNELS and windows[-1].dilation == 1 and not full.has_whole_rows
    if single and short:
        full = dataclasses.replace(full, gathers=True)
    return call(full, (In(0), pack, *extras, Out(0), *_scratch(full, request.cpu)), strided=lines)


@covers("FusedConv", "Conv")
def pointwise(request: Request) -> KernelCall | None:
    """A window of one place over an image whose size is not a number, as where the batch is one of its axes."""
    node, weight = request.node, request.constant(1)
    if weight is None or not has_plannable_types(node) or not is_covered(node) or windows_of(node) is not None:
        return None
    x = _value(node, 0)
    if set(weight.shape[2:]) != {1} or x.shape[:-1] != node.output.shape[:-1] or int(attribute(node, "group")) != 1:
        return None
    element = element_of(x.dtype, _value(node, 1).dtype)
    channels = in_words(weight.shape[1], element) if element is not None else None
    return _product(request, weight, element, channels) if element is not None and isinstance(channels, int) else None


@covers("FusedConv", "Conv")
def sized(request: Request) -> KernelCall | None:
    """Images whose extents are sizes of a table, with explicit padding."""
    node, weight = request.node, request.constant(1)
    if weight is None or not has_plannable_types(node) or not is_covered(node):
        return None
    x, y, groups = _value(node, 0), node.output, int(attribute(node, "group"))
    image, results = x.shape[1:-1], y.shape[1:-1]
    pads = conv_pads(Infer(registry.get(node.op), node, {}))
    known = all(isinstance(dim, int) or is_sized(dim) for dim in (*image, *results))
    if pads is None or not known or not any(map(is_sized, image)) or x.dtype is not F32:
        return None
    strides, dilations = (attribute(node, name) or (1,) * len(image) for name in ("strides", "dilations"))
    facts = zip(weight.shape[2:], strides, dilations, pads, strict=True)
    windows = tuple(Window(0, 0, kernel, stride, dilation, *pad) for kernel, stride, dilation, pad in facts)
    columns, channels = weight.shape[0] // groups, weight.shape[1]
    pair = groups_per_vector(groups, channels, columns, request.cpu)
    groups, channels, columns = groups // pair, channels * pair, columns * pair
    finish, tile = finish_of(node, request), choose_tile(request.cpu, product(y.shape[:-1]), columns, request.rank)
    pack = partial(_pack, groups=groups, tile=tile, element=F32)
    fill = word_of(attribute(node, "pad_value"), F32) if node.op == "FusedConv" else 0
    spec = SizedConvSpec(
        x.shape[0], windows, groups, channels, columns, finish, False, tile, F32, fill, pair, image, results
    )
    weights = Packed(1, f"conv{tile.columns}x{tile.lanes}g{groups}{F32}", pack)
    extras = [In(i) for i in extra_indices(node)]
    return KernelCall(
        spec, (In(0), weights, *extras, Out(0), *_scratch(spec, request.cpu)),
        inplace=() if finish.deferred else inplace_extras(node),
        flops=y.tensor.size * (2 * weight[0].size),
        bytes=traffic(node),
        strided=in_lines(request),
    )  # fmt: skip


def _product(request: Request, weight: Array, element: DType, channels: int) -> KernelCall | None:
    """A 1x1 convolution as a product; None where pixels do not lie one step apart. `channels` counts words."""
    node, columns, wide = request.node, len(weight), element in (F32, F16)
    pitch = request.pitch(_value(node, 0))
    if pitch is None:
        return None
    tile = choose_tile(request.cpu, prod(node.output.shape[:-1]), columns, request.rank)
    pack = Packed(
        1, f"conv{tile.columns}x{tile.lanes}g1{element}", partial(_pack, groups=1, tile=tile, element=element)
    )
    finish, lines = finish_of(node, request), in_lines(request)
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
    """How many groups a vector holds side by side, where they are narrow and have as many channels in as out."""
    count = target.lanes // columns
    fits = channels == columns > 1 and target.lanes % columns == 0 and groups % max(count, 1) == 0
    return count if fits else 1


def _pointwise(finish: Finish, channels: int, columns: int, step: Dim, tile: Tile, element: DType) -> GemmSpec:
    """A 1x1 convolution is a matrix product over pixels, which lie `step` words apart."""
    extents = finish.pixels.extents
    dense = row_major(extents)
    strides = (tuple(s * step for s in dense), (0,) * len(extents), *finish.pixels.strides)
    nest = Nest(extents, strides).collapsed()
    return GemmSpec(
        nest, channels, columns, 1, (columns, 1), finish.extra_steps, 1, True, finish.epilogue,
        finish.extra_dtypes, finish.dtype, tile, element,
    )  # fmt: skip


def _scratch(spec: ConvSpec, target: Target) -> tuple[Scratch, ...]:
    """For windows, for runs that must be widened, and for sums that wait."""
    widened, stage = spec.widened_words * WORD_BYTES, stage_bytes(spec.tile) if spec.finish.staged else 0
    return tuple(Scratch(nbytes) for nbytes in (_scratch_bytes(spec, target), widened, stage) if nbytes)


def _scratch_bytes(spec: ConvSpec, target: Target) -> int:
    """Gathered windows of a tile; or the table of runs, and one of zeros."""
    if spec.gathers:
        return spec.tile.rows * spec.row_elements * F32.itemsize
    zeros = -(-spec.run // spec.tile.lanes) * target.vector_bytes
    return spec.runs * table_lanes(spec.tile) * _POINTER_BYTES + zeros


def table_lanes(tile: Tile) -> int:
    """Entries per run in the table: the tile's rows, rounded up to a power of two."""
    return 1 << max(tile.rows - 1, 1).bit_length()


def _pack(weight: Array, groups: int, tile: Tile, element: DType) -> Array:
    """[O, I/groups, K...] as panels of [(K..., I/groups), O/groups] per group. Fewer groups: several side by side."""
    columns = weight.shape[0] // groups
    last = np.moveaxis(weight, 1, -1).reshape(groups, columns, -1)
    return pack_panels(pack_words(np.swapaxes(last, 1, 2), element), tile)


def is_covered(node: Node) -> bool:
    """Whether the node is a channels-last convolution of float32 or words whose epilogue can be generated."""
    epilogue = node.attrs.get("epilogue")
    if epilogue is not None and not (isinstance(epilogue, Graph) and bodies.is_scalar(epilogue)):
        return False
    return attribute(node, "layout") == "NHWC" and element_of(_value(node, 0).dtype, _value(node, 1).dtype) is not None


def has_long_epilogue(node: Node) -> bool:
    """Whether what happens to a sum, the bias first, is deferred or staged."""
    body, bias = node.attrs.get("epilogue"), node.input(2)
    return (bodies.cost(body) if isinstance(body, Graph) else 0) + (bias is not None) > SHORT_EPILOGUE


def is_depthwise(node: Node, weight: Array, windows: tuple[Window, ...]) -> bool:
    """Whether every channel is convolved for itself, over one or two axes: see `core.kernels.catalog.depthwise`."""
    groups = int(attribute(node, "group"))
    return len(windows) <= 2 and groups > 1 and weight.shape[:2] == (groups, 1)


def is_winograd(request: Request, weight: Array, windows: tuple[Window, ...]) -> bool:
    """Whether Winograd's algorithm wins (`core.kernels.catalog.winograd`): many tiles, whole vectors of channels.

    Its weights take two to four times the room, which very small images do not repay.
    """
    node, target = request.node, request.cpu
    columns, channels = weight.shape[:2]
    if not request.winograd or len(windows) != 2 or _value(node, 0).dtype.is_integer:
        return False
    strides = ({1}, {2}) if _value(node, 0).dtype in (F32, F16) else ({1},)
    shaped = all((w.kernel, w.dilation) == (3, 1) and w.count >= _WINOGRAD_SIZE for w in windows)
    shaped = shaped and {w.stride for w in windows} in strides
    whole = channels % target.lanes == 0 and columns % target.lanes == 0 and min(channels, columns) >= 32
    suits = shaped and whole and int(attribute(node, "group")) == 1 and target.lanes >= 8
    return suits and is_covered(node)


def is_lined(request: Request, weight: Array, windows: tuple[Window, ...]) -> bool:
    """Whether Winograd's algorithm along one axis wins (`core.kernels.catalog.winograd_lines`): windows of 7 lines at a
    stride of 2, few channels, whole vectors of results."""
    node, target = request.node, request.cpu
    columns, channels = weight.shape[:2]
    shaped = len(windows) == 2 and all((w.kernel, w.stride, w.dilation) == (7, 2, 1) for w in windows)
    whole = columns % target.lanes == 0 and columns >= 2 * target.lanes and channels < _FEW_CHANNELS
    suits = shaped and whole and int(attribute(node, "group")) == 1 and windows[0].count >= _WINOGRAD_SIZE
    if not (request.winograd and suits and is_covered(node) and target.lanes >= 8):
        return False
    return _value(node, 0).dtype is F32 and not has_long_epilogue(node)


def is_direct(node: Node, weight: Array) -> bool:
    """Whether vectors go along the lines of an image (`core.kernels.catalog.direct`): few channels on both sides, and
    an epilogue that is short and treats all pixels alike."""
    if not has_few_channels(NodeView(registry.get(node.op), node), weight.shape) or not is_covered(node):
        return False
    extras = [_value(node, i).shape for i in extra_indices(node)]
    alike = all(extent == 1 for shape in extras for extent in shape[:-1])
    if _value(node, 0).dtype is not F32 or node.output.dtype is not F32:
        return False
    return alike and (node.op == "PooledConv" or not has_long_epilogue(node))


def windows_of(node: Node) -> tuple[Window, ...] | None:
    """The window's way along every spatial axis; None when an image size is not a number."""
    x, w = node.inputs[0], node.inputs[1]
    if x is None or w is None or not has_plannable_types(node) or attribute(node, "layout") != "NHWC":
        return None
    return windows_along(node, x.shape[1:-1], node.output.shape[1:-1], w.shape[2:])


def windows_along(
    node: Node, sizes: Sequence[Dim], counts: Sequence[Dim], kernels: Sequence[Dim]
) -> tuple[Window, ...] | None:
    """The window's way along axes of these sizes; None when one is not a number."""
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
    """The inputs that the epilogue reads: the bias, then the extras."""
    return [i for i, value in enumerate(node.inputs) if i >= 2 and value is not None]


def in_lines(request: Request) -> tuple[In | Out, ...]:
    """The output and what its epilogue reads, if the channels of each are neighbours: then pixels may lie anywhere."""
    node = request.node
    values = [node.output, *(_value(node, i) for i in extra_indices(node))]
    even = all(value.shape[-1:] == (1,) or request.strides_of(value)[-1:] in ((), (1,)) for value in values)
    return (*(In(i) for i in extra_indices(node)), Out(0)) if even else ()


def finish_of(node: Node, request: Request | None = None) -> Finish:
    """The epilogue with the bias as its first extra input. `request` says which operands lie inside other tensors."""
    values = [_value(node, i) for i in extra_indices(node)]
    shape, inside = node.output.shape, request.strides if request is not None else {}
    strides = [broadcast_strides(value.shape, shape, inside.get(value)) for value in values]
    y = inside.get(node.output, row_major(shape))
    pixels = Nest(shape[:-1], (*(s[:-1] for s in strides), y[:-1])).collapsed()
    body = node.attrs.get("epilogue")
    epilogue = body if isinstance(body, Graph) else None
    bias = node.input(2)
    if bias is not None:
        epilogue = with_bias(epilogue, bias.dtype)
    return Finish(
        bodies.canonical(epilogue, {}) if epilogue is not None else None,
        pixels, tuple(int(bool(s[-1])) for s in strides), tuple(value.dtype for value in values), node.output.dtype,
    )  # fmt: skip


def with_bias(body: Graph | None, dtype: DType) -> Graph:
    """A body that first adds its second input."""
    scalar = TensorType(dtype, ())
    value, bias = Value("x", scalar), Value("bias", scalar)
    node = Node("Add", [value, bias], [])
    node.outputs = [Value("biased", scalar, node)]
    if body is None:
        return Graph("body", [value, bias], [node.output], [node])
    copy = body.clone()
    first, *rest = copy.inputs
    copy.replace_uses({first: node.output})
    copy.inputs = [value, bias, *rest]
    copy.nodes.insert(0, node)
    return copy


def inplace_extras(node: Node) -> tuple[int, ...]:
    """Extras that have the output's shape: each element is read right before the result takes its place."""
    y = node.output
    return tuple(
        i
        for i in extra_indices(node)
        if i > 2 and (value := _value(node, i)).shape == y.shape and value.dtype.itemsize == y.dtype.itemsize
    )


def _value(node: Node, index: int) -> Value:
    value = node.inputs[index]
    if value is None:
        raise ValueError(f"{node} has no input {index}")
    return value
