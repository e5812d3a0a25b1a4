"""Convolutions of batch-last images [C, D1.., N] with computed weights, and their gradients.

Each weight multiplies vectors of batch rows, so nothing is packed, and any small number of channels is efficient. The
gradient with respect to the image is such a convolution too, with the weights mirrored and their channels swapped. If
the convolution has strides, its image has pixels that far apart, with zeros between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import ClassVar

from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Operand, Out, Request, Scratch
from lathe.core.kernels.shared import body as bodies
from lathe.core.kernels.shared.attributes import attribute, integers
from lathe.core.kernels.shared.body import with_bias
from lathe.core.kernels.shared.nest import has_plannable_types, row_major, traffic
from lathe.core.kernels.shared.window import Window

F32 = DType.FLOAT32
_SPARE = 3  # registers for a weight and the compiler's temporaries
_SUM_BYTES = 1 << 16  # of the sums of a task, so that the cache has space for lines of both images as well
_LONGEST = 7  # places of a window line whose sums fit the registers


@dataclass(frozen=True)
class BatchConvSpec(KernelSpec):
    """Y[m, i.., n] = epilogue(sum over c, k.. of W[m, c, k..] * X[c, i*s + k*d - p.., n], extras[m, i.., n]).

    s, d and p are the stride, the dilation and the padding before each axis. `rows` is the number of batch rows n.
    `channels` and `outputs` are those of one of `groups`. `steps` are the strides of W along m, c and the axes of the
    window (negative for mirrored windows), `origin` is the index of W's element at the window's place 0. With `spreads`
    above 1 the pixels of X are that far apart, with zeros between them. `extra_steps` are the strides of each extra
    along the outputs and along the batch rows. A tile has `together` outputs m by `vectors` vectors of batch rows n.
    """

    family: ClassVar[str] = "conv_batch"
    generator: ClassVar[str] = "conv.batch_cpu"
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

    s, d and p are as in BatchConvSpec, and `rows` is the number of batch rows n. `channels` and `outputs` are those of
    one of `groups`. A task computes `across` places of each line of the window
    for `together` outputs m and `chunk` channels c; its sums are vectors over batch rows n.
    """

    family: ClassVar[str] = "conv_batch_weight"
    generator: ClassVar[str] = "conv.batch_weight_cpu"
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
        """The number of lines of the window: the product of its extents along all axes but the last."""
        return prod(window.kernel for window in self.windows[:-1])

    @property
    def sum_bytes(self) -> int:
        """Bytes of scratch for the sums of a task: vectors of float32 for each of its outputs, channels and places."""
        return self.chunk * self.lines * self.together * self.across * self.lanes * F32.itemsize

    @property
    def summary(self) -> str:
        kernel = "x".join(str(window.kernel) for window in self.windows)
        return f"conv weight gradient {kernel} batch-last {self.together}x{self.across}"


def batch_conv(request: Request) -> KernelCall | None:
    """Selector of FusedConv of float32 over batch-last images; the weights may be computed. All sizes are numbers.

    None for other nodes, for `auto_pad` other than NOTSET, for an epilogue with operators that are not elementwise, and
    for extras of a shape that `_extra_strides` does not cover.
    """
    node = request.node
    x, w = node.inputs[:2]
    if x is None or w is None or not _are_images(node):
        return None
    extras = {i: value for i, value in enumerate(node.inputs) if i >= 2 and value is not None}
    moves = tuple(_extra_strides(node, i, value) for i, value in extras.items())
    known = tuple(move for move in moves if move is not None)
    body = node.attrs.get("epilogue")
    epilogue = body if isinstance(body, Graph) else None
    if len(known) < len(moves) or (epilogue is not None and not bodies.is_scalar(epilogue)):
        return None
    if node.input(2) is not None:
        epilogue = with_bias(epilogue, F32)
    outputs, channels, *kernel = _sizes(w)
    windows = _windows(node, _sizes(x)[1:-1], _sizes(node.output)[1:-1], kernel)
    steps = as_ints(row_major((outputs, channels, *kernel)))
    spec = _spec(request, windows, (1,) * len(windows), (channels, outputs), steps, 0, epilogue, known)
    return _call(node, spec, tuple(extras), node.output.tensor.size * (channels * prod(kernel)))


def batch_conv_transpose(request: Request) -> KernelCall | None:
    """Selector of ConvTranspose of batch-last float32 images, as convolutions with a mirrored window.

    Padding lets the window reach every pixel. None for other nodes, if the stride and the dilation of an axis have a
    common divisor above 1, if a size is not a number, and for an `output_shape` or an `auto_pad` other than NOTSET.
    """
    node = request.node
    x, w = node.inputs[:2]
    if x is None or w is None or not _are_images(node) or attribute(node, "output_shape"):
        return None
    (channels, outputs, *kernel), groups = _sizes(w), _groups(node)
    forward = _windows(node, _sizes(node.output)[1:-1], _sizes(x)[1:-1], kernel)
    if any(gcd(window.stride, window.dilation) != 1 for window in forward):
        return None
    taps = prod(kernel)
    steps = (taps, outputs * taps, *(-step for step in as_ints(row_major(kernel))))
    extras = (2,) if node.input(2) is not None else ()
    epilogue = with_bias(None, F32) if extras else None
    windows, spreads = tuple(map(_gradient_window, forward)), tuple(window.stride for window in forward)
    sizes = (channels // groups, outputs * groups)
    spec = _spec(request, windows, spreads, sizes, steps, taps - 1, epilogue, ((1, 0),) * len(extras))
    return _call(node, spec, extras, x.tensor.size * (outputs * taps))


def batch_weight_gradient(request: Request) -> KernelCall | None:
    """Selector of ConvWeightGradient of batch-last float32 images.

    None for other nodes, if a size is not a number, and for an `auto_pad` other than NOTSET.
    """
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
    """The size of the largest part when `whole` is cut into the fewest parts of at most `most`, all about equal."""
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
    """The spec with its tile: up to four vectors of rows (two if the CPU has fewer than 32 vector registers).

    The tile has as many outputs as the remaining registers hold.
    `sizes` are the channels of a group, and the outputs of all groups.
    """
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
    """Whether all tensors are float32 of known size, the layout is batch-last, and the padding is explicit."""
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    known = has_plannable_types(node) and all(value.tensor.is_static and value.dtype is F32 for value in values)
    explicit = attribute(node, "auto_pad") in (None, "", "NOTSET")
    return known and explicit and attribute(node, "layout") == "CHWN"


def _sizes(value: Value) -> tuple[int, ...]:
    return as_ints(value.shape)


def as_ints(dims: Sequence[Dim]) -> tuple[int, ...]:
    """The dimensions as ints. The caller makes sure that none has a symbol.

    A dimension with a symbol is left out, without an error: the tuple is then shorter than `dims`.
    """
    return tuple(extent for extent in dims if isinstance(extent, int))


def _groups(node: Node) -> int:
    return int(attribute(node, "group") or 1)


def _extra_strides(node: Node, index: int, value: Value) -> tuple[int, int] | None:
    """The strides of extra input `index` along the outputs and along the batch rows.

    (0, 0) if it holds one number, (1, 0) for one number per output (such as the bias, input 2), (elements per output,
    1) if it has the result's shape; otherwise None.
    """
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


def _gradient_window(window: Window) -> Window:
    """The window of the convolution that computes the gradient with respect to the image.

    Sizes and counts are swapped, the stride is 1, and padding lets it reach every place.
    """
    reach = (window.kernel - 1) * window.dilation
    before, after = reach - window.before, reach - window.after
    return Window(window.count, window.size, window.kernel, 1, window.dilation, before, after)
