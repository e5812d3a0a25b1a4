"""A depthwise convolution between 1x1 convolutions: lines of the wide image between them are computed on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Operand, Out, Packed, Request, Scratch
from lathe.core.kernels.conv.spec import Finish, extra_indices, finish_of, windows_of
from lathe.core.kernels.depthwise import spec as depthwise
from lathe.core.kernels.shared.nest import has_plannable_types, traffic
from lathe.core.kernels.shared.panels import Tile, choose_tile, pack_panels
from lathe.core.kernels.shared.window import Window

F32 = DType.FLOAT32
_SHARE = 16  # the lines in use may take 1/16 of the second-level cache
_LEAST_PIXELS = 24  # of a band


@dataclass(frozen=True)
class Product:
    """A 1x1 convolution from `depth` to `columns` channels."""

    depth: int
    columns: int
    finish: Finish
    tile: Tile


@dataclass(frozen=True)
class ConvChainSpec(KernelSpec):
    """A task computes some lines of one image, `band` lines at a time.

    First `widen`, a 1x1 convolution, computes the missing lines that the band needs, in a ring buffer of `ring` lines.
    Then follow the depthwise convolution and `narrow`, another 1x1 convolution. `widen` or `narrow` is None if the
    chain lacks it; without `widen`, the depthwise convolution reads the input.
    """

    family: ClassVar[str] = "conv_chain"
    generator: ClassVar[str] = "conv_chain.cpu"
    batch: Dim
    windows: tuple[Window, Window]
    channels: int  # of the depthwise convolution
    finish: Finish  # of the depthwise convolution
    columns: int  # pixels of a tile of the depthwise convolution
    lanes: int
    widen: Product | None
    narrow: Product | None
    band: int

    @property
    def reach(self) -> int:
        """The number of lines of the wide image from the first to the last that a line of results reads, inclusive."""
        lines = self.windows[0]
        return (lines.kernel - 1) * lines.dilation + 1

    @property
    def ring(self) -> int:
        """The number of lines of the wide image in the ring buffer."""
        lines = self.windows[0]
        return min((self.band - 1) * lines.stride + self.reach, lines.size)

    @property
    def has_whole_image(self) -> bool:
        return self.ring == self.windows[0].size

    @property
    def wide_elements(self) -> int:
        """Float32 elements of the ring buffer; 0 without `widen`."""
        return self.ring * self.windows[1].size * self.channels if self.widen else 0

    @property
    def scratch_elements(self) -> int:
        """Float32 elements of scratch: the ring buffer, and with `narrow` a band of the depthwise results."""
        return self.wide_elements + (self.band * self.windows[1].count * self.channels if self.narrow else 0)

    @property
    def summary(self) -> str:
        kernel = "x".join(str(window.kernel) for window in self.windows)
        parts = [f"widen {self.widen.tile}" if self.widen else "", f"depthwise {kernel}"]
        parts.append(f"narrow {self.narrow.tile}" if self.narrow else "")
        return f"conv chain: {', '.join(filter(None, parts))}, {self.band} lines"


def conv_chain(request: Request) -> KernelCall | None:
    """Selector of ConvChain, the fused nodes that the pass `lathe.core.passes.fusion.conv_chain` creates.

    None if generated code cannot compute a dimension.
    """
    if not has_plannable_types(request.node):
        return None
    return _call(request, _bands(request)[0])


def other_bands(request: Request) -> Iterator[KernelCall]:
    """Offers of the same ConvChain with more or fewer lines per band, and with other tiles."""
    bands = _bands(request)
    for band in bands[1:]:
        yield _call(request, band)
    for rank in (1, 2):
        yield _call(replace(request, rank=rank), bands[0])


def _call(request: Request, band: int) -> KernelCall:
    node, body = request.node, _body(request.node)
    widen, middle, narrow = _parts(body)
    spec = _spec(request, band)
    places = {value: index for index, value in enumerate(body.inputs)}
    operands: list[Operand] = [In(0)]
    for part, product in ((widen, spec.widen), (middle, None), (narrow, spec.narrow)):
        if part is not None:
            operands.append(_weight_operand(places[_weight(part)], product))
            operands += [In(places[part.required_input(i)]) for i in extra_indices(part)]
    operands += [Out(0), Scratch(max(spec.scratch_elements, 1) * F32.itemsize)]
    flops: Dim = 0
    for part in filter(None, (widen, middle, narrow)):
        _, *kernel = _weight(part).tensor.evaluate({})
        flops = flops + part.output.tensor.size * (2 * int(np.prod(kernel)))
    return KernelCall(spec, tuple(operands), flops=flops, bytes=traffic(node))


def _spec(request: Request, band: int) -> ConvChainSpec:
    widen, middle, narrow = _parts(_body(request.node))
    windows = windows_of(middle)
    assert windows is not None and len(windows) == 2, f"{request.node} has images of unknown size"
    lines, columns = windows
    channels = _weight(middle).shape[0]
    assert isinstance(channels, int)
    spec = ConvChainSpec(
        middle.output.shape[0], (lines, columns), channels, finish_of(middle),
        depthwise.columns_of(request.cpu, columns), min(request.cpu.lanes, 1 << (channels - 1).bit_length()),
        None, None, band,
    )  # fmt: skip
    rows = columns.size * (spec.ring if spec.has_whole_image else 1)
    return replace(
        spec,
        widen=_product(request, widen, rows) if widen is not None else None,
        narrow=_product(request, narrow, columns.count * band) if narrow is not None else None,
    )


def _product(request: Request, node: Node, rows: int) -> Product:
    columns, depth, *_ = _weight(node).tensor.evaluate({})
    return Product(depth, columns, finish_of(node), choose_tile(request.cpu, rows, columns, request.rank))


def _bands(request: Request) -> list[int]:
    """Possible numbers of lines per band, the preferred number first.

    It is the largest divisor of the number of result lines whose scratch fits its share of the second-level cache, but
    enough for `_LEAST_PIXELS` pixels.
    """
    columns = _spec(request, 1).windows[1].count
    count = _spec(request, 1).windows[0].count
    even = [band for band in range(1, count + 1) if count % band == 0]
    nbytes = [_spec(request, band).scratch_elements * F32.itemsize for band in even]
    least = next((i for i, band in enumerate(even) if band * columns >= _LEAST_PIXELS), len(even) - 1)
    best = max((i for i, size in enumerate(nbytes) if size <= request.cpu.l2_bytes // _SHARE), default=0)
    best = max(best, least)
    others = [best - 1, best + 1, least, 0, len(even) - 1]
    fitting = [i for i in others if 0 <= i < len(even) and nbytes[i] <= request.cpu.l2_bytes]
    return list(dict.fromkeys(even[i] for i in (best, *fitting)))


def _weight_operand(index: int, product: Product | None) -> Packed:
    if product is None:
        return Packed(index, "depthwise", depthwise.pack)
    tile = product.tile
    return Packed(index, f"pointwise{tile.columns}x{tile.lanes}", partial(_pack, tile=tile))


def _pack(weight: Array, tile: Tile) -> Array:
    """[O, I, 1, 1] as panels of [I, O]."""
    return pack_panels(np.ascontiguousarray(weight[:, :, 0, 0].T), tile)


def _body(node: Node) -> Graph:
    body = node.attrs["body"]
    assert isinstance(body, Graph)
    return body


def _parts(body: Graph) -> tuple[Node | None, Node, Node | None]:
    """The nodes of a chain: the 1x1 convolution before the depthwise one, the depthwise one, the 1x1 one after it.

    The first and the last are None if the chain lacks them.
    """
    at = next(i for i, node in enumerate(body.nodes) if _is_depthwise(node))
    before: Sequence[Node] = body.nodes[:at]
    after: Sequence[Node] = body.nodes[at + 1 :]
    return (before[0] if before else None), body.nodes[at], (after[0] if after else None)


def _is_depthwise(node: Node) -> bool:
    return node.attrs.get("group", 1) != 1


def _weight(node: Node) -> Value:
    return node.required_input(1)
