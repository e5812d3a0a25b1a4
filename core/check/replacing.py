"""When a kernel may write a result where one of its operands lies.

Only where it reads every element of the operand before it writes the one in its place, which has the same bytes. What
the operator means decides which operands are read so; the family of the kernel decides whether its code keeps to that.
The tests run kernels of all these families on operands that they overwrite (tests/core/check/test_replacing.py).
"""

from __future__ import annotations

from collections.abc import Callable

from core.check.boxes import Layout
from core.ir.graph import Graph, Node
from core.kernels.catalog.base import KernelSpec
from core.ops import registry

# The first extra input of each operator with an epilogue. What comes before is read for many results.
_EXTRAS = {"FusedMatMul": 2, "FusedConv": 3, "PooledConv": 3}
_LINES = ("Softmax", "GuardedSoftmax", "LogSoftmax", "LayerNormalization", "RMSNormalization", "GroupNormalization",
          "InstanceNormalization")  # fmt: skip
_SCATTERS = ("ScatterND", "ScatterElements")
_ONE_BY_ONE = frozenset({"elementwise"})  # families that go through the elements of all operands together
_BY_LINES = frozenset({"softmax", "layernorm", "groupnorm", "norm"})  # that finish a line or group before the next
_SCATTERING = frozenset({"scatter", "scatter_elements"})  # that copy an element before they change its copy

# Families that read an extra right before they write the result: not where the sums wait in the output meanwhile.
_FINISHING: dict[str, Callable[[KernelSpec], bool]] = {
    "gemm": lambda spec: not getattr(spec, "deferred", False),
    "conv": lambda spec: not _finish_waits(spec),
    "strassen": lambda spec: not _finish_waits(spec),
    "amx": lambda spec: True,
    "depthwise": lambda spec: True,
    "winograd": lambda spec: True,
    "winograd_lines": lambda spec: True,
    "cublaslt": lambda spec: True,
}

# A simulated device computes a whole result before it writes any of it, but stands for one that does not.
_SIMULATED = "reference"


def may_replace(node: Node, spec: KernelSpec, index: int, source: Layout, output: int, target: Layout) -> bool:
    """Whether a kernel may write output `output` of the node, which lies at `target`, over input `index`, which lies at
    `source`."""
    places = _positions(node, spec, index, source, output, target)
    return places is not None and places[0].is_same(places[1])


def _positions(
    node: Node, spec: KernelSpec, index: int, source: Layout, output: int, target: Layout
) -> tuple[Layout, Layout] | None:
    """Operand and result, walked together: the kernel reads each place of the first before it writes the same place of
    the second. None where it reads in another order."""
    family = spec.family
    simulated = family == _SIMULATED
    if _is_elementwise(node) and (family in _ONE_BY_ONE or simulated):
        return _broadcast(source, target)
    if output != 0:
        return None
    if node.op == "BatchNormalization" and index == 0 and (family in _ONE_BY_ONE or simulated):
        return source, target
    if node.op in _LINES and index == 0 and (family in _BY_LINES or simulated):
        return source, target
    if node.op in _SCATTERS and index == 0 and (family in _SCATTERING or simulated):
        return source, target
    if node.op in _EXTRAS and index >= _EXTRAS[node.op] and (simulated or _finishes(spec)):
        return _broadcast(source, _product(node, target))
    return None


def _is_elementwise(node: Node) -> bool:
    found = registry.find(node.op)
    return node.op == "FusedElementwise" or (found is not None and found.is_elementwise)


def _broadcast(source: Layout, target: Layout) -> tuple[Layout, Layout] | None:
    walked = source.broadcast(target.shape)
    return (walked, target) if walked is not None else None


def _product(node: Node, target: Layout) -> Layout:
    """The output of a product before `perm_y`: extras broadcast to that."""
    perm = node.attrs.get("perm_y")
    if not isinstance(perm, tuple):
        return target
    back = [perm.index(axis) for axis in range(len(perm))]
    return target.permuted(back)


def _finishes(spec: KernelSpec) -> bool:
    return spec.family in _FINISHING and _FINISHING[spec.family](spec)


def _finish_waits(spec: KernelSpec) -> bool:
    finish = getattr(spec, "finish", None)
    return bool(getattr(finish, "deferred", False)) and isinstance(getattr(finish, "epilogue", None), Graph)
