"""Kernels that the definitions of custom operators write themselves."""

from __future__ import annotations

from core.codegen.lang import Kernel
from core.kernels.catalog.custom import CustomSpec
from core.kernels.target import Target
from core.ops import registry


def generate(spec: CustomSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    registry.get(spec.op).write_kernel(k, spec)
    return k
