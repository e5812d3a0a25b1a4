"""3x3 convolutions by Winograd's algorithm (Lavin and Gray, 2015).

F(4x4, 3x3) takes a quarter of the multiplications of the definition. F(2x2, 3x3), for small images, takes four ninths
and has less than half as many weights. Convolutions of stride 2 take 25 of 36.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from itertools import product as pairs
from math import ceil, prod
from typing import ClassVar, TypeAlias

import numpy as np

from lathe.core.ir.dim import product
from lathe.core.ir.graph import Array
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Packed, Request, Scratch
from lathe.core.kernels.conv.spec import (
    F16,
    F32,
    Finish,
    extra_indices,
    finish_of,
    inplace_extras,
    is_covered,
    strided_operands,
    windows_of,
)
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.nest import traffic
from lathe.core.kernels.shared.panels import LINE, Tile, choose_tile, pack_panels, packed_size
from lathe.core.kernels.shared.window import Window
from lathe.core.kernels.shared.words import WORD_BYTES, elements_per_word, pack_words, word_dtype
from lathe.core.kernels.target import Target

Matrix: TypeAlias = tuple[tuple[float, ...], ...]

_BLOCK = 32  # tiles of a task: few enough that both intermediates stay in the cache, enough to reuse the weights
_FAR_BYTES = 16 << 20  # weights of this size do not fit the last-level cache beside other data: more tiles share them
_LARGE_IMAGE = 12  # results along an axis, from which an image has enough large tiles with little padding
_INPUTS_AT_ONCE = 128  # input channels packed together: more leave the cache, fewer make many small copies
LEAST_RESULTS = 6  # along an axis; with fewer, tiles at the border waste what the algorithm saves
_PER_BYTE = 10  # operations in the time of reading a byte from memory; 10 to 16 on servers


@dataclass(frozen=True)
class Form:
    """F(output, taps) along an axis: polynomials evaluated at `points` and at infinity (Toom and Cook).

    Most points other than 0 come in pairs p and -p, which lets transforms share sums.

    A stride of 2 takes two convolutions of half the image: the even places of the image with every other tap from the
    first on, and the odd places with the other taps. The second has one tap fewer and needs no value at infinity. The
    two are added before the inverse transform: at a finite point they form one product of twice the depth.
    """

    output: int  # results of a tile along an axis
    points: tuple[float, ...]
    stride: int = 1
    taps: int = 3
    whole: Form | None = None  # see `part`

    def part(self, output: int) -> Form:
        """The form of `output` results with the first of these points, whose `whole` is this form.

        It uses a subset of this form's weights unchanged.
        """
        return replace(self, output=output, points=self.points[: output + self.taps - 2], whole=self)

    @property
    def infinity(self) -> int:
        """The index of infinity among the evaluations of the packed weights."""
        return len((self.whole or self).points)

    def scale(self, point: float) -> float:
        """The factor of a point in the inverse transform: 1 unless this form is a part of another.

        The weights of a part are scaled for the whole form.
        """
        return self.whole.own(point) / self.own(point) if self.whole is not None else 1.0

    @property
    def input(self) -> int:
        """Places of the image that a tile needs along an axis."""
        return (self.output - 1) * self.stride + self.taps

    @property
    def evaluations(self) -> int:
        """The number of points, infinity included."""
        return len(self.points) + 1

    @property
    def line_products(self) -> int:
        """The number of multiplications of a tile along one axis."""
        return len(self.points) * self.stride + 1

    @property
    def products(self) -> int:
        """The number of multiplications of a tile along two axes."""
        return self.line_products**2

    @property
    def groups(self) -> tuple[tuple[float, ...], ...]:
        """The points, with p and -p in one group."""
        paired = [point for point in self.points if point and -point in self.points]
        return tuple((p, -p) if p in paired else (p,) for p in self.points if p not in paired or p > 0)

    def parts(self, evaluation: int) -> int:
        """The number of parts of the image with a value at an evaluation: all `stride` parts, or 1 at infinity."""
        return self.stride if evaluation < len(self.points) else 1

    @property
    def image(self) -> Matrix:
        """The transform of a line of one image part, [evaluations, evaluations]; the constant coefficient comes first.

        The row of a point holds the monic polynomial that is 0 at all other finite points. The last row, for infinity,
        holds the one that is 0 at all finite points.
        """
        rows = [(*with_zeros(self._others(p)), 0.0) for p in self.points]
        return (*rows, with_zeros(self.points))

    @property
    def result(self) -> Matrix:
        """The inverse transform of a line of products, [output, evaluations]: row i holds the powers p**i, scaled.

        The last column, for infinity, is 1 in the last row and 0 in the others.
        """
        last = self.output - 1
        return tuple((*(p**i * self.scale(p) for p in self.points), float(i == last)) for i in range(self.output))

    @property
    def weight(self) -> Matrix:
        """The transform of a line of weights, [line_products, taps]: a row per point and part of the image.

        Each row is divided by the value of its point's polynomial at that point. The last row, for infinity, takes the
        last tap.
        """
        last = (*(0.0 for _ in range(self.taps - 1)), 1.0)
        return (*(self._weight(p, part) for p in self.points for part in range(self.stride)), last)

    def _weight(self, point: float, part: int) -> tuple[float, ...]:
        own, taps = (self.whole or self).own(point), range(part, self.taps, self.stride)
        return tuple(point ** taps.index(i) / own if i in taps else 0.0 for i in range(self.taps))

    def own(self, point: float) -> float:
        """The value at `point` of the monic polynomial that is 0 at all other finite points."""
        return float(np.prod([point - other for other in self._others(point)]))

    def _others(self, point: float) -> list[float]:
        return [other for other in self.points if other != point]


# For 3x3, along both axes. The first point is 0, see `Cover`.
LARGE = Form(4, (0.0, 5 / 8, -5 / 8, 3 / 2, -3 / 2))  # of simple points these have the smallest rounding errors
SMALL = Form(2, (0.0, 1.0, -1.0))
PART = LARGE.part(SMALL.output)
STRIDED = Form(2, (0.0, 1.0), 2)  # larger forms save little more and need two to three times the weights


def with_zeros(points: Sequence[float]) -> tuple[float, ...]:
    """The coefficients of the monic polynomial with these zeros, the constant coefficient first."""
    return tuple(float(c) for c in np.poly(points)[::-1])


@dataclass(frozen=True)
class Cover:
    """Tiles of `output` results along an axis of `count` results. The last tiles may be short: without a first result.

    Only that result needs the value at the point 0, so a short tile takes fewer products. There is one short tile for
    each result that would otherwise lie beyond the image, but at most all tiles are short.
    """

    count: int
    output: int

    @property
    def tiles(self) -> int:
        """The number of tiles along the axis."""
        return -(-self.count // self.output)

    @property
    def short(self) -> int:
        """The number of short tiles."""
        return min(self.tiles * self.output - self.count, self.tiles)

    @property
    def whole(self) -> int:
        """The number of tiles that are not short."""
        return self.tiles - self.short


@dataclass(frozen=True)
class WinogradSpec(KernelSpec):
    """A task transforms up to `block` tiles of the image, multiplies, and transforms back, all in its scratch.

    `element` is the type of the image, and of the products unless it is float16: then transformed values and weights
    are float32. Batches of fewer than `many` images use the smaller form `part`, if there is one: it multiplies more
    but reads fewer weights, which take most of the time in small batches.
    """

    family: ClassVar[str] = "winograd"
    generator: ClassVar[str] = "winograd.cpu"
    batch: Dim
    windows: tuple[Window, Window]
    channels: int
    columns: int
    finish: Finish
    tile: Tile
    block: int
    form: Form
    element: DType = DType.FLOAT32
    part: Form | None = None
    many: int = 0

    @property
    def small_batch_spec(self) -> WinogradSpec | None:
        """The spec for batches of fewer than `many` images; None if there is no `part`."""
        return replace(self, form=self.part, part=None) if self.part is not None else None

    @property
    def depth(self) -> int:
        """The number of channels in words."""
        return self.channels // elements_per_word(self.element)

    @property
    def covers(self) -> tuple[Cover, Cover]:
        """How tiles cover the results of an image: a `Cover` of its lines, then one of its columns."""
        lines, columns = (Cover(window.count, self.form.output) for window in self.windows)
        return lines, columns

    @property
    def tiles(self) -> Dim:
        """The number of tiles in the whole batch."""
        return self.batch * product(axis.tiles for axis in self.covers)

    @property
    def matrices(self) -> int:
        """The number of matrix products: one for each pair of evaluations."""
        return self.form.evaluations**2

    @property
    def row_words(self) -> int:
        """Words of the values of a tile at a pair of points: [parts][depth].

        With several parts a cache line is added, so that rows do not map to the same sets of the first-level cache.
        """
        parts = self.form.stride**2
        return parts * self.depth + (LINE if parts > 1 else 0)

    @property
    def group(self) -> int:
        """The number of tiles whose intermediates lie together, [group][matrix][tile].

        All tiles of a block if an image fills it, otherwise those of a register tile, so that few images touch little
        memory.
        """
        return self.block if prod(axis.tiles for axis in self.covers) >= self.block else self.tile.rows

    @property
    def input_step(self) -> int:
        """Words between matrices of transformed inputs: [group][row_words] and a cache line (see `row_words`)."""
        return self.group * self.row_words + LINE

    @property
    def output_step(self) -> int:
        """Words between matrices of products: [group][columns] and a cache line."""
        return self.group * self.columns + LINE

    @property
    def weight_bytes(self) -> int:
        return _weight_bytes(self.form, self.channels, self.columns)

    @property
    def tiles_ahead(self) -> int:
        """The number of row tiles that share the prefetch of the next panel, at most those of a block.

        They are the tiles of one image, or of 2 * `many` images if there is a `part`.
        """
        tiles = prod(axis.tiles for axis in self.covers)
        rows = tiles * max(2 * self.many, 1) if self.part is not None else tiles
        return max(min(rows, self.block) // self.tile.rows, 1)

    @property
    def table_lanes(self) -> int:
        """Entries per line in the table of places: those of a tile, rounded up to a power of two."""
        return 1 << (self.form.input - 1).bit_length()

    @property
    def stage_words(self) -> int:
        """Words for a vector of results per place of a tile, if the epilogue is long; otherwise 0."""
        return self.form.output**2 * self.tile.lanes if self.finish.deferred or self.finish.staged else 0

    @property
    def scratch_words(self) -> int:
        """Words of scratch: both intermediates, staged results, the table of places, and a pixel of zeros."""
        table = 2 * self.form.input * self.table_lanes  # of int64
        groups = self.block // self.group
        own = groups * self.matrices * (self.input_step + self.output_step) + self.stage_words + table + self.depth
        return max(own, self.small_batch_spec.scratch_words) if self.small_batch_spec is not None else own

    @property
    def summary(self) -> str:
        kind = "" if self.element is DType.FLOAT32 else f"{self.element} "
        strided = "" if self.form.stride == 1 else f" by {self.form.stride}"
        size = f"{self.form.output}x{self.form.output}"
        if self.part is not None:
            size += f" from n = {self.many}, {self.part.output}x{self.part.output} below by the same weights,"
        return f"conv {kind}3x3{strided} winograd {size} {self.tile}"


def winograd(request: Request) -> KernelCall | None:
    """Selector of channels-last 3x3 Conv and FusedConv of floats with constant weights: Winograd's algorithm.

    The stride is 1, or 2 for float32 and float16. There is no dilation and no group; at least 32 input and 32 output
    channels fill whole vectors of at least 8 floats, and there are at least 6 results along each axis. None for other
    nodes, if an extent is not a number, and if the request demands the definition (`winograd` False): see
    `suits_winograd`.
    """
    return _call(request)


def suits_winograd(request: Request, weight: Array, windows: tuple[Window, ...]) -> bool:
    """Whether Winograd's algorithm applies and is expected to win.

    It applies to 3x3 windows without dilation or groups, of stride 1, or 2 for float32 and float16. It is expected to
    win if there are at least 6 results along each axis (`LEAST_RESULTS`), at least 32 input and 32 output channels,
    both in whole vectors, and if a vector has at least 8 floats. Its weights are two to four times as large, which does
    not pay for very small images.
    """
    node, target = request.node, request.cpu
    columns, channels = weight.shape[:2]
    if not request.winograd or len(windows) != 2 or node.required_input(0).dtype.is_integer:
        return False
    strides = ({1}, {2}) if node.required_input(0).dtype in (F32, F16) else ({1},)
    shaped = all((w.kernel, w.dilation) == (3, 1) and w.count >= LEAST_RESULTS for w in windows)
    shaped = shaped and {w.stride for w in windows} in strides
    whole = channels % target.lanes == 0 and columns % target.lanes == 0 and min(channels, columns) >= 32
    suits = shaped and whole and int(attribute(node, "group")) == 1 and target.lanes >= 8
    return suits and is_covered(node)


def _call(request: Request, slow: bool = False) -> KernelCall | None:
    """The call of the kernel; None unless `suits_winograd` is true.

    `slow` is for machines on which reads beyond the second-level cache are slow. Then more tiles share the weights, and
    small batches use the part of the form for large images too.
    """
    node, weight, windows = request.node, request.constant(1), windows_of(request.node)
    if weight is None or windows is None or not suits_winograd(request, weight, windows):
        return None
    columns, channels = weight.shape[:2]
    batch, finish = node.output.shape[0], finish_of(node, request)
    (lines, places), element = windows, node.inputs[0].dtype if node.inputs[0] is not None else DType.FLOAT32
    form, many = _form(batch, (lines, places), element, slow)
    tile = _tile(request.cpu, channels * form.stride**2, columns)
    far = _weight_bytes(form, channels, columns) >= _FAR_BYTES
    block = (_BLOCK << (far + slow)) // tile.rows * tile.rows
    part = PART if many > 1 else None
    spec = WinogradSpec(batch, (lines, places), channels, columns, finish, tile, block, form, element, part, many)
    key = f"winograd{form.output}s{form.stride}x{tile.columns}x{tile.lanes}{element}"
    nbytes = packed_size(form.products * channels, columns, tile) * WORD_BYTES if element is DType.FLOAT32 else None
    pack_weights = Packed(1, key, partial(pack, tile=tile, form=form, element=element), nbytes)
    return KernelCall(
        spec,
        (
            In(0),
            pack_weights,
            *(In(i) for i in extra_indices(node)),
            Out(0),
            Scratch(spec.scratch_words * WORD_BYTES),
        ),
        inplace=inplace_extras(node),
        strided=strided_operands(request),
        flops=node.output.tensor.size * (2 * weight[0].size),
        bytes=traffic(node),
    )


def _weight_bytes(form: Form, channels: int, columns: int) -> int:
    return form.products * channels * columns * WORD_BYTES


def _tile(target: Target, depth: int, columns: int) -> Tile:
    """The register tile: 8 x 3 vectors if panels exceed the first-level cache, since it reads them less often."""
    tile = choose_tile(target, _BLOCK, columns)
    far = depth * tile.columns * WORD_BYTES > target.l1_bytes
    return Tile(8, 3, target.lanes) if far and target.registers >= 32 and tile.vectors > 3 else tile


def _form(batch: Dim, windows: tuple[Window, Window], element: DType, slow: bool) -> tuple[Form, int]:
    """The form for the windows, and the number of images from which it pays (0: always).

    If that is above 1, smaller batches should use `PART`.

    The large form multiplies least. In bfloat16 its rounding errors would be four times those of the definition. Small
    images need a larger batch before the large form's weights pay.
    """
    if windows[0].stride == STRIDED.stride:
        return STRIDED, 0
    if element is DType.BFLOAT16:
        return SMALL, 0
    if all(window.count >= _LARGE_IMAGE for window in windows) and not slow:
        return LARGE, 0
    many = _least_images(windows)
    if isinstance(batch, int):
        return (LARGE, 0) if batch >= many else (SMALL, 0)
    return LARGE, many


def _least_images(windows: tuple[Window, Window]) -> int:
    """The number of images from which the operations that the large form saves outweigh reading its further weights.

    Both count per input and output channel, so the number of channels cancels out.
    """
    saved = 2 * (_products(windows, PART) - _products(windows, LARGE))
    further = WORD_BYTES * (LARGE.products - PART.products)
    return max(ceil(_PER_BYTE * further / saved), 1)


def _products(windows: tuple[Window, Window], form: Form) -> int:
    """The number of multiplications of an image per input and output channel, where short tiles take fewer."""
    covers = (Cover(window.count, form.output) for window in windows)
    return prod(cover.tiles * form.line_products - cover.short for cover in covers)


def for_slow_memory(request: Request) -> Iterator[KernelCall]:
    """Offer of the kernel for slow memory, for convolutions of `winograd` whose weights exceed the second-level cache.

    No offers for other nodes.
    """
    call = _call(request, slow=True)
    if call is not None and isinstance(call.spec, WinogradSpec) and call.spec.weight_bytes > request.cpu.l2_bytes:
        yield call


def without_winograd(request: Request) -> Iterator[KernelCall]:
    """Offer of the kernel that would run without Winograd's algorithm, if there is one.

    On machines with slow memory the larger weights may not pay. If that kernel is preferred anyway, `choose.candidates`
    drops the repetition.
    """
    plain = request.select_with(winograd=False)
    if plain is not None:
        yield plain


def pack(weight: Array, tile: Tile, form: Form = LARGE, element: DType = DType.FLOAT32) -> Array:
    """[O, I, 3, 3] as panels of the transformed matrices [parts * I, O], one matrix for each pair of points.

    It works panel by panel, some input channels at a time, so that the transformed weights are still in the cache when
    they are copied to their places.
    """
    outputs, inputs = weight.shape[:2]
    both = np.kron(form.weight, form.weight)  # the transform of rows and of columns in one product
    multiplied = word_dtype(element) if element.is_float and elements_per_word(element) == 1 else element
    spans = list(pairs(_spans(form), repeat=2))
    depths = [-(-len(rows) * len(columns) * inputs // elements_per_word(multiplied)) for rows, columns in spans]
    sizes = [packed_size(depth, outputs, tile) for depth in depths]
    packed = np.empty(sum(sizes), word_dtype(element).numpy)
    at_once = _INPUTS_AT_ONCE if elements_per_word(multiplied) == 1 else inputs  # otherwise words hold several inputs
    for first in range(0, outputs, tile.columns):
        panel = weight[first : first + tile.columns].reshape(-1, inputs, 9).transpose(2, 1, 0)
        for low in range(0, inputs, at_once):
            some = panel[:, low : low + at_once].astype(np.float64, order="C")
            lines = (both @ some.reshape(9, -1)).reshape(form.line_products, form.line_products, *some.shape[1:])
            for start, depth, (rows, columns) in zip(accumulate(sizes, initial=0), depths, spans, strict=False):
                part = lines[rows.start : rows.stop, columns.start : columns.stop]
                whole = packed[start + depth * first :][: packed_size(depth, panel.shape[2], tile)]
                if elements_per_word(multiplied) == 1:
                    _copy_rows(part, whole.reshape(*part.shape[:2], inputs, -1)[:, :, low : low + at_once])
                else:
                    words = pack_words(part.astype(np.float32).reshape(-1, panel.shape[2]), multiplied)
                    whole[:] = pack_panels(words, tile)
    return packed


def _copy_rows(lines: Array, place: Array) -> None:
    """Copy `lines` [..., rows, columns] into the rows of the panel `place`, and pad these with zeros."""
    width = lines.shape[-1]
    place[..., :width] = lines
    place[..., width:] = 0


def _spans(form: Form) -> list[range]:
    """The indices of the rows of `form.weight` that belong to each evaluation: one per part, or one at infinity."""
    starts = [min(i * form.stride, form.line_products) for i in range(form.evaluations + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
