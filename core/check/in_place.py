"""In-place results: whether a kernel may write a result into the memory of one of its operands.

The kernel may if it reads every element of the operand before it writes the element at the same bytes. The semantics of
the operator decide which operands can be read that way; the kernel family decides whether its code does so. The tests
run kernels of all these families on operands that they overwrite (tests/core/check/test_in_place_kernels.py).
"""

from __future__ import annotations

from collections.abc import Callable

from lathe.core.check.boxes import Layout
from lathe.core.ir.graph import Graph, Node
from lathe.core.kernels.call import KernelSpec
from lathe.core.ops.opdef import registry

# The index of the first epilogue input of each operator. Each element of the inputs before it is read for many results.
_EXTRAS = {"FusedMatMul": 2, "FusedConv": 3, "PooledConv": 3, "DequantizedMatMul": 4}
_LINES = ("Softmax", "GuardedSoftmax", "LogSoftmax", "LayerNormalization", "RMSNormalization", "GroupNormalization",
          "InstanceNormalization")  # fmt: skip
_SCATTERS = ("ScatterND", "ScatterElements", "CacheWrite")
_ONE_BY_ONE = frozenset({"elementwise"})  # families that process the elements of all operands in the same order
_BY_LINES = frozenset({"softmax", "layernorm", "groupnorm", "norm"})  # each completes a line or group before the next
_SCATTERING = frozenset({"scatter", "scatter_elements", "cache_write"})  # each copies an element, then changes it

# Families that read an epilogue input immediately before they write the result, and the condition on the spec: a kernel
# does not do so if its output holds sums until a deferred epilogue.
_FINISHING: dict[str, Callable[[KernelSpec], bool]] = {
    "gemm": lambda spec: not getattr(spec, "deferred", False),
    "conv": lambda spec: not _has_deferred_epilogue(spec),
    "strassen": lambda spec: not _has_deferred_epilogue(spec),
    "amx": lambda spec: True,
    "depthwise": lambda spec: True,
    "winograd": lambda spec: True,
    "winograd_lines": lambda spec: True,
    "cublaslt": lambda spec: True,
    "weight_only": lambda spec: True,
    "weight_only_dot": lambda spec: True,
}

# The family of kernels on a simulated device. They compute the whole result before they write any of it, but are
# checked like kernels of a real device, which do not.
_SIMULATED = "reference"


def may_run_in_place(node: Node, spec: KernelSpec, index: int, source: Layout, output: int, target: Layout) -> bool:
    """Whether a kernel may write output `output` with layout `target` over input `index` with layout `source`."""
    layouts = _access_layouts(node, spec, index, source, output, target)
    return layouts is not None and layouts[0].is_same_as(layouts[1])


def _access_layouts(
    node: Node, spec: KernelSpec, index: int, source: Layout, output: int, target: Layout
) -> tuple[Layout, Layout] | None:
    """Layouts (of the input, of the output) such that each input element is read before the output at the same index.

    Both have the shape over which the kernel iterates: an input that broadcasts is given broadcast. None if the kernel
    reads the input in another order, or if that is not known.
    """
    family = spec.family
    is_simulated = family == _SIMULATED
    if _is_elementwise(node) and (family in _ONE_BY_ONE or is_simulated):
        return _broadcast(source, target)
    if output != 0:
        return None
    if node.op == "BatchNormalization" and index == 0 and (family in _ONE_BY_ONE or is_simulated):
        return source, target
    if node.op in _LINES and index == 0 and (family in _BY_LINES or is_simulated):
        return source, target
    if node.op in _SCATTERS and index == 0 and (family in _SCATTERING or is_simulated):
        return source, target
    if node.op == "MapSelected" and index == 0:  # it reads a row of its base only to write the same row
        return source, target
    if node.op in _EXTRAS and index >= _EXTRAS[node.op] and (is_simulated or _reads_extras_late(spec)):
        return _broadcast(source, _product_layout(node, target))
    return None


def _is_elementwise(node: Node) -> bool:
    found = registry.find(node.op)
    return node.op == "FusedElementwise" or (found is not None and found.is_elementwise)


def _broadcast(source: Layout, target: Layout) -> tuple[Layout, Layout] | None:
    layout = source.broadcast(target.shape)
    return (layout, target) if layout is not None else None


def _product_layout(node: Node, target: Layout) -> Layout:
    """The layout of a product's output with its axes as before the output permutation `perm_y`.

    Inputs of the epilogue (fused elementwise nodes) broadcast to that shape.
    """
    perm = node.attrs.get("perm_y")
    if not isinstance(perm, tuple):
        return target
    inverse = [perm.index(axis) for axis in range(len(perm))]
    return target.permuted(inverse)


def _reads_extras_late(spec: KernelSpec) -> bool:
    """Whether the kernel reads epilogue inputs immediately before it writes the result."""
    return spec.family in _FINISHING and _FINISHING[spec.family](spec)


def _has_deferred_epilogue(spec: KernelSpec) -> bool:
    """Whether the kernel applies its epilogue in a second pass over the output."""
    finish = getattr(spec, "finish", None)
    return bool(getattr(finish, "deferred", False)) and isinstance(getattr(finish, "epilogue", None), Graph)
