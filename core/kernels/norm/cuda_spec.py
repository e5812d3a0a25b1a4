"""Normalizations on a GPU: layer, RMS, group and instance; batch normalization is elementwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from lathe.core.ir.graph import Node
from lathe.core.ir.types import DType
from lathe.core.kernels.call import KernelCall, KernelSpec, Request
from lathe.core.kernels.elementwise.cuda_spec import tiled
from lathe.core.kernels.norm import spec as on_cpu
from lathe.core.kernels.shared.cuda_lines import Lines, covering
from lathe.core.kernels.shared.cuda_product import FACTORS
from lathe.core.kernels.shared.nest import Nest, has_plannable_types


@dataclass(frozen=True)
class NormSpec(KernelSpec):
    """Each line becomes (x - mean) / sqrt(variance + epsilon) * scale + bias; if not `centered`, the mean is 0.

    The operands are x, scale, bias if any, y, the mean of each line if any, the inverse deviation of each line if any.
    The operands of the nests of `lines` are x, and the vectors of scale and bias; y has the strides of x.
    """

    family: ClassVar[str] = "norm"
    generator: ClassVar[str] = "norm.cuda"
    lines: Lines
    epsilon: float
    dtype: DType  # of x and y
    vector: DType  # of scale and bias
    centered: bool = True
    bias: bool = True
    mean: bool = False
    deviation: bool = False

    @property
    def summary(self) -> str:
        return f"{'norm' if self.centered else 'rms norm'}({self.lines.length}, {self.lines.tile})"


def norm(request: Request) -> KernelCall | None:
    """Selector of LayerNormalization, RMSNormalization, GroupNormalization and InstanceNormalization.

    x and y share one of the types float32, float16 and bfloat16, scale and bias share one; other outputs are float32.
    None for other nodes, if generated code cannot compute a dimension, if the length of a row (layer, RMS) or the
    number of channels (group, instance) is not a number, and if scale or bias has another number of elements.
    """
    return next(_calls(request), None)


def other_tiles(request: Request) -> Iterable[KernelCall]:
    """Offers of the normalisation of `norm` with every candidate tile, the selector's own included.

    No offers for nodes that `norm` does not cover.
    """
    return _calls(request)


def batch_norm(request: Request) -> KernelCall | None:
    """Selector of float32 BatchNormalization with given mean and variance, as an elementwise kernel.

    None for other types, in `training_mode`, for several outputs, and if generated code cannot compute a dimension.
    """
    call = on_cpu.batch_norm(request)
    return next(iter(tiled(call)), None) if call is not None else None


def _calls(request: Request) -> Iterator[KernelCall]:
    node = request.node
    layer = node.op in ("LayerNormalization", "RMSNormalization")
    call = (on_cpu.layer_call_of if layer else on_cpu.group_call_of)(request, _is_covered)
    vector = node.inputs[1]
    if call is None or vector is None:
        return
    dtypes = (node.output.dtype, vector.dtype)
    for spec in _layers(call.spec, *dtypes) if layer else _groups(call.spec, *dtypes):
        yield replace(call, spec=spec, grid=(spec.lines.programs,))


def _layers(spec: KernelSpec, dtype: DType, vector: DType) -> Iterator[NormSpec]:
    if not isinstance(spec, on_cpu.LayerNormSpec):
        raise TypeError(f"spec: expected a layer normalization, got {spec.key}")
    along = Nest((spec.length,), ((1,), (1,)))
    for lines in covering(Nest((spec.rows,), ((spec.length,), (0,))), along):
        facts = (spec.epsilon, dtype, vector, spec.centered, spec.bias, spec.mean, spec.deviation)
        yield NormSpec(lines, *facts)


def _groups(spec: KernelSpec, dtype: DType, vector: DType) -> Iterator[NormSpec]:
    if not isinstance(spec, on_cpu.GroupNormSpec):
        raise TypeError(f"spec: expected a group normalization, got {spec.key}")
    channels, pixels = spec.channels, spec.pixels
    whole = pixels * spec.groups * channels  # elements of an image
    step = channels if spec.last else channels * pixels
    groups = Nest((spec.batch, spec.groups), ((whole, step), (0, channels)))
    if spec.last:
        along = Nest((pixels, channels), ((spec.groups * channels, 1), (0, 1)))
    else:
        along = Nest((channels, pixels), ((pixels, 1), (1, 0)))
    for lines in covering(groups, along):
        yield NormSpec(lines, spec.epsilon, dtype, vector)


def _is_covered(node: Node) -> bool:
    """Whether the data (x and y) share one float type, scale and bias share one, and the other outputs are float32."""
    vectors = [value.dtype for value in node.inputs[1:] if value is not None]
    data = [value.dtype for value in (node.inputs[0], node.output) if value is not None]
    statistics = all(value.dtype is DType.FLOAT32 for value in node.outputs[1:])
    known = has_plannable_types(node) and {*vectors, *data} <= FACTORS
    return known and len(set(vectors)) == 1 and len(set(data)) == 1 and statistics
