"""3x3 convolutions by Winograd's algorithm (Lavin and Gray, 2015): F(4x4, 3x3) takes a quarter of the multiplications,
F(2x2, 3x3) for small images four ninths, with less than half the weights. Those of stride 2 take 25 of 36."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from itertools import product as pairs
from math import ceil, prod
from typing import ClassVar, TypeAlias

import numpy as np

from core.ir.dim import product
from core.ir.graph import Array
from core.ir.types import Dim, DType
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Out, Packed, Request, Scratch, covers, offers, select
from core.kernels.catalog.conv import (
    Finish,
    extra_indices,
    finish_of,
    in_lines,
    inplace_extras,
    is_winograd,
    windows_of,
)
from core.kernels.catalog.nest import traffic
from core.kernels.catalog.panels import LINE, Tile, choose_tile, pack_panels, packed_size
from core.kernels.catalog.pool import Window
from core.kernels.catalog.words import WORD_BYTES, pack_words, per_word, word_dtype
from core.kernels.target import Target

Matrix: TypeAlias = tuple[tuple[float, ...], ...]

_BLOCK = 32  # tiles of a task: few enough that both intermediates stay near, enough to use the weights well
_FAR_BYTES = 16 << 20  # weights that the last-level cache does not hold beside the rest: more tiles must share them
_LARGE_IMAGE = 12  # results along an axis from which large tiles cover an image well and are many
_INPUTS_AT_ONCE = 128  # that weights are transformed of: more leave the cache, fewer make many small copies
_PER_BYTE = 10  # operations in the time of reading a byte from memory; 10 to 16 on servers


@dataclass(frozen=True)
class Form:
    """F(output, taps) along an axis by evaluating at `points` and at infinity (Toom and Cook). Most points but 0 come
    in pairs of either sign, which lets transforms share sums.

    A stride of 2 takes two convolutions of half the image: its even places by every other tap from the first on, and
    its odd ones by the others, which are one tap less and need no infinity. They are added before the transform back:
    at a finite point both make one product of twice the depth.
    """

    output: int  # results of a tile along an axis
    points: tuple[float, ...]
    stride: int = 1
    taps: int = 3
    whole: Form | None = None  # see `part`

    def part(self, output: int) -> Form:
        """The smaller form of the first points, which multiplies by some of this one's weights as they are."""
        return replace(self, output=output, points=self.points[: output + self.taps - 2], whole=self)

    @property
    def infinity(self) -> int:
        """The place of infinity among the evaluations that weights lie in."""
        return len((self.whole or self).points)

    def scale(self, point: float) -> float:
        """What makes up for weights that were divided by what the whole form's polynomials are at a point."""
        return self.whole.own(point) / self.own(point) if self.whole is not None else 1.0

    @property
    def input(self) -> int:
        """Places of the image that they need."""
        return (self.output - 1) * self.stride + self.taps

    @property
    def evaluations(self) -> int:
        """Points, with infinity."""
        return len(self.points) + 1

    @property
    def line_products(self) -> int:
        """Multiplications of a tile along an axis."""
        return len(self.points) * self.stride + 1

    @property
    def products(self) -> int:
        """The same along two axes."""
        return self.line_products**2

    @property
    def groups(self) -> tuple[tuple[float, ...], ...]:
        """The points, those of either sign together."""
        paired = [point for point in self.points if point and -point in self.points]
        return tuple((p, -p) if p in paired else (p,) for p in self.points if p not in paired or p > 0)

    def parts(self, evaluation: int) -> int:
        """How many of the `stride` parts of the image have a value there: infinity is needed by the first alone."""
        return self.stride if evaluation < len(self.points) else 1

    @property
    def image(self) -> Matrix:
        """The transform of a line of a part of the image: row p holds the polynomial with zeros at all other points."""
        rows = [(*with_zeros(self._others(p)), 0.0) for p in self.points]
        return (*rows, with_zeros(self.points))

    @property
    def result(self) -> Matrix:
        """The transform of a line of products: row i holds the powers p**i, scaled."""
        last = self.output - 1
        return tuple((*(p**i * self.scale(p) for p in self.points), float(i == last)) for i in range(self.output))

    @property
    def weight(self) -> Matrix:
        """The transform of a line of weights, a row per point and part of the image, divided by what the polynomials
        are at their own points."""
        last = (*(0.0 for _ in range(self.taps - 1)), 1.0)
        return (*(self._weight(p, part) for p in self.points for part in range(self.stride)), last)

    def _weight(self, point: float, part: int) -> tuple[float, ...]:
        own, taps = (self.whole or self).own(point), range(part, self.taps, self.stride)
        return tuple(point ** taps.index(i) / own if i in taps else 0.0 for i in range(self.taps))

    def own(self, point: float) -> float:
        """What the polynomial of a point is there."""
        return float(np.prod([point - other for other in self._others(point)]))

    def _others(self, point: float) -> list[float]:
        return [other for other in self.points if other != point]


# For 3x3, along both axes. The first point is 0, see `Cover`.
LARGE = Form(4, (0.0, 5 / 8, -5 / 8, 3 / 2, -3 / 2))  # among simple points these lose the least to rounding
SMALL = Form(2, (0.0, 1.0, -1.0))
PART = LARGE.part(SMALL.output)
STRIDED = Form(2, (0.0, 1.0), 2)  # larger ones save little more, and take two to three times the weights


def with_zeros(points: Sequence[float]) -> tuple[float, ...]:
    """The coefficients of the polynomial that has these zeros, the constant one first."""
    return tuple(float(c) for c in np.poly(points)[::-1])


@dataclass(frozen=True)
class Cover:
    """Tiles of `output` results along an axis of `count`. The last ones may be short: without their first result.

    That result alone needs the value at the point 0, so a short tile takes fewer products. They are as many as
    results would otherwise lie beyond the image.
    """

    count: int
    output: int

    @property
    def tiles(self) -> int:
        return -(-self.count // self.output)

    @property
    def short(self) -> int:
        return min(self.tiles * self.output - self.count, self.tiles)

    @property
    def whole(self) -> int:
        """Tiles that are not short."""
        return self.tiles - self.short


@dataclass(frozen=True)
class WinogradSpec(KernelSpec):
    """A task transforms up to `block` tiles of the image, multiplies, and transforms back, all in its scratch.

    `element` is the type of the image, and of what is multiplied unless that is float16: what transforms make of such
    numbers is float32, and so are the weights. Batches of fewer than `many` images take a part of the form instead, if
    there is one: it multiplies more, but reads fewer weights, which is what takes the time there.
    """

    family: ClassVar[str] = "winograd"
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
    def of_few(self) -> WinogradSpec | None:
        """What smaller batches run."""
        return replace(self, form=self.part, part=None) if self.part is not None else None

    @property
    def depth(self) -> int:
        """Channels in words."""
        return self.channels // per_word(self.element)

    @property
    def covers(self) -> tuple[Cover, Cover]:
        """How tiles cover the results of an image along its two axes."""
        lines, columns = (Cover(window.count, self.form.output) for window in self.windows)
        return lines, columns

    @property
    def tiles(self) -> Dim:
        return self.batch * product(axis.tiles for axis in self.covers)

    @property
    def matrices(self) -> int:
        """Matrix products: one for every two points."""
        return self.form.evaluations**2

    @property
    def row_words(self) -> int:
        """Room for the values of a tile at two points: [parts][depth], and a line where they are many, lest all rows
        meet in the same sets of the nearest cache."""
        parts = self.form.stride**2
        return parts * self.depth + (LINE if parts > 1 else 0)

    @property
    def group(self) -> int:
        """Tiles of a block whose intermediates lie together, [group][matrix][tile]: all of them where an image fills a
        block, otherwise those of a register tile, so that few images touch little memory."""
        return self.block if prod(axis.tiles for axis in self.covers) >= self.block else self.tile.rows

    @property
    def input_step(self) -> int:
        """Words from one matrix of such values to the next, [group][row_words], and a line for the same reason."""
        return self.group * self.row_words + LINE

    @property
    def output_step(self) -> int:
        """The same for the products."""
        return self.group * self.columns + LINE

    @property
    def weight_bytes(self) -> int:
        return _weight_bytes(self.form, self.channels, self.columns)

    @property
    def tiles_ahead(self) -> int:
        """Tiles of rows that share in fetching the next panel: those that a block has in small batches."""
        tiles = prod(axis.tiles for axis in self.covers)
        rows = tiles * max(2 * self.many, 1) if self.part is not None else tiles
        return max(min(rows, self.block) // self.tile.rows, 1)

    @property
    def table_lanes(self) -> int:
        """Entries of a line in the table of places: those of a tile, rounded up to a vector."""
        return 1 << (self.form.input - 1).bit_length()

    @property
    def stage_words(self) -> int:
        """Where a vector of results for every place of a tile waits for an epilogue that is long."""
        return self.form.output**2 * self.tile.lanes if self.finish.deferred or self.finish.staged else 0

    @property
    def scratch_words(self) -> int:
        """Both intermediates; results that wait; the table of places; a pixel of zeros."""
        table = 2 * self.form.input * self.table_lanes  # of int64
        groups = self.block // self.group
        own = groups * self.matrices * (self.input_step + self.output_step) + self.stage_words + table + self.depth
        return max(own, self.of_few.scratch_words) if self.of_few is not None else own

    @property
    def summary(self) -> str:
        kind = "" if self.element is DType.FLOAT32 else f"{self.element} "
        strided = "" if self.form.stride == 1 else f" by {self.form.stride}"
        size = f"{self.form.output}x{self.form.output}"
        if self.part is not None:
            size += f" from n = {self.many}, {self.part.output}x{self.part.output} below by the same weights,"
        return f"conv {kind}3x3{strided} winograd {size} {self.tile}"


@covers("FusedConv", "Conv")
def winograd(request: Request) -> KernelCall | None:
    """For the convolutions that `core.kernels.catalog.conv.is_winograd` picks."""
    return _call(request)


def _call(request: Request, slow: bool = False) -> KernelCall | None:
    """`slow`: for machines that read weights from beyond the second-level cache slowly. More tiles share them, and one
    image takes a part of the form also where it has as many tiles as suit the whole."""
    node, weight, windows = request.node, request.constant(1), windows_of(request.node)
    if weight is None or windows is None or not is_winograd(request, weight, windows):
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
        strided=in_lines(request),
        flops=node.output.tensor.size * (2 * weight[0].size),
        bytes=traffic(node),
    )


def _weight_bytes(form: Form, channels: int, columns: int) -> int:
    return form.products * channels * columns * WORD_BYTES


def _tile(target: Target, depth: int, columns: int) -> Tile:
    """Three vectors wide where panels do not fit the nearest cache: such a tile loads less of them per product."""
    tile = choose_tile(target, _BLOCK, columns)
    far = depth * tile.columns * WORD_BYTES > target.l1_bytes
    return Tile(8, 3, target.lanes) if far and target.registers >= 32 and tile.vectors > 3 else tile


def _form(batch: Dim, windows: tuple[Window, Window], element: DType, slow: bool) -> tuple[Form, int]:
    """The large form multiplies least; in bfloat16 it would lose four times as much to rounding as the definition.
    Small images need the more of them to repay its weights: the second result is how many, where that is left open."""
    if windows[0].stride == STRIDED.stride:
        return STRIDED, 0
    if element is DType.BFLOAT16:
        return SMALL, 0
    if all(window.count >= _LARGE_IMAGE for window in windows) and not slow:
        return LARGE, 0
    many = _many(windows)
    if isinstance(batch, int):
        return (LARGE, 0) if batch >= many else (SMALL, 0)
    return LARGE, many


def _many(windows: tuple[Window, Window]) -> int:
    """From how many images on the operations that the large form saves take longer than reading its further weights.

    Both count per input and output channel, so that it does not matter how many there are.
    """
    saved = 2 * (_products(windows, PART) - _products(windows, LARGE))
    further = WORD_BYTES * (LARGE.products - PART.products)
    return max(ceil(_PER_BYTE * further / saved), 1)


def _products(windows: tuple[Window, Window], form: Form) -> int:
    """Multiplications of an image, short tiles taken for what they are."""
    covers = (Cover(window.count, form.output) for window in windows)
    return prod(cover.tiles * form.line_products - cover.short for cover in covers)


@offers("FusedConv", "Conv")
def for_slow_memory(request: Request) -> Iterator[KernelCall]:
    """Where weights do not fit the second-level cache."""
    call = _call(request, slow=True)
    if call is not None and isinstance(call.spec, WinogradSpec) and call.spec.weight_bytes > request.cpu.l2_bytes:
        yield call


@offers("FusedConv", "Conv")
def by_definition(request: Request) -> Iterator[KernelCall]:
    """What would run without Winograd, in planes or along lines: on machines whose memory is slow, its larger weights
    may not pay. Where it runs anyway, the tuner knows it already."""
    plain = select(replace(request, winograd=False))
    if plain is not None:
        yield plain


def pack(weight: Array, tile: Tile, form: Form = LARGE, element: DType = DType.FLOAT32) -> Array:
    """[O, I, 3, 3] as panels of the transformed matrices [parts * I, O], one for every two points.

    A panel at a time, and of that some inputs: what the transform makes of them is still in the cache when it goes to
    its places.
    """
    outputs, inputs = weight.shape[:2]
    both = np.kron(form.weight, form.weight)  # the transform of rows and of columns in one product
    multiplied = word_dtype(element) if element.is_float and per_word(element) == 1 else element
    spans = list(pairs(_spans(form), repeat=2))
    depths = [-(-len(rows) * len(columns) * inputs // per_word(multiplied)) for rows, columns in spans]
    sizes = [packed_size(depth, outputs, tile) for depth in depths]
    packed = np.empty(sum(sizes), word_dtype(element).numpy)
    at_once = _INPUTS_AT_ONCE if per_word(multiplied) == 1 else inputs  # a word may hold some of several inputs
    for first in range(0, outputs, tile.columns):
        panel = weight[first : first + tile.columns].reshape(-1, inputs, 9).transpose(2, 1, 0)
        for low in range(0, inputs, at_once):
            some = panel[:, low : low + at_once].astype(np.float64, order="C")
            lines = (both @ some.reshape(9, -1)).reshape(form.line_products, form.line_products, *some.shape[1:])
            for start, depth, (rows, columns) in zip(accumulate(sizes, initial=0), depths, spans, strict=False):
                part = lines[rows.start : rows.stop, columns.start : columns.stop]
                whole = packed[start + depth * first :][: packed_size(depth, panel.shape[2], tile)]
                if per_word(multiplied) == 1:
                    _put(part, whole.reshape(*part.shape[:2], inputs, -1)[:, :, low : low + at_once])
                else:
                    words = pack_words(part.astype(np.float32).reshape(-1, panel.shape[2]), multiplied)
                    whole[:] = pack_panels(words, tile)
    return packed


def _put(lines: Array, place: Array) -> None:
    """Rows into those of a panel, which may be longer."""
    width = lines.shape[-1]
    place[..., :width] = lines
    place[..., width:] = 0


def _spans(form: Form) -> list[range]:
    """The rows of the transform of weights that belong to each point."""
    starts = [min(i * form.stride, form.line_products) for i in range(form.evaluations + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
