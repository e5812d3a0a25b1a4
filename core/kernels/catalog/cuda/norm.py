"""Normalizations on a GPU: layer, RMS, group and instance; batch normalization is elementwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from core.ir.graph import Node
from core.ir.types import DType
from core.kernels.catalog import norm as on_cpu
from core.kernels.catalog.base import KernelCall, KernelSpec, Request, covers, offers
from core.kernels.catalog.cuda.elementwise import tiled
from core.kernels.catalog.cuda.lines import Lines, covering
from core.kernels.catalog.cuda.product import FACTORS
from core.kernels.catalog.nest import Nest, has_plannable_types


@dataclass(frozen=True)
class NormSpec(KernelSpec):
    """Every line becomes (x - mean) / sqrt(variance + epsilon) * scale + bias; not `centered`: without mean.

    Operands: x, scale, bias if any, y, mean of each line if any, inverse deviation of each line if any. Those of the
    nests of `lines` are x, and the vectors of scale and bias; y lies as x does.
    """

    family: ClassVar[str] = "norm"
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


@covers("LayerNormalization", "RMSNormalization", "GroupNormalization", "InstanceNormalization", device="cuda")
def norm(request: Request) -> KernelCall | None:
    return next(_calls(request), None)


@offers("LayerNormalization", "RMSNormalization", "GroupNormalization", "InstanceNormalization", device="cuda")
def other_tiles(request: Request) -> Iterable[KernelCall]:
    return _calls(request)


@covers("BatchNormalization", device="cuda")
def batch_norm(request: Request) -> KernelCall | None:
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
        raise TypeError(f"{spec.key} is no layer normalization")
    along = Nest((spec.length,), ((1,), (1,)))
    for lines in covering(Nest((spec.rows,), ((spec.length,), (0,))), along):
        facts = (spec.epsilon, dtype, vector, spec.centered, spec.bias, spec.mean, spec.deviation)
        yield NormSpec(lines, *facts)


def _groups(spec: KernelSpec, dtype: DType, vector: DType) -> Iterator[NormSpec]:
    if not isinstance(spec, on_cpu.GroupNormSpec):
        raise TypeError(f"{spec.key} is no group normalization")
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
    """Whether data are floats, vectors floats of one type, and statistics float32."""
    vectors = [value.dtype for value in node.inputs[1:] if value is not None]
    data = [value.dtype for value in (node.inputs[0], node.output) if value is not None]
    statistics = all(value.dtype is DType.FLOAT32 for value in node.outputs[1:])
    known = has_plannable_types(node) and {*vectors, *data} <= FACTORS
    return known and len(set(vectors)) == 1 and len(set(data)) == 1 and statistics
