"""Softmax, GuardedSoftmax and LogSoftmax along any axis on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from core.ir.types import DType
from core.kernels.catalog import softmax as on_cpu
from core.kernels.catalog.base import KernelCall, KernelSpec, Request, covers, offers
from core.kernels.catalog.cuda.lines import Lines, covering, middle_axis
from core.kernels.catalog.cuda.product import FACTORS


@dataclass(frozen=True)
class SoftmaxSpec(KernelSpec):
    """Of every line; the logarithm of the result when `log`; zeros in place of what is no number when `guarded`.
    Operands: x and y, which lie alike."""

    family: ClassVar[str] = "softmax"
    lines: Lines
    dtype: DType
    log: bool
    guarded: bool

    @property
    def summary(self) -> str:
        return f"softmax({self.lines.length}, {self.lines.tile})"


@covers("Softmax", "GuardedSoftmax", "LogSoftmax", device="cuda")
def softmax(request: Request) -> KernelCall | None:
    return next(_calls(request), None)


@offers("Softmax", "GuardedSoftmax", "LogSoftmax", device="cuda")
def other_tiles(request: Request) -> Iterable[KernelCall]:
    return _calls(request)


def _calls(request: Request) -> Iterator[KernelCall]:
    call = on_cpu.call_of(request, FACTORS)
    if call is None or not isinstance(call.spec, on_cpu.SoftmaxSpec):
        return
    spec, dtype = call.spec, request.node.output.dtype
    for lines in covering(*middle_axis(spec.outer, spec.length, spec.inner)):
        yield replace(call, spec=SoftmaxSpec(lines, dtype, spec.log, spec.guarded), grid=(lines.programs,))
