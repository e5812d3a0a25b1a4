"""Runs the GPU kernel of one node in Triton's interpreter, and compiles it, without a plan or a device.

    sweep("Add", "float32[n,7]", "float32[7]")           # against the reference, for several batch sizes
    compiles("Add", "float32[n,7]", "float32[7]")        # for sm_80 and sm_90

A string is an input of that type, an array is a constant. An inaccessible page follows every operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lathe.core.ir.dim import evaluate
from lathe.core.ir.graph import Array, Value
from lathe.core.kernels.call import Block, Flag, In, KernelCall, Out, Packed, Request, Scratch
from lathe.core.kernels.choose import candidates
from lathe.core.kernels.cuda import Binary, generate, interpret
from lathe.core.kernels.cuda.compiler import _compile, compile_source
from lathe.core.kernels.target import GpuTarget
from lathe.core.reference import bind_symbols
from lathe.core.reference import interpret as reference
from tests.core.kernels.harness import guarded, guarded_output, single_node
from tests.core.kernels.sweep import Sample, normal, tensor

BATCHES = (0, 1, 3, 17)
ARCHS = (80, 90)


class GpuKernel:
    """One node and the kernel that the catalog selects; `rank` selects one of the tuner's other candidates."""

    def __init__(
        self, op: str, *inputs: str | Array | None, rank: int = 0, tf32: bool = False, arch: int = 80, **keywords: Any
    ) -> None:
        given = [tensor(each) if isinstance(each, str) else each for each in inputs]
        self.graph = single_node(op, *given, **keywords)
        self.node = self.graph.nodes[0]
        self.target = GpuTarget(arch, tf32=tf32)
        found = candidates(Request(self.node, self.graph.constants, self.target))
        if not found:
            raise LookupError(f"no kernel covers {self.graph}")
        self.call: KernelCall = found[min(rank, len(found) - 1)]
        self.offers = len(found)
        self.flag = guarded(np.zeros(1, np.int32))

    def __call__(self, *arrays: Array) -> list[Array]:
        """The outputs; `flag` holds what the kernel stored there. AssertionError if it wrote in front of an output."""
        n = bind_symbols(self.graph.inputs, dict(zip(self.graph.inputs, arrays, strict=True))).get("n", 1)
        feeds = dict(zip(self.graph.inputs, arrays, strict=True)) | self.graph.constants
        self.flag[:] = 0
        outputs = [guarded_output(value, n) for value in self.node.outputs]
        call = self.call.at(n)
        memory = [self._memory(operand, feeds, [each.array for each in outputs], n) for operand in call.operands]
        grid = [evaluate(extent, {"n": n}) for extent in call.grid]
        interpret(generate(call.spec, self.target), grid, memory, n)
        assert all(output.untouched_in_front() for output in outputs), self.node
        return [output.array for output in outputs]

    def check(self, *arrays: Array, rtol: float = 1e-4, atol: float = 1e-5) -> None:
        """AssertionError when the kernel and the reference executor differ."""
        names = [value.name for value in self.graph.inputs]
        expected = reference(self.graph, dict(zip(names, arrays, strict=True)))
        for value, actual in zip(self.node.outputs, self(*arrays), strict=True):
            wanted = expected[value.name]
            if not value.dtype.numpy.isbuiltin:  # bfloat16
                actual, wanted = actual.astype(np.float32), wanted.astype(np.float32)
            np.testing.assert_allclose(actual, wanted, rtol=rtol, atol=atol, err_msg=str(self.node))

    def binary(self, arch: int) -> Binary:
        return compile_source(generate(self.call.spec, self.target), GpuTarget(arch=arch))

    def ptx(self, arch: int) -> str:
        """The PTX that Triton passes to the assembler, also if the binary does not store it."""
        return str(_compile(generate(self.call.spec, self.target), arch).asm["ptx"])

    def _memory(self, operand: Any, feeds: dict[Value, Array], outputs: Sequence[Array], n: int) -> Array:
        match operand:
            case In(index):
                return guarded(feeds[self.node.inputs[index]])  # type: ignore[index]
            case Out(index):
                return outputs[index]
            case Packed(index, _, pack):
                return guarded(pack(feeds[self.node.inputs[index]]))  # type: ignore[index]
            case Block(_, constant):
                return guarded(constant)
            case Flag():
                return self.flag
            case Scratch(nbytes):
                return guarded(np.full(evaluate(nbytes, {"n": n}), 0xA5, np.uint8))
        raise TypeError(f"unknown operand {operand}")


def sweep(
    op: str,
    *inputs: str | Array | None,
    batches: Sequence[int] = BATCHES,
    sample: Sample | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    **keywords: Any,
) -> GpuKernel:
    """Check a kernel against the reference for these values of n, and return it."""
    kernel = GpuKernel(op, *inputs, **keywords)
    for n in batches:
        kernel.check(*arrays_for(kernel, n, sample), rtol=rtol, atol=atol)
    return kernel


def arrays_for(kernel: GpuKernel, n: int, sample: Sample | None = None) -> list[Array]:
    """Data of the right shapes, the same in every run."""
    types = [value.tensor for value in kernel.graph.inputs]
    return [(sample or normal)(each.dtype, each.evaluate({"n": n})) for each in types]


def compiles(op: str, *inputs: str | Array | None, **keywords: Any) -> None:
    """Check that the kernel compiles for both architectures, and that sm_80's image has PTX for later ones."""
    kernel = GpuKernel(op, *inputs, **keywords)
    for arch in ARCHS:
        binary = kernel.binary(arch)
        assert binary.cubin[:4] == b"\x7fELF"
        if arch < 90:
            assert f".entry {kernel.call.spec.symbol}" in binary.ptx and ".target sm_80\n" in binary.ptx
        else:  # Triton writes the PTX for sm_90a, which no other architecture accepts
            assert binary.ptx == ""
        assert binary.shared_bytes <= kernel.target.shared_bytes
