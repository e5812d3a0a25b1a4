"""Kernels that custom operators generate with their own `write_kernel`."""

from __future__ import annotations

from lathe.core.codegen.lang import Kernel
from lathe.core.kernels.custom.spec import CustomSpec
from lathe.core.kernels.target import Target
from lathe.core.ops.opdef import registry


def generate(spec: CustomSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    registry.get(spec.op).write_kernel(k, spec)
    return k
