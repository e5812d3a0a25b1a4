"""Convolutions of batch-last images [C, D1.., N] with computed weights, and their gradients.

A weight is a number that multiplies vectors of rows of the batch, so nothing is packed, and channels may be as few as
they like. The gradient with respect to the image is such a convolution too, of the other weights in the other order;
where the convolution has strides, of an image whose pixels stand that far apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import ClassVar

from core.ir.graph import Graph, Node, Value
from core.ir.types import Dim, DType
from core.kernels.catalog import body as bodies
from core.kernels.catalog.attributes import attribute, integers
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Operand, Out, Request, Scratch, covers
from core.kernels.catalog.conv import with_bias
from core.kernels.catalog.nest import has_plannable_types, row_major, traffic
from core.kernels.catalog.pool import Window

F32 = DType.FLOAT32
_SPARE = 3  # registers for a weight and what the compiler needs
_SUM_BYTES = 1 << 16  # of the sums of a task, beside which lines of both images have room in the cache
_LONGEST = 7  # places of a line of the window whose sums fit the registers


@dataclass(frozen=True)
class BatchConvSpec(KernelSpec):
    """Y[m, i.., n] = epilogue(sum over c, k.. of W[m, c, k..] * X[c, i*s + k*d - p.., n], extras[m, i.., n]).

    `channels` and `outputs` are those of one of `groups`, each of which has weights of its own. `steps` are the strides
    of W along m, c and the axes of the window, `origin` its first element: mirrored windows have negative ones. With
    `spreads` above 1 the pixels of X stand that far apart, zeros between them. `extra_steps`: how far an extra moves
    from one output to the next, and from one row of the batch to the next. A tile is `together` outputs m by `vectors`
    vectors of rows n.
    """

    family: ClassVar[str] = "conv_batch"
    rows: int
    groups: int
    windows: tuple[Window, ...]
    spreads: tuple[int, ...]
    channels: int
    outputs: int
    steps: tuple[int, ...]
    origin: int
    epilogue: Graph | None
    extra_steps: tuple[tuple[int, int], ...]
    together: int
    vectors: int
    lanes: int

    @property
    def summary(self) -> str:
        kernel = "x".join(str(window.kernel) for window in self.windows)
        return f"conv {kernel} batch-last {self.together}x{self.vectors * self.lanes}"


@dataclass(frozen=True)
class BatchWeightSpec(KernelSpec):
    """dW[m, c, k..] = sum over i.., n of dY[m, i.., n] * X[c, i*s + k*d - p.., n].

    `channels` and `outputs` are those of one of `groups`. A task is `across` places of every line of the window for
    `together` outputs m and `chunk` channels c; its sums are vectors over rows n.
    """

    family: ClassVar[str] = "conv_batch_weight"
    rows: int
    groups: int
    windows: tuple[Window, ...]
    channels: int
    outputs: int
    together: int
    across: int
    chunk: int
    lanes: int

    @property
    def lines(self) -> int:
        """Lines of the window."""
        return prod(window.kernel for window in self.windows[:-1])

    @property
    def sum_bytes(self) -> int:
        """What the sums of a task take."""
        return self.chunk * self.lines * self.together * self.across * self.lanes * F32.itemsize

    @property
    def summary(self) -> str:
        kernel = "x".join(str(window.kernel) for window in self.windows)
        return f"conv weight gradient {kernel} batch-last {self.together}x{self.across}"


@covers("FusedConv")
def batch_conv(request: Request) -> KernelCall | None:
    """For batch-last images of known size and computed weights."""
    node = request.node
    x, w = node.inputs[:2]
    if x is None or w is None or not _are_images(node):
        return None
    extras = {i: value for i, value in enumerate(node.inputs) if i >= 2 and value is not None}
    moves = tuple(_moves(node, i, value) for i, value in extras.items())
    known = tuple(move for move in moves if move is not None)
    body = node.attrs.get("epilogue")
    epilogue = body if isinstance(body, Graph) else None
    if len(known) < len(moves) or (epilogue is not None and not bodies.is_scalar(epilogue)):
        return None
    if node.input(2) is not None:
        epilogue = with_bias(epilogue, F32)
    outputs, channels, *kernel = _sizes(w)
    windows = _windows(node, _sizes(x)[1:-1], _sizes(node.output)[1:-1], kernel)
    steps = numbers(row_major((outputs, channels, *kernel)))
    spec = _spec(request, windows, (1,) * len(windows), (channels, outputs), steps, 0, epilogue, known)
    return _call(node, spec, tuple(extras), node.output.tensor.size * (channels * prod(kernel)))


@covers("ConvTranspose")
def batch_conv_transpose(request: Request) -> KernelCall | None:
    """A convolution with the window mirrored, padded by what a window reaches beyond the padding."""
    node = request.node
    x, w = node.inputs[:2]
    if x is None or w is None or not _are_images(node) or attribute(node, "output_shape"):
        return None
    (channels, outputs, *kernel), groups = _sizes(w), _groups(node)
    forward = _windows(node, _sizes(node.output)[1:-1], _sizes(x)[1:-1], kernel)
    if any(gcd(window.stride, window.dilation) != 1 for window in forward):
        return None
    taps = prod(kernel)
    steps = (taps, outputs * taps, *(-step for step in numbers(row_major(kernel))))
    extras = (2,) if node.input(2) is not None else ()
    epilogue = with_bias(None, F32) if extras else None
    windows, spreads = tuple(map(_mirrored, forward)), tuple(window.stride for window in forward)
    sizes = (channels // groups, outputs * groups)
    spec = _spec(request, windows, spreads, sizes, steps, taps - 1, epilogue, ((1, 0),) * len(extras))
    return _call(node, spec, extras, x.tensor.size * (outputs * taps))


@covers("ConvWeightGradient")
def batch_weight_gradient(request: Request) -> KernelCall | None:
    node = request.node
    x, dy = node.inputs
    if x is None or dy is None or not _are_images(node):
        return None
    (channels, *sizes, rows), (outputs, *counts, _) = _sizes(x), _sizes(dy)
    kernel, groups, target = integers(node, "kernel_shape") or (), _groups(node), request.cpu
    windows = _windows(node, sizes, counts, kernel)
    across = even_part(kernel[-1], _LONGEST)
    together = even_part(outputs // groups, max((target.registers - _SPARE - across) // across, 1))
    own = (channels // groups, outputs // groups)
    most = _SUM_BYTES // (prod(kernel[:-1]) * together * across * target.vector_bytes)
    chunk = even_part(own[0], max(most, 1))
    spec = BatchWeightSpec(rows, groups, windows, *own, together, across, chunk, target.lanes)
    flops = dy.tensor.size * (2 * own[0] * prod(kernel))
    operands = (In(0), In(1), Out(), Scratch(spec.sum_bytes))
    return KernelCall(spec, operands, flops=flops, bytes=traffic(node))


def even_part(whole: int, most: int) -> int:
    """The largest part of at most `most` when a whole is cut into as few parts as can be, all about as large."""
    return -(-whole // -(-whole // most))


def _call(node: Node, spec: BatchConvSpec, extras: tuple[int, ...], products: Dim) -> KernelCall:
    operands: tuple[Operand, ...] = (In(0), In(1), *(In(i) for i in extras), Out())
    return KernelCall(spec, operands, flops=products * 2, bytes=traffic(node))


def _spec(
    request: Request,
    windows: tuple[Window, ...],
    spreads: tuple[int, ...],
    sizes: tuple[int, int],
    steps: tuple[int, ...],
    origin: int,
    epilogue: Graph | None,
    extra_steps: tuple[tuple[int, int], ...],
) -> BatchConvSpec:
    """`sizes`: channels of a group, and all outputs. The tile: up to four vectors of rows, and as many outputs as
    registers are left for."""
    target, groups, rows = request.cpu, _groups(request.node), _sizes(request.node.output)[-1]
    channels, outputs = sizes[0], sizes[1] // groups
    vectors = min(-(-rows // target.lanes), 4 if target.registers >= 32 else 2)
    together = even_part(outputs, max((target.registers - _SPARE - vectors) // vectors, 1))
    return BatchConvSpec(
        rows,
        groups,
        windows,
        spreads,
        channels,
        outputs,
        steps,
        origin,
        bodies.canonical(epilogue, {}) if epilogue is not None else None,
        extra_steps,
        together,
        vectors,
        target.lanes,
    )


def _are_images(node: Node) -> bool:
    """Whether a node computes with batch-last images of float32 and of known size, its padding explicit."""
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    known = has_plannable_types(node) and all(value.tensor.is_static and value.dtype is F32 for value in values)
    explicit = attribute(node, "auto_pad") in (None, "", "NOTSET")
    return known and explicit and attribute(node, "layout") == "CHWN"


def _sizes(value: Value) -> tuple[int, ...]:
    return numbers(value.shape)


def numbers(dims: Sequence[Dim]) -> tuple[int, ...]:
    """Dimensions that are all known."""
    return tuple(extent for extent in dims if isinstance(extent, int))


def _groups(node: Node) -> int:
    return int(attribute(node, "group") or 1)


def _moves(node: Node, index: int, value: Value) -> tuple[int, int] | None:
    """How far an operand of the epilogue moves from one output to the next, and from one row to the next: it is one
    number, has one for each output (as the bias does, input 2), or one for each result. None for anything else."""
    shape, result = value.shape, _sizes(node.output)
    if value.tensor.size == 1:
        return 0, 0
    if index == 2 or (len(shape) == len(result) and all(extent == 1 for extent in shape[1:])):
        return 1, 0
    return (prod(result[1:]), 1) if shape == result else None


def _windows(node: Node, sizes: Sequence[int], counts: Sequence[int], kernel: Sequence[int]) -> tuple[Window, ...]:
    rank = len(kernel)
    strides, dilations = (integers(node, name) or (1,) * rank for name in ("strides", "dilations"))
    pads = integers(node, "pads") or (0,) * (2 * rank)
    axes = zip(sizes, counts, kernel, strides, dilations, pads[:rank], pads[rank:], strict=True)
    return tuple(Window(*facts) for facts in axes)


def _mirrored(window: Window) -> Window:
    """The window of the gradient: sizes and counts exchanged, padded so that every place is reached."""
    reach = (window.kernel - 1) * window.dilation
    before, after = reach - window.before, reach - window.after
    return Window(window.count, window.size, window.kernel, 1, window.dilation, before, after)
