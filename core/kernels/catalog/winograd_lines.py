"""Convolutions of large windows over few channels, by Winograd's algorithm along one axis.

Lines of the image are combined as in `core.kernels.catalog.winograd`; every combination is then convolved along its
columns by the definition, where neighbouring pixels make runs that are long enough. A window of 7 with a stride of 2
takes 13 of 28 multiplications.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from core.ir.graph import Array
from core.ir.types import Dim
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Out, Packed, Request, Scratch, covers
from core.kernels.catalog.conv import (
    Finish,
    extra_indices,
    finish_of,
    in_lines,
    inplace_extras,
    is_lined,
    windows_of,
)
from core.kernels.catalog.nest import traffic
from core.kernels.catalog.panels import LINE, Tile, choose_tile, pack_panels
from core.kernels.catalog.pool import Window
from core.kernels.catalog.winograd import Form
from core.kernels.catalog.words import WORD_BYTES

LINES = Form(4, (1 / 2, -1 / 2, 1.0, -1.0, 7 / 4, -7 / 4), stride=2, taps=7)


@dataclass(frozen=True)
class WinogradLinesSpec(KernelSpec):
    """A task computes `form.output` lines of results of one image. In its scratch: the combined lines
    [line_products][line_words], their products [evaluations][result_words], a line of zeros."""

    family: ClassVar[str] = "winograd_lines"
    batch: Dim
    windows: tuple[Window, Window]
    channels: int
    columns: int
    finish: Finish
    tile: Tile
    form: Form

    @property
    def bands(self) -> int:
        """Tasks of an image."""
        return -(-self.windows[0].count // self.form.output)

    @property
    def depth(self) -> int:
        """Words of a line of a window."""
        return self.windows[1].kernel * self.channels

    @property
    def image_words(self) -> int:
        """Words of a line of the image."""
        return self.windows[1].size * self.channels

    @property
    def lead(self) -> int:
        """Room for the padding at the beginning of a combined line, in whole cache lines."""
        return _lines(self.windows[1].before * self.channels)

    @property
    def line_words(self) -> int:
        """Words of a combined line with its padding on both sides."""
        window = self.windows[1]
        reach = ((window.count - 1) * window.stride + window.kernel - window.before) * self.channels
        return self.lead + _lines(max(reach, self.image_words))

    @property
    def result_words(self) -> int:
        """Words of a line of products; a cache line more, lest those of all points meet in the same sets."""
        return self.windows[1].count * self.columns + LINE

    @property
    def scratch_words(self) -> int:
        form = self.form
        return form.line_products * self.line_words + form.evaluations * self.result_words + _lines(self.image_words)

    @property
    def summary(self) -> str:
        lines, columns = self.windows
        return f"conv {lines.kernel}x{columns.kernel} winograd {self.form.output} lines {self.tile}"


@covers("FusedConv", "Conv")
def winograd_lines(request: Request) -> KernelCall | None:
    """For the convolutions that `core.kernels.catalog.conv.is_lined` picks."""
    node, weight, windows = request.node, request.constant(1), windows_of(request.node)
    if weight is None or windows is None or not is_lined(request, weight, windows):
        return None
    columns, channels = weight.shape[:2]
    lines, places = windows
    tile = choose_tile(request.cpu, places.count, columns, request.rank)
    spec = WinogradLinesSpec(
        node.output.shape[0], (lines, places), channels, columns, finish_of(node, request), tile, LINES
    )
    return KernelCall(
        spec,
        (
            In(0),
            Packed(1, f"lines{LINES.output}x{tile.columns}x{tile.lanes}", partial(pack, tile=tile, form=LINES)),
            *(In(i) for i in extra_indices(node)),
            Out(0),
            Scratch(spec.scratch_words * WORD_BYTES),
        ),
        inplace=inplace_extras(node),
        strided=in_lines(request),
        flops=node.output.tensor.size * (2 * weight[0].size),
        bytes=traffic(node),
    )


def pack(weight: Array, tile: Tile, form: Form = LINES) -> Array:
    """[O, I, kernel, K] as panels of [parts * K * I, O], one for every point."""
    outputs, inputs, _, places = weight.shape
    combined = np.einsum("pk,oikx->pxio", np.array(form.weight), weight.astype(np.float64)).astype(np.float32)
    matrices = combined.reshape(-1, places * inputs, outputs)
    starts = range(0, form.line_products, form.stride)
    parts = [matrices[start : start + form.stride].reshape(-1, outputs) for start in starts]
    return np.concatenate([pack_panels(part, tile) for part in parts])


def _lines(words: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-words // LINE) * LINE
