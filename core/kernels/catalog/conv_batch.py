"""Convolutions of batch-last images [C, H, W, N] with computed weights, and their gradients.

A weight is a number that multiplies vectors of rows of the batch, so nothing is packed, and channels may be as few as
they like. The gradient with respect to the image is such a convolution too, of the other weights in the other order;
where the convolution has strides, of an image whose pixels stand that far apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import ClassVar

from core.ir.dim import product
from core.ir.graph import Graph, Node, Value
from core.ir.types import Dim, DType
from core.kernels.catalog import body as bodies
from core.kernels.catalog.attributes import attribute, integers
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Operand, Out, Request, covers
from core.kernels.catalog.conv import with_bias
from core.kernels.catalog.nest import has_plannable_types, traffic
from core.kernels.catalog.pool import Window

F32 = DType.FLOAT32
_SPARE = 3  # registers for a weight and what the compiler needs
_LONGEST = 7  # places of a line of the window whose sums fit the registers


@dataclass(frozen=True)
class BatchConvSpec(KernelSpec):
    """Y[m, i, j, n] = epilogue(sum over c, k, l of W[m, c, k, l] * X[c, i*s + k*d - p, j*s + l*d - p, n], extras[m]).

    `channels` and `outputs` are those of one of `groups`, each of which has weights of its own. `steps` are the strides
    of W along m, c, k and l, `origin` its first element: mirrored windows have negative ones. With `spreads` above 1
    the pixels of X stand that far apart, zeros between them. A tile is `together` outputs m by `vectors` vectors of
    rows n.
    """

    family: ClassVar[str] = "conv_batch"
    rows: int
    groups: int
    windows: tuple[Window, Window]
    spreads: tuple[int, int]
    channels: int
    outputs: int
    steps: tuple[int, int, int, int]
    origin: int
    epilogue: Graph | None
    extra_steps: tuple[int, ...]  # 0 for an extra that is one number
    together: int
    vectors: int
    lanes: int

    @property
    def summary(self) -> str:
        kernel = "x".join(str(window.kernel) for window in self.windows)
        return f"conv {kernel} batch-last {self.together}x{self.vectors * self.lanes}"


@dataclass(frozen=True)
class BatchWeightSpec(KernelSpec):
    """dW[m, c, k, l] = sum over i, j, n of dY[m, i, j, n] * X[c, i*s + k*d - p, j*s + l*d - p, n].

    `channels` and `outputs` are those of one of `groups`. A task is `across` places of one line k of the window for
    `together` outputs m and one channel c; its sums are vectors over rows n.
    """

    family: ClassVar[str] = "conv_batch_weight"
    rows: int
    groups: int
    windows: tuple[Window, Window]
    channels: int
    outputs: int
    together: int
    across: int
    lanes: int

    @property
    def summary(self) -> str:
        kernel = "x".join(str(window.kernel) for window in self.windows)
        return f"conv weight gradient {kernel} batch-last {self.together}x{self.across}"


@covers("FusedConv")
def batch_conv(request: Request) -> KernelCall | None:
    """For batch-last images of known size and computed weights; the epilogue's extras hold one number per output."""
    node = request.node
    images = _images(node, 0)
    w = node.inputs[1]
    if images is None or w is None or not _is_plain(node):
        return None
    (_, height, width, _), (outputs, lines, columns, _) = images, _sizes(node.output)
    channels = _sizes(w)[1]  # of a group
    windows = _windows(node, (height, width), (lines, columns), _sizes(w)[2:])
    extras = [(i, value) for i, value in enumerate(node.inputs) if i >= 2 and value is not None]
    if any(value.dtype is not F32 or not _is_per_output(i, value) for i, value in extras):
        return None
    body = node.attrs.get("epilogue")
    epilogue = body if isinstance(body, Graph) else None
    if epilogue is not None and not bodies.is_scalar(epilogue):
        return None
    if node.input(2) is not None:
        epilogue = with_bias(epilogue, F32)
    taps = windows[0].kernel * windows[1].kernel
    steps = (channels * taps, taps, windows[1].kernel, 1)
    moves = tuple(int(value.tensor.size != 1) for _, value in extras)
    spec = _spec(request, windows, (1, 1), (channels, outputs), steps, 0, epilogue, moves)
    return _call(node, spec, tuple(i for i, _ in extras), node.output.tensor.size * (channels * taps))


@covers("ConvTranspose")
def batch_conv_transpose(request: Request) -> KernelCall | None:
    """A convolution with the window mirrored, padded by what a window reaches beyond the padding."""
    node = request.node
    images = _images(node, 0)
    w = node.inputs[1]
    if images is None or w is None or not _is_plain(node):
        return None
    (channels, height, width, _), (outputs, lines, columns, _) = images, _sizes(node.output)
    forward = _windows(node, (lines, columns), (height, width), _sizes(w)[2:])
    if any(gcd(window.stride, window.dilation) != 1 for window in forward) or attribute(node, "output_shape"):
        return None
    mirrored = [_mirrored(window) for window in forward]
    line, taps = forward[1].kernel, forward[0].kernel * forward[1].kernel
    groups = _groups(node)
    steps = (taps, outputs // groups * taps, -line, -1)
    windows, spreads = (mirrored[0], mirrored[1]), (forward[0].stride, forward[1].stride)
    extras = (2,) if node.input(2) is not None else ()
    epilogue = with_bias(None, F32) if extras else None
    sizes = (channels // groups, outputs)
    spec = _spec(request, windows, spreads, sizes, steps, taps - 1, epilogue, (1,) * len(extras))
    return _call(node, spec, extras, product(images) * (outputs // groups * taps))


@covers("ConvWeightGradient")
def batch_weight_gradient(request: Request) -> KernelCall | None:
    node = request.node
    images, dy = _images(node, 0), _images(node, 1)
    if images is None or dy is None or not _is_plain(node):
        return None
    (channels, height, width, rows), (outputs, lines, columns, _) = images, dy
    kernel, groups = integers(node, "kernel_shape") or (), _groups(node)
    windows = _windows(node, (height, width), (lines, columns), kernel)
    across = even_part(windows[1].kernel, _LONGEST)
    most = max((request.target.registers - _SPARE - across) // across, 1)
    together = even_part(outputs // groups, most)
    lanes = request.target.lanes
    spec = BatchWeightSpec(rows, groups, windows, channels // groups, outputs // groups, together, across, lanes)
    flops = 2 * product(dy) * (channels // groups) * windows[0].kernel * windows[1].kernel
    return KernelCall(spec, (In(0), In(1), Out()), flops=flops, bytes=traffic(node))


def even_part(whole: int, most: int) -> int:
    """The largest part of at most `most` when a whole is cut into as few parts as can be, all about as large."""
    return -(-whole // -(-whole // most))


def _call(node: Node, spec: BatchConvSpec, extras: tuple[int, ...], products: Dim) -> KernelCall:
    operands: tuple[Operand, ...] = (In(0), In(1), *(In(i) for i in extras), Out())
    return KernelCall(spec, operands, flops=products * 2, bytes=traffic(node))


def _spec(
    request: Request,
    windows: tuple[Window, Window],
    spreads: tuple[int, int],
    sizes: tuple[int, int],
    steps: tuple[int, int, int, int],
    origin: int,
    epilogue: Graph | None,
    extra_steps: tuple[int, ...],
) -> BatchConvSpec:
    """`sizes`: channels of a group, and all outputs. The tile: up to four vectors of rows, and as many outputs as
    registers are left for."""
    target, groups, rows = request.target, _groups(request.node), _sizes(request.node.output)[3]
    channels, outputs = sizes[0], sizes[1] // groups
    vectors = min(-(-rows // target.lanes), 4 if target.registers >= 32 else 2)
    together = even_part(outputs, max((target.registers - _SPARE - vectors) // vectors, 1))
    epilogue = bodies.canonical(epilogue, {}) if epilogue is not None else None
    return BatchConvSpec(
        rows,
        groups,
        windows,
        spreads,
        channels,
        outputs,
        steps,
        origin,
        epilogue,
        extra_steps,
        together,
        vectors,
        target.lanes,
    )


def _images(node: Node, index: int) -> tuple[int, ...] | None:
    """The extents C, H, W, N of a batch-last input of float32; None for anything else."""
    value = node.inputs[index]
    if attribute(node, "layout") != "CHWN" or value is None or value.dtype is not F32 or len(value.shape) != 4:
        return None
    static = has_plannable_types(node) and all(
        v.tensor.is_static for v in (*node.inputs, *node.outputs) if v is not None
    )
    return _sizes(value) if static else None


def _sizes(value: Value) -> tuple[int, ...]:
    return tuple(extent for extent in value.shape if isinstance(extent, int))


def _is_plain(node: Node) -> bool:
    """Whether the padding is explicit."""
    return attribute(node, "auto_pad") in (None, "", "NOTSET")


def _groups(node: Node) -> int:
    return int(attribute(node, "group") or 1)


def _is_per_output(index: int, value: Value) -> bool:
    """Whether an operand of the epilogue has one number for each output channel, or one for all.

    The bias (input 2) is a vector of them; others broadcast to [M, H, W, N].
    """
    shape = value.shape
    return index == 2 or value.tensor.size == 1 or (len(shape) == 4 and all(extent == 1 for extent in shape[1:]))


def _windows(
    node: Node, sizes: tuple[int, ...], counts: tuple[int, ...], kernel: tuple[int, ...]
) -> tuple[Window, Window]:
    strides, dilations = (integers(node, name) or (1, 1) for name in ("strides", "dilations"))
    pads = integers(node, "pads") or (0, 0, 0, 0)
    axes = zip(sizes, counts, kernel, strides, dilations, pads[:2], pads[2:], strict=True)
    first, second = (Window(*facts) for facts in axes)
    return first, second


def _mirrored(window: Window) -> Window:
    """The window of the gradient: sizes and counts exchanged, padded so that every place is reached."""
    reach = (window.kernel - 1) * window.dilation
    before, after = reach - window.before, reach - window.after
    return Window(window.count, window.size, window.kernel, 1, window.dilation, before, after)
