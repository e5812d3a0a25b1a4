"""Softmax, GuardedSoftmax and LogSoftmax along any axis on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from lathe.core.ir.types import DType
from lathe.core.kernels.call import KernelCall, KernelSpec, Request
from lathe.core.kernels.shared.cuda_lines import Lines, covering, middle_axis
from lathe.core.kernels.shared.cuda_product import FACTORS
from lathe.core.kernels.softmax import spec as on_cpu


@dataclass(frozen=True)
class SoftmaxSpec(KernelSpec):
    """The softmax of each line; its logarithm if `log`; with zeros in place of NaN if `guarded`.

    The operands are x and y, which have the same layout.
    """

    family: ClassVar[str] = "softmax"
    generator: ClassVar[str] = "softmax.cuda"
    lines: Lines
    dtype: DType
    log: bool
    guarded: bool

    @property
    def summary(self) -> str:
        return f"softmax({self.lines.length}, {self.lines.tile})"


def softmax(request: Request) -> KernelCall | None:
    """Selector of Softmax, GuardedSoftmax and LogSoftmax of float32, float16 and bfloat16, along any axis.

    None for other types, and if generated code cannot compute a dimension.
    """
    return next(_calls(request), None)


def other_tiles(request: Request) -> Iterable[KernelCall]:
    """Offers of the kernel of `softmax` with every candidate tile, the selector's own included.

    No offers for nodes that `softmax` does not cover.
    """
    return _calls(request)


def _calls(request: Request) -> Iterator[KernelCall]:
    call = on_cpu.call_of(request, FACTORS)
    if call is None or not isinstance(call.spec, on_cpu.SoftmaxSpec):
        return
    spec, dtype = call.spec, request.node.output.dtype
    for lines in covering(*middle_axis(spec.outer, spec.length, spec.inner)):
        yield replace(call, spec=SoftmaxSpec(lines, dtype, spec.log, spec.guarded), grid=(lines.programs,))
