"""Products and convolutions on matrix tiles (Intel AMX): constant weights of narrow floats, bytes or float32.

A block is 32 rows by 32 columns of results in four tile registers. Each step down the depth loads two tiles of the left
factor and two of the weights and multiplies each with each, which keeps the multiplier busy while loads take half the
time. Weights are packed tile after tile in the order in which a block reads them.

The rows of a product are read where they lie. A convolution first copies a band of its image as `Flat` says, so that
whatever place of the window a tile is about, the pixels of its rows follow each other evenly.

A float32 is the sum of three bfloat16 numbers, x = x0 + x1 + x2, each made of the next 8 bits. Six products make one
of float32: x0 y0, x1 y0, x0 y1, x2 y0, x1 y1, x0 y2; those that are left out are below 2^-24 |x y| (Henry, Tang and
Heinecke: Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations, 2019). The errors
of whole products are those of float32, or smaller, since tiles add up fewer rounded sums. Where products need not be
that exact (`Target.tf32`), x0 + x1 and the first three products have 16 bits. The small ones come first, for x0 + x1
may be beyond float32 where x is not.

Tiles take subnormal numbers for zeros, so parts below 2^-126 are lost: of numbers below 2^-102 there is less than
float32 has. Infinities give NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product as pairs
from typing import ClassVar, NamedTuple

import numpy as np

from core.ir.dim import affine, product
from core.ir.graph import Array, Node
from core.ir.types import Dim, DType
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Out, Packed, Request, Scratch, covers, offers, select
from core.kernels.catalog.conv import ConvSpec, Finish, is_winograd, windows_of
from core.kernels.catalog.gemm import GemmSpec
from core.kernels.catalog.matrices import perm_attribute
from core.kernels.catalog.pool import Window
from core.kernels.catalog.strassen import walk
from core.kernels.catalog.words import WORD_BYTES, pack_words, per_tile_word, per_word

F32 = DType.FLOAT32
TILE = 16  # rows of a tile, and words of one of its rows
BLOCK = 2 * TILE  # rows and columns of a block of results
STAGE_BYTES = BLOCK * BLOCK * WORD_BYTES
LARGEST = np.float32(2.0**128 - 2.0**120)  # that bfloat16 has; what lies beyond would be rounded to infinity
_PRODUCTS = {1: ((0, 0),), 2: ((0, 1), (1, 0), (0, 0)), 3: ((0, 2), (0, 1), (1, 1), (2, 0), (1, 0), (0, 0))}
_SMALL_BATCH = 8
_LEAST_WORDS = 8  # in a row of a tile: below, most of the multiplier idles
_MOST_RESULTS = 1024  # of several images in a band: then weights are used often enough
_CONVOLUTIONS = ("FusedConv", "Conv")
_BAND = 0.4  # of the second-level cache, for what is read again for every panel of weights


@dataclass(frozen=True)
class AmxSpec(KernelSpec):
    """Y = finish(A B). `rows` rows of A, `row_step` words apart, hold `depth` words each; or, where there are windows,
    A is made of images of `depth` words per pixel, and `rows` counts images. With `parts` other than one, A and B are
    float32, split into so many bfloat16 numbers: a word stands for two float32, and A is copied in any case.

    A task goes through a band: `band` rows, or the lines of `Flat`, for all panels of weights.
    """

    family: ClassVar[str] = "amx"
    rows: Dim
    row_step: Dim
    depth: int
    columns: int
    finish: Finish
    element: DType
    band: int
    windows: tuple[Window, ...] = ()
    fill: int = 0  # a word outside the image
    parts: int = 1

    @property
    def copies(self) -> bool:
        return bool(self.windows) or self.parts > 1

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """The parts of A and of B that meet."""
        return _PRODUCTS[self.parts]

    @property
    def step(self) -> int:
        """Words of the depth that a tile holds."""
        return words_per_step(self.depth) or 0

    @property
    def steps(self) -> int:
        return self.depth // self.step

    @cached_property
    def flat(self) -> Flat:
        """How images are copied."""
        return Flat(self.windows, self.band)

    @property
    def taps(self) -> int:
        return len(self.flat.taps) if self.windows else 1

    @property
    def tile_words(self) -> int:
        """Of the weights."""
        return self.step * TILE

    @property
    def plane_pixels(self) -> int:
        """Rows, or pixels of a plane, of a band that is copied."""
        return self.flat.plane_pixels if self.windows else self.band

    @property
    def part_words(self) -> int:
        """Room for one part of a band that is copied."""
        return self.depth * (self.flat.pixels if self.windows else self.band)

    @property
    def copy_words(self) -> int:
        """Room for a band that is copied."""
        return self.part_words * self.parts if self.copies else 0

    @property
    def scratch_bytes(self) -> int:
        return STAGE_BYTES + 64 + self.copy_words * WORD_BYTES

    @property
    def summary(self) -> str:
        kernel = "x".join(str(window.kernel) for window in self.windows)
        kind = str(self.element) if self.parts == 1 else f"float32 in {self.parts} {self.element}"
        what = f"conv {kind} {kernel}" if kernel else f"gemm {kind}"
        return f"{what} {BLOCK}x{BLOCK}, tiles of {TILE}x{self.step} words (AMX)"


class Tap(NamedTuple):
    """A place of the window: which plane it reads, and how many pixels further than the result's own place."""

    plane: int
    shift: int


@dataclass(frozen=True)
class Flat:
    """Images as pixels in a row, with what the window meets outside them in between.

    Of a stride s there are s x s planes, one for each remainder of the two coordinates; in its plane, the pixel that
    place (i, j) of the window meets for the result at (y, x) lies at line y + i', column x + j'. Lines follow each
    other at `pitch`; padding on the right of a line is that on the left of the next one. A band is `lines` lines of
    results of one image, or all of several images.
    """

    windows: tuple[Window, ...]
    lines: int

    @property
    def images(self) -> int:
        """In a band; 1 also where it is a part of one."""
        return max(self.lines // self.windows[0].count, 1)

    @property
    def parts(self) -> int:
        """Bands of an image; 1 also where one holds several."""
        return -(-self.windows[0].count // self.lines)

    @cached_property
    def planes(self) -> tuple[tuple[int, int], ...]:
        """The remainders that occur."""
        y, x = self.windows
        found = {(i * y.dilation % y.stride, j * x.dilation % x.stride) for i, j in self._places}
        return tuple(sorted(found))

    @property
    def pitch(self) -> int:
        """Pixels from line to line."""
        return _extent(self.windows[1]) - _shared(self.windows[1])

    @property
    def image_lines(self) -> int:
        """Lines of one image, or of a part of one, that a plane holds."""
        return min(self.lines, self.windows[0].count) + _reach(self.windows[0])

    @property
    def image_pitch(self) -> int:
        """Pixels from image to image."""
        return (self.image_lines - _shared(self.windows[0])) * self.pitch

    @property
    def plane_pixels(self) -> int:
        """A block may read beyond the last result."""
        lines = (self.images - 1) * self.image_pitch + (self.image_lines + 1) * self.pitch
        return lines + BLOCK

    @property
    def pixels(self) -> int:
        return len(self.planes) * self.plane_pixels

    @cached_property
    def taps(self) -> tuple[Tap, ...]:
        y, x = self.windows
        found = []
        for i, j in self._places:
            (down, a), (right, b) = divmod(i * y.dilation, y.stride), divmod(j * x.dilation, x.stride)
            found.append(Tap(self.planes.index((a, b)), down * self.pitch + right))
        return tuple(found)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Where each result of a full band lies among the pixels of a plane."""
        height, width = self.windows[0].count, self.windows[1].count
        return tuple(
            line // height * self.image_pitch + line % height * self.pitch + column
            for line, column in pairs(range(self.lines), range(width))
        )

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """The first result of each block, and the number of all results: a block holds what lies within 32 pixels."""
        firsts = [0]
        for result, place in enumerate(self.places):
            if place >= self.places[firsts[-1]] + BLOCK:
                firsts.append(result)
        return (*firsts, len(self.places))

    @property
    def _places(self) -> Iterator[tuple[int, int]]:
        return pairs(range(self.windows[0].kernel), range(self.windows[1].kernel))


def _reach(window: Window) -> int:
    """How many places of a plane a window covers beyond its first one."""
    return (window.kernel - 1) * window.dilation // window.stride


def _extent(window: Window) -> int:
    """Places of a plane that windows meet."""
    return window.count + _reach(window)


def _shared(window: Window) -> int:
    """Padding that the end of a line has in common with the beginning of the next one; no result lies there."""
    return min(window.before, window.after, _reach(window)) if window.stride == 1 else 0


def words_per_step(depth: int) -> int | None:
    """Into how many words at a time the depth is cut evenly; None where that leaves too few."""
    return next((words for words in range(min(depth, TILE), _LEAST_WORDS - 1, -1) if depth % words == 0), None)


@covers("FusedMatMul", "MatMul", "FusedConv", "Conv", first=True)  # before Strassen's algorithm, which is imported
def amx(request: Request) -> KernelCall | None:
    """For products with constant weights where the machine has tiles, unless another algorithm needs so few of them
    that it wins. The second best kernel is the one without."""
    return None if not _has_tiles(request) or _needs_few(request) else _call(request)


@offers("FusedConv", "Conv")
def beside_winograd(request: Request) -> Iterator[KernelCall]:
    """What `amx` leaves to another algorithm."""
    call = _call(request) if _has_tiles(request) and _needs_few(request) else None
    if call is not None:
        yield call


def _has_tiles(request: Request) -> bool:
    return any(map(request.cpu.has_tiles, (DType.BFLOAT16, DType.FLOAT16, DType.UINT8)))


def _needs_few(request: Request) -> bool:
    """Whether Winograd's algorithm multiplies a quarter as often, in float32. That is 1.0 to 1.6 times as fast as the
    six products of the split (ResNet-50 on Granite Rapids, 1 to 32 images); with a stride of 2 it is not."""
    weight, windows = request.constant(1), windows_of(request.node) if request.node.op in _CONVOLUTIONS else None
    if weight is None or windows is None or request.cpu.tf32:
        return False
    single = all(window.stride == 1 for window in windows)
    return single and _is_f32(request.node) and is_winograd(request, weight, windows)


def _is_f32(node: Node) -> bool:
    return node.inputs[0] is not None and node.inputs[0].dtype is F32


def _call(request: Request) -> KernelCall | None:
    without = replace(request, target=request.cpu.without_tiles)
    plain = select(replace(without, winograd=False, rank=0))
    spec = _spec(plain.spec, request) if plain is not None else None
    if plain is None or spec is None:
        return None
    if request.rank:
        return select(replace(without, rank=request.rank - 1))
    order = _order(request.node)
    pack = partial(_pack, order=order, spec=spec)
    weights = Packed(1, f"amx{order}{spec.step}{spec.element}{spec.parts}", pack)
    others = [operand for operand in plain.operands[2:] if isinstance(operand, In | Out)]
    operands = (In(0), weights, *others, Scratch(spec.scratch_bytes))
    return replace(plain, spec=spec, operands=operands)


def _spec(plain: KernelSpec, request: Request) -> AmxSpec | None:
    """The same product on tiles. float32 is split where its products need not be those of the definition."""
    whole = _whole(plain)
    if whole is None:
        return None
    if whole.element is F32:
        if not request.winograd or whole.depth % 2 or whole.fill or _is_streamed(whole):
            return None
        whole = replace(whole, depth=whole.depth // 2, element=DType.BFLOAT16, parts=2 if request.cpu.tf32 else 3)
    if not request.cpu.has_tiles(whole.element) or words_per_step(whole.depth) is None:
        return None
    return replace(whole, band=_band(whole, int(request.cpu.l2_bytes * _BAND)))


def _is_streamed(whole: AmxSpec) -> bool:
    """Whether weights meet so few rows that reading them is all that counts: three parts take 3/2 of the room."""
    rows = affine(whole.rows, "n")
    return not whole.windows and rows is not None and rows[0] * _SMALL_BATCH + rows[1] < BLOCK


def _whole(plain: KernelSpec) -> AmxSpec | None:
    """A product or convolution with the least band there is."""
    match plain:
        case GemmSpec(packed=True, a_step=1, y_step=1, nest=nest) if not any(nest.strides[1]):
            source, pixels = walk(nest, nest.strides[:1]), walk(nest, nest.strides[2:])
            finish = Finish(plain.epilogue, pixels, plain.extra_steps, plain.extra_dtypes, plain.dtype)
            if source.rank != 1:
                return None
            depth, step = (_in_tile_words(size, plain.element) for size in (plain.depth, source.strides[0][0]))
            if not isinstance(depth, int) or step is None:
                return None
            return AmxSpec(source.extents[0], step, depth, plain.columns, finish, plain.element, BLOCK)
        case ConvSpec(groups=1, pair=1, windows=windows) if _is_even(windows):
            channels = _in_tile_words(plain.channels, plain.element)
            if not isinstance(channels, int):
                return None
            image = product(window.size for window in windows) * channels
            return AmxSpec(
                plain.batch, image, channels, plain.columns, plain.finish, plain.element, windows[0].count,
                windows, plain.fill,
            )  # fmt: skip
    return None


def _in_tile_words(words: Dim, element: DType) -> Dim | None:
    """So many words of vectors as words of tiles, but of float32 as they are; None unless they are whole for every
    batch size."""
    size = 1 if element is F32 else per_tile_word(element) // per_word(element)
    if isinstance(words, int):
        return words // size if words % size == 0 else None
    return words if size == 1 else None


def _is_even(windows: tuple[Window, ...]) -> bool:
    return len(windows) == 2 and windows[0].stride == windows[1].stride


def _band(whole: AmxSpec, nbytes: int) -> int:
    """Rows per band; or lines of results, those of several images or even parts of one."""
    if not whole.windows:
        return max(nbytes // _row_bytes(whole, nbytes) // BLOCK, 1) * BLOCK
    height, image = whole.windows[0].count, whole.copy_words * WORD_BYTES
    if image > nbytes:
        return -(-height // -(-image // nbytes))
    batch, most = affine(whole.rows, "n"), _MOST_RESULTS // (height * whole.windows[1].count)
    if batch is not None and batch[0] == 0:
        most = min(most, batch[1])
    return height * max(min(nbytes // image, most), 1)


def _row_bytes(whole: AmxSpec, nbytes: int) -> int:
    """What a row takes of the cache: its left factor; and where weights are small enough to be read once more for every
    band, also its results, twice as much in all: so lines that are fetched for one panel are there for the next one."""
    factor = whole.depth * whole.parts * WORD_BYTES
    if factor * whole.columns > nbytes:
        return factor
    finish = whole.finish
    extras = zip(finish.extra_dtypes, finish.pixels.strides, strict=False)
    moving = sum(dtype.itemsize for dtype, strides in extras if any(strides))
    return 2 * (factor + whole.columns * (finish.dtype.itemsize + moving))


def _order(node: Node) -> tuple[int, ...] | None:
    """The axes of weights as [..., K, N] for a product; None for those of a convolution."""
    return None if "Conv" in node.op else perm_attribute(node, "perm_b") or ()


def _pack(weight: Array, order: tuple[int, ...] | None, spec: AmxSpec) -> Array:
    """[panel][step][tap][part][vector][word][column]: the tiles of weights in the order in which a block reads them."""
    if order is None:
        taps = np.moveaxis(weight.reshape(*weight.shape[:2], -1), -1, 0).swapaxes(1, 2)  # [tap, input, output]
    else:
        matrix = np.transpose(weight, order) if order else weight
        taps = matrix.reshape(1, *matrix.shape[-2:])
    parts = pack_parts(taps, spec)
    count = -(-spec.columns // TILE)
    padded = np.zeros((spec.parts, spec.taps, spec.depth, count * TILE), parts.dtype)
    padded[..., : spec.columns] = parts
    tiles = padded.reshape(spec.parts, spec.taps, spec.steps, spec.step, count, TILE).transpose(4, 2, 1, 0, 3, 5)
    pieces = [np.moveaxis(tiles[at : at + 2], 0, 3).reshape(-1) for at in range(0, count, 2)]
    return np.concatenate(pieces)


def pack_parts(weight: Array, spec: AmxSpec) -> Array:
    """Words of weights [..., K, N], part by part."""
    if spec.parts == 1:
        return pack_words(weight, spec.element, per_tile_word(spec.element))[np.newaxis]
    parts, rest = [], weight
    for number in range(spec.parts):
        part = (rest if number else np.clip(rest, -LARGEST, LARGEST)).astype(spec.element.numpy)
        rest = rest - part.astype(np.float32)
        parts.append(pack_words(part, spec.element))
    return np.stack(parts)
