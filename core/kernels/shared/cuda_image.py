"""Images and sliding windows of GPU kernels, described by strides so that any layout works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import Request
from lathe.core.kernels.shared import body as bodies
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.body import is_computable_on_gpu, with_bias
from lathe.core.kernels.shared.cuda_product import Results
from lathe.core.kernels.shared.nest import Nest
from lathe.core.kernels.shared.window import Window


@dataclass(frozen=True)
class Image:
    """The strides in elements of an image [batch, spatial ..., channels], and the windows that belong to it.

    In a forward kernel the windows slide over the image. In a transposed one the image has one pixel for each window.
    """

    batch: Dim
    windows: tuple[Window, ...]
    batch_step: Dim
    steps: tuple[Dim, ...]  # along the spatial axes
    channel_step: Dim
    dtype: DType

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(window.count for window in self.windows)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(window.size for window in self.windows)

    @property
    def kernel(self) -> tuple[int, ...]:
        return tuple(window.kernel for window in self.windows)

    @property
    def places(self) -> int:
        """The number of places in a window."""
        return prod(self.kernel)

    @property
    def pixels(self) -> Dim:
        """The number of windows in the whole batch."""
        return self.batch * prod(self.counts)

    @property
    def reached(self) -> Dim:
        """The number of pixels of the whole batch over which the windows slide."""
        return self.batch * prod(self.sizes)


def image_axes(node: Node, rank: int) -> tuple[int, ...]:
    """The axes of an image of `rank` axes in the node's layout, in the order [batch, spatial ..., channels]."""
    match attribute(node, "layout"):
        case "NHWC":
            return tuple(range(rank))
        case "CHWN":
            return (rank - 1, *range(1, rank - 1), 0)
    return (0, *range(2, rank), 1)


def spatial(node: Node, value: Value) -> list[Dim]:
    """The spatial extents of the image `value` in the node's layout."""
    return [value.shape[axis] for axis in image_axes(node, len(value.shape))[1:-1]]


def strided_image(request: Request, value: Value, windows: tuple[Window, ...]) -> Image:
    """The image of a value of the node with its strides, and these windows."""
    batch, *axes, channel = image_axes(request.node, len(value.shape))
    strides = request.strides_of(value)
    steps = tuple(strides[axis] for axis in axes)
    return Image(value.shape[batch], windows, strides[batch], steps, strides[channel], value.dtype)


def results_of(request: Request, extras: Sequence[int]) -> tuple[Nest, Results]:
    """Two descriptions of how an image kernel stores its output Y: along the pixels, and along the channels.

    `extras` are the indices of the node's extra inputs. The loop nest has the axes [batch, spatial ...]; its operands
    are the extra inputs, then Y. `Results` has the epilogue, and the steps of the same tensors along the channels. If
    `extras` contains 2, that input is a bias, and the epilogue adds it first.
    """
    node, y = request.node, request.node.output
    axes = image_axes(node, len(y.shape))
    values = [value for i in extras if (value := node.inputs[i]) is not None]
    walks = [_walk(request, node, value, axes) for value in values]
    strides = request.strides_of(y)
    walks.append(tuple(strides[axis] for axis in axes))
    pixels = Nest(tuple(y.shape[axis] for axis in axes[:-1]), tuple(walk[:-1] for walk in walks)).collapsed()
    body, bias = node.attrs.get("epilogue"), node.input(2)
    epilogue = body if isinstance(body, Graph) else None
    if bias is not None and 2 in extras:
        epilogue = with_bias(epilogue, bias.dtype)
    steps = tuple(walk[-1] for walk in walks)
    canonical = bodies.canonical(epilogue, {}) if epilogue is not None else None
    computed = canonical.inputs[0].dtype if canonical is not None else y.dtype
    return pixels, Results(canonical, computed, tuple(v.dtype for v in values), steps[:-1], y.dtype, steps[-1])


def _walk(request: Request, node: Node, value: Value, axes: tuple[int, ...]) -> tuple[Dim, ...]:
    """The strides of an extra input, broadcast to the output, in the order of `axes`, of which the channels are last.

    Input 2, a bias, has one number for each channel.
    """
    if value is node.input(2):
        return (*(0 for _ in axes[1:]), 1)
    strides = request.walk(value, node.output.shape)
    return tuple(strides[axis] for axis in axes)


def has_computable_epilogue(node: Node) -> bool:
    """Whether the node has no epilogue, or one that can be fused into a GPU kernel."""
    epilogue = node.attrs.get("epilogue")
    return epilogue is None or (isinstance(epilogue, Graph) and is_computable_on_gpu(epilogue))
