"""Products and convolutions on matrix tiles (Intel AMX): constant weights of narrow floats, bytes or float32.

A block is 32 rows by 32 columns of results in four tile registers. Each step down the depth loads two tiles of the left
factor and two of the weights, and multiplies each pair. This keeps the multiplier busy, and loads take half of its
time. Weights are packed tile after tile in the order in which a block reads them.

The rows of a matrix product are read in place, unless they are float32: these are copied, split as described below. A
convolution first copies a band of its image in the layout `FlatImages`: for each place of the window, the pixels of a
tile's rows are then evenly spaced.

A float32 is split into a sum of three bfloat16 numbers, x = x0 + x1 + x2, each with the next 8 bits. Six products make
one of float32: x0 y0, x1 y0, x0 y1, x2 y0, x1 y1, x0 y2. The omitted ones are below 2^-24 |x y| (Henry, Tang and
Heinecke: Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations, 2019). Matrix
products have at most the errors of float32, since tiles round fewer sums. If products need not be that exact
(`Target.tf32`), x0 + x1 and the first three products give 16 bits. Small products are added first, because x0 + x1 may
overflow float32 where x does not.

Tiles treat subnormal numbers as zero, so parts below 2^-126 are lost: numbers below 2^-102 have less precision than in
float32. Infinities give NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product as pairs
from typing import ClassVar, NamedTuple

import numpy as np

from lathe.core.ir.dim import affine, product
from lathe.core.ir.graph import Array, Node
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Packed, Request, Scratch
from lathe.core.kernels.conv.spec import ConvSpec, Finish, windows_of
from lathe.core.kernels.gemm.spec import GemmSpec
from lathe.core.kernels.shared.matrices import perm_attribute
from lathe.core.kernels.shared.window import Window
from lathe.core.kernels.shared.words import WORD_BYTES, elements_per_tile_word, elements_per_word, pack_words
from lathe.core.kernels.strassen.spec import subnest
from lathe.core.kernels.winograd.spec import suits_winograd

F32 = DType.FLOAT32
TILE = 16  # rows of a tile, and words per row
BLOCK = 2 * TILE  # rows and columns of a block of results
STAGE_BYTES = BLOCK * BLOCK * WORD_BYTES
LARGEST = np.float32(2.0**128 - 2.0**120)  # largest finite bfloat16; larger numbers would round to infinity
_PRODUCTS = {1: ((0, 0),), 2: ((0, 1), (1, 0), (0, 0)), 3: ((0, 2), (0, 1), (1, 1), (2, 0), (1, 0), (0, 0))}
_SMALL_BATCH = 8
_LEAST_WORDS = 8  # per row of a tile; with fewer, most of the multiplier idles
_MOST_RESULTS = 1024  # per band of several images; more would not reuse the weights noticeably better
_CONVOLUTIONS = ("FusedConv", "Conv")
_BAND = 0.4  # share of the second-level cache for a band, which is read again for each panel of weights


@dataclass(frozen=True)
class AmxSpec(KernelSpec):
    """Y = finish(A B).

    A has `rows` rows of `depth` words, `row_step` words apart. With windows, A consists of images with `depth` words
    per pixel; `rows` counts images, and `row_step` is their distance. With more than one of `parts`, A and B are
    float32, each split into that many bfloat16 numbers. Then a word of `depth` stands for two float32, `row_step`
    counts float32, and A is always copied.

    A task computes a band for all panels of weights: `band` rows, or the lines of a `FlatImages`.
    """

    family: ClassVar[str] = "amx"
    generator: ClassVar[str] = "amx.cpu"
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
        """Whether a band of A is copied to scratch first."""
        return bool(self.windows) or self.parts > 1

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """The pairs (index of a part of A, index of a part of B) that are multiplied and added up, in this order."""
        return _PRODUCTS[self.parts]

    @property
    def step(self) -> int:
        """Words of the depth that one tile covers: `words_per_step` of the depth, 0 if that is None."""
        return words_per_step(self.depth) or 0

    @property
    def steps(self) -> int:
        return self.depth // self.step

    @cached_property
    def flat(self) -> FlatImages:
        """The layout of copied images."""
        return FlatImages(self.windows, self.band)

    @property
    def taps(self) -> int:
        return len(self.flat.taps) if self.windows else 1

    @property
    def tile_words(self) -> int:
        """Words per tile of the weights."""
        return self.step * TILE

    @property
    def plane_pixels(self) -> int:
        """The number of rows of a copied band or, with windows, of pixels per plane of the copied images."""
        return self.flat.plane_pixels if self.windows else self.band

    @property
    def part_words(self) -> int:
        """Words of scratch for one part of a copied band."""
        return self.depth * (self.flat.pixels if self.windows else self.band)

    @property
    def copy_words(self) -> int:
        """Words of scratch for a copied band; 0 if A is read in place."""
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
    """A place of the window: the plane that it reads, and its distance in pixels from the result's own place."""

    plane: int
    shift: int


@dataclass(frozen=True)
class FlatImages:
    """The layout of copied images: one sequence of pixels, with padding pixels between lines and images.

    A stride s gives up to s x s planes, one for each pair of remainders, modulo s, of the padded coordinates of pixels.
    For the result at (y, x), place (i, j) of a window with dilation d reads line y + i*d // s, column x + j*d // s of
    the plane with the remainders of i*d and j*d. Lines are `pitch` pixels apart. Padding on the right of a line is also
    that on the left of the next line. A band has `lines` lines of results of one image, or all lines of several images.
    """

    windows: tuple[Window, ...]
    lines: int

    @property
    def images(self) -> int:
        """Images per band; 1 if a band is a part of an image."""
        return max(self.lines // self.windows[0].count, 1)

    @property
    def parts(self) -> int:
        """Bands per image; 1 if a band holds several images."""
        return -(-self.windows[0].count // self.lines)

    @cached_property
    def planes(self) -> tuple[tuple[int, int], ...]:
        """The pairs of remainders (of y, of x) that places of the window have, sorted: one plane for each."""
        y, x = self.windows
        found = {(i * y.dilation % y.stride, j * x.dilation % x.stride) for i, j in self._places}
        return tuple(sorted(found))

    @property
    def pitch(self) -> int:
        """Pixels from the start of a line of a plane to that of the next."""
        return _extent(self.windows[1]) - _shared(self.windows[1])

    @property
    def image_lines(self) -> int:
        """Lines of one image, or of a part of an image, in a plane."""
        return min(self.lines, self.windows[0].count) + _reach(self.windows[0])

    @property
    def image_pitch(self) -> int:
        """Pixels from the start of an image in a plane to that of the next."""
        return (self.image_lines - _shared(self.windows[0])) * self.pitch

    @property
    def plane_pixels(self) -> int:
        """Pixels per plane, with a line of padding and a block more: the last block may read beyond the last result."""
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
        """The position of each result of a full band among the pixels of a plane."""
        height, width = self.windows[0].count, self.windows[1].count
        return tuple(
            line // height * self.image_pitch + line % height * self.pitch + column
            for line, column in pairs(range(self.lines), range(width))
        )

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """The index of the first result of each block of a full band, then the band's number of results.

        The results of a block lie within 32 pixels of a plane.
        """
        firsts = [0]
        for result, place in enumerate(self.places):
            if place >= self.places[firsts[-1]] + BLOCK:
                firsts.append(result)
        return (*firsts, len(self.places))

    @property
    def _places(self) -> Iterator[tuple[int, int]]:
        return pairs(range(self.windows[0].kernel), range(self.windows[1].kernel))


def _reach(window: Window) -> int:
    """The number of pixels along one axis of a plane that a window covers beyond its first one."""
    return (window.kernel - 1) * window.dilation // window.stride


def _extent(window: Window) -> int:
    """The number of pixels along one axis of a plane that all windows together cover."""
    return window.count + _reach(window)


def _shared(window: Window) -> int:
    """Padding pixels that the end of a line shares with the beginning of the next line; 0 for strides above 1.

    No result lies there.
    """
    return min(window.before, window.after, _reach(window)) if window.stride == 1 else 0


def words_per_step(depth: int) -> int | None:
    """The words of the depth that a tile covers: the largest divisor of `depth` up to 16; None if it is below 8."""
    return next((words for words in range(min(depth, TILE), _LEAST_WORDS - 1, -1) if depth % words == 0), None)


def amx(request: Request) -> KernelCall | None:
    """Selector of MatMul, FusedMatMul, Conv and FusedConv with constant weights on CPUs with AMX.

    The types are uint8 x int8, bfloat16 or float16 x float32, and float32, which is split into parts of bfloat16, as
    far as the tiles of the CPU take them. None for other nodes, if tiles cannot compute the node (`_spec`), if a matrix
    product of float32 has fewer than 32 rows at a batch of 8, if the request demands the definition for float32
    (`winograd` False), and where Winograd's algorithm in float32 is expected to win.

    `request.rank` numbers the candidates of the tuner: 0 asks for the tiles, r above 0 for the kernel of rank r - 1
    that a machine without AMX would use.
    """
    return None if not _has_tiles(request) or _is_winograd_faster(request) else _call(request)


def amx_instead_of_winograd(request: Request) -> Iterator[KernelCall]:
    """Offer of the AMX kernel for convolutions that `amx` leaves to Winograd's algorithm; none for other nodes."""
    call = _call(request) if _has_tiles(request) and _is_winograd_faster(request) else None
    if call is not None:
        yield call


def _has_tiles(request: Request) -> bool:
    return any(map(request.cpu.has_tiles, (DType.BFLOAT16, DType.FLOAT16, DType.UINT8)))


def _is_winograd_faster(request: Request) -> bool:
    """Whether Winograd's algorithm in float32 suits this convolution and is expected to beat the split float32 product.

    With a stride of 1 it takes a quarter of the multiplications, and is 1.0 to 1.6 times as fast as the six products of
    the split (ResNet-50 on Granite Rapids, 1 to 32 images). With a stride of 2 it is not faster.
    """
    weight, windows = request.constant(1), windows_of(request.node) if request.node.op in _CONVOLUTIONS else None
    if weight is None or windows is None or request.cpu.tf32:
        return False
    single = all(window.stride == 1 for window in windows)
    return single and _is_f32(request.node) and suits_winograd(request, weight, windows)


def _is_f32(node: Node) -> bool:
    return node.inputs[0] is not None and node.inputs[0].dtype is F32


def _call(request: Request) -> KernelCall | None:
    without = replace(request, target=request.cpu.without_tiles)
    plain = without.select_with(winograd=False, rank=0)
    spec = _spec(plain.spec, request) if plain is not None else None
    if plain is None or spec is None:
        return None
    if request.rank:
        return without.select_with(rank=request.rank - 1)
    order = _order(request.node)
    pack = partial(_pack, order=order, spec=spec)
    weights = Packed(1, f"amx{order}{spec.step}{spec.element}{spec.parts}", pack)
    others = [operand for operand in plain.operands[2:] if isinstance(operand, In | Out)]
    operands = (In(0), weights, *others, Scratch(spec.scratch_bytes))
    return replace(plain, spec=spec, operands=operands)


def _spec(plain: KernelSpec, request: Request) -> AmxSpec | None:
    """The AMX spec of the product that `plain`, a spec for vector registers, computes.

    None if tiles cannot compute it, if the machine's tiles do not take its element type, or if a float32 product would
    mostly read weights (`_is_streamed`). float32 is split only if the request allows algorithms other than the
    definition.
    """
    whole = _unsplit_spec(plain)
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
    """Whether a matrix product has fewer rows than a block at a batch of 8, so that reading its weights dominates.

    Weights in three parts of 16 bits take 3/2 of the bytes of float32, so such a product is not split.
    """
    rows = affine(whole.rows, "n")
    return not whole.windows and rows is not None and rows[0] * _SMALL_BATCH + rows[1] < BLOCK


def _unsplit_spec(plain: KernelSpec) -> AmxSpec | None:
    """The AMX spec of the product or convolution that `plain` computes, with unsplit elements.

    Its band is one block of rows, or one image. None if tiles cannot compute the node.
    """
    match plain:
        case GemmSpec(packed=True, a_step=1, y_step=1, nest=nest) if not any(nest.strides[1]):
            source, pixels = subnest(nest, nest.strides[:1]), subnest(nest, nest.strides[2:])
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
    """A number of words of vector kernels, converted to words of tiles; unchanged for float32.

    A tile's word may hold more elements (two float16 instead of one). Where it does, None unless `words` is a number
    that gives whole words.
    """
    size = 1 if element is F32 else elements_per_tile_word(element) // elements_per_word(element)
    if isinstance(words, int):
        return words // size if words % size == 0 else None
    return words if size == 1 else None


def _is_even(windows: tuple[Window, ...]) -> bool:
    """Whether the windows have exactly two axes, with equal strides."""
    return len(windows) == 2 and windows[0].stride == windows[1].stride


def _band(whole: AmxSpec, nbytes: int) -> int:
    """The rows per band so that what a band reads or copies takes about `nbytes` bytes of the cache.

    For images it counts lines of results: those of several whole images, or of an even part of one image.
    """
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
    """Bytes of the cache per row: its left factor if the weights exceed `nbytes`.

    Otherwise twice the sum of its left factor, its results and their extras, so that lines that are fetched for one
    panel are still in the cache for the next.
    """
    factor = whole.depth * whole.parts * WORD_BYTES
    if factor * whole.columns > nbytes:
        return factor
    finish = whole.finish
    extras = zip(finish.extra_dtypes, finish.pixels.strides, strict=False)
    moving = sum(dtype.itemsize for dtype, strides in extras if any(strides))
    return 2 * (factor + whole.columns * (finish.dtype.itemsize + moving))


def _order(node: Node) -> tuple[int, ...] | None:
    """The permutation that makes a product's weights [..., K, N]; empty if none is needed, None for a convolution."""
    return None if "Conv" in node.op else perm_attribute(node, "perm_b") or ()


def _pack(weight: Array, order: tuple[int, ...] | None, spec: AmxSpec) -> Array:
    """The tiles of weights in the order in which a block reads them: [panel][step][tap][part][vector][word][column]."""
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
    """The weights [..., K, N] as words [parts, ..., K words, N]: `spec.parts` bfloat16 parts that add up to float32.

    With one part they are packed as they are.
    """
    if spec.parts == 1:
        return pack_words(weight, spec.element, elements_per_tile_word(spec.element))[np.newaxis]
    parts, rest = [], weight
    for number in range(spec.parts):
        part = (rest if number else np.clip(rest, -LARGEST, LARGEST)).astype(spec.element.numpy)
        rest = rest - part.astype(np.float32)
        parts.append(pack_words(part, spec.element))
    return np.stack(parts)
