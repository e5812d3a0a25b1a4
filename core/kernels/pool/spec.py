"""MaxPool and AveragePool in any layout, with any number of spatial axes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Out, Request
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.nest import has_plannable_types, traffic
from lathe.core.kernels.shared.window import Window, windows_of
from lathe.core.kernels.shared.words import NARROW, compute_dtype

_FLOATS = NARROW | {DType.FLOAT32}
_DTYPES = {"MaxPool": _FLOATS | {DType.INT8, DType.UINT8}, "AveragePool": _FLOATS}


@dataclass(frozen=True)
class PoolSpec(KernelSpec):
    """Pools of images [batch, spatial ..., channels]; a plane of a channels-first image is an image of one channel."""

    family: ClassVar[str] = "pool"
    generator: ClassVar[str] = "pool.cpu"
    average: bool
    include_pad: bool  # padding counts in an average's divisor
    dtype: DType
    batch: Dim
    windows: tuple[Window, ...]
    channels: Dim
    pitches: tuple[Dim, Dim]  # elements between pixels, of the image and of the result

    @property
    def computed(self) -> DType:
        """The type of elements in registers: float32 for narrow floats, otherwise `dtype`."""
        return compute_dtype(self.dtype)

    @property
    def taps(self) -> int:
        """The number of places in a window."""
        return prod(window.kernel for window in self.windows)

    @property
    def summary(self) -> str:
        kind = "average" if self.average else "max"
        return f"{kind}pool({'x'.join(str(w.kernel) for w in self.windows)}, {self.channels} channels)"


def pool(request: Request) -> KernelCall | None:
    """Selector of MaxPool without indices and of AveragePool, over images and results of known spatial extents.

    The types are float32, float16 and bfloat16, for MaxPool also int8 and uint8. Batch and channels may have symbols.
    None for other nodes, and if the pixels of x or y are not evenly spaced in memory.
    """
    node = request.node
    x = node.inputs[0]
    if x is None or not has_plannable_types(node) or len(node.outputs) > 1 or x.dtype not in _DTYPES[node.op]:
        return None
    last = attribute(node, "layout") != "NCHW"  # in batch-last images, batch rows take the place of the channels
    spatial, results = (v.shape[1:-1] if last else v.shape[2:] for v in (x, node.output))
    windows = windows_of(node, spatial, results)
    if windows is None:
        return None
    batch, channels = (x.shape[0], x.shape[-1]) if last else (x.shape[0] * x.shape[1], 1)
    average = node.op == "AveragePool"
    pitches = (request.pitch(x), request.pitch(node.output)) if last else (1, 1)
    if pitches[0] is None or pitches[1] is None:
        return None
    padded = bool(attribute(node, "count_include_pad"))
    spec = PoolSpec(average, padded, x.dtype, batch, windows, channels, (pitches[0], pitches[1]))
    flops = node.output.tensor.size * prod(w.kernel for w in windows)
    strided = (In(0), Out()) if last else ()
    return KernelCall(spec, (In(0), Out()), strided=strided, flops=flops, bytes=traffic(node))
