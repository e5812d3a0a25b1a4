"""Convolutions of large windows over few channels, by Winograd's algorithm along one axis.

Lines of the image are transformed as in `lathe.core.kernels.winograd.spec`. Each transformed line is then convolved
along its columns by the definition, where adjacent pixels form long enough runs. A window of 7 with a stride of 2 takes
13 of 28 multiplications.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.ir.types import Dim
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Packed, Request, Scratch
from lathe.core.kernels.conv.spec import (
    F32,
    FEW_CHANNELS,
    Finish,
    extra_indices,
    finish_of,
    has_long_epilogue,
    inplace_extras,
    is_covered,
    strided_operands,
    windows_of,
)
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.nest import traffic
from lathe.core.kernels.shared.panels import LINE, Tile, choose_tile, pack_panels
from lathe.core.kernels.shared.window import Window
from lathe.core.kernels.shared.words import WORD_BYTES
from lathe.core.kernels.winograd.spec import LEAST_RESULTS, Form

LINES = Form(4, (1 / 2, -1 / 2, 1.0, -1.0, 7 / 4, -7 / 4), stride=2, taps=7)


@dataclass(frozen=True)
class WinogradLinesSpec(KernelSpec):
    """A task computes `form.output` lines of results of one image.

    The scratch of a task holds the transformed lines [line_products][line_words], their products
    [evaluations][result_words], and a line of zeros.
    """

    family: ClassVar[str] = "winograd_lines"
    generator: ClassVar[str] = "winograd.lines_cpu"
    batch: Dim
    windows: tuple[Window, Window]
    channels: int
    columns: int
    finish: Finish
    tile: Tile
    form: Form

    @property
    def bands(self) -> int:
        """The number of tasks per image."""
        return -(-self.windows[0].count // self.form.output)

    @property
    def depth(self) -> int:
        """Words in a line of the window: its columns times the image's channels."""
        return self.windows[1].kernel * self.channels

    @property
    def image_words(self) -> int:
        """Words in a line of the image."""
        return self.windows[1].size * self.channels

    @property
    def lead(self) -> int:
        """Words for the padding at the beginning of a transformed line, in whole cache lines."""
        return _lines(self.windows[1].before * self.channels)

    @property
    def line_words(self) -> int:
        """Words (of 4 bytes) of a transformed line of the image, with its padding on both sides."""
        window = self.windows[1]
        reach = ((window.count - 1) * window.stride + window.kernel - window.before) * self.channels
        return self.lead + _lines(max(reach, self.image_words))

    @property
    def result_words(self) -> int:
        """Words of a line of products and a cache line, so that the points' lines do not map to the same cache sets."""
        return self.windows[1].count * self.columns + LINE

    @property
    def scratch_words(self) -> int:
        form = self.form
        return form.line_products * self.line_words + form.evaluations * self.result_words + _lines(self.image_words)

    @property
    def summary(self) -> str:
        lines, columns = self.windows
        return f"conv {lines.kernel}x{columns.kernel} winograd {self.form.output} lines {self.tile}"


def winograd_lines(request: Request) -> KernelCall | None:
    """Selector of channels-last float32 7x7 Conv and FusedConv of stride 2, by Winograd's algorithm along one axis.

    Weights are constant. There are fewer than 16 input channels, and whole vectors of output channels, at least two, of
    at least 8 floats. None for other nodes, with dilation or groups, if an extent is not a number or there are fewer
    than 6 lines of results, for a long epilogue, and if the request demands the definition (`winograd` False): see
    `suits_winograd_lines`.
    """
    node, weight, windows = request.node, request.constant(1), windows_of(request.node)
    if weight is None or windows is None or not suits_winograd_lines(request, weight, windows):
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
        strided=strided_operands(request),
        flops=node.output.tensor.size * (2 * weight[0].size),
        bytes=traffic(node),
    )


def suits_winograd_lines(request: Request, weight: Array, windows: tuple[Window, ...]) -> bool:
    """Whether Winograd's algorithm along one axis is expected to win.

    It is for 7x7 windows with a stride of 2, without dilation and groups, over float32, with fewer than 16 input
    channels, at least two vectors of output channels, all whole, of at least 8 floats, at least 6 lines of results, and
    a short epilogue.
    """
    node, target = request.node, request.cpu
    columns, channels = weight.shape[:2]
    shaped = len(windows) == 2 and all((w.kernel, w.stride, w.dilation) == (7, 2, 1) for w in windows)
    whole = columns % target.lanes == 0 and columns >= 2 * target.lanes and channels < FEW_CHANNELS
    suits = shaped and whole and int(attribute(node, "group")) == 1 and windows[0].count >= LEAST_RESULTS
    if not (request.winograd and suits and is_covered(node) and target.lanes >= 8):
        return False
    return node.required_input(0).dtype is F32 and not has_long_epilogue(node)


def pack(weight: Array, tile: Tile, form: Form = LINES) -> Array:
    """[O, I, kernel, K] as panels of the transformed matrices [parts * K * I, O], one matrix per point."""
    outputs, inputs, _, places = weight.shape
    combined = np.einsum("pk,oikx->pxio", np.array(form.weight), weight.astype(np.float64)).astype(np.float32)
    matrices = combined.reshape(-1, places * inputs, outputs)
    starts = range(0, form.line_products, form.stride)
    parts = [matrices[start : start + form.stride].reshape(-1, outputs) for start in starts]
    return np.concatenate([pack_panels(part, tile) for part in parts])


def _lines(words: int) -> int:
    """`words` rounded up to whole cache lines."""
    return -(-words // LINE) * LINE
