"""Kernels for GPUs as text: writing them needs neither Triton nor a GPU, and equal specs give equal text."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import pytest

from core.errors import ArtifactError
from core.kernels import cuda
from core.kernels.catalog import VIEWS, KernelCall, Request, base, candidates, select
from core.kernels.catalog.cuda import elementwise
from core.kernels.catalog.reduce import KINDS
from core.kernels.target import GpuTarget
from loadtest.gpu.families import FAMILIES
from tests.core.kernels.harness import single_node
from tests.core.kernels.sweep import floats, tensor

TARGET = GpuTarget()
CASES = FAMILIES


def request(op: str, inputs: tuple[Any, ...], attrs: dict[str, Any], target: GpuTarget = TARGET) -> Request:
    graph = single_node(op, *(tensor(each) if isinstance(each, str) else each for each in inputs), **attrs)
    return Request(graph.nodes[0], graph.constants, target)


@pytest.mark.parametrize(("op", "inputs", "attrs"), CASES, ids=lambda each: each if isinstance(each, str) else "")
def test_every_offer_is_a_function_of_its_operands(op: str, inputs: tuple[Any, ...], attrs: dict[str, Any]) -> None:
    calls = candidates(request(op, inputs, attrs))
    again = {call.spec.key: call for call in candidates(request(op, inputs, attrs))}
    assert calls
    for call in calls:
        source = cuda.generate(call.spec, TARGET)
        [function] = [node for node in ast.parse(source.text).body if isinstance(node, ast.FunctionDef)]
        assert function.name == call.spec.symbol == source.symbol
        assert len(function.args.args) == len(call.operands) + 1 == len(source.operands) + 1
        assert cuda.Source.from_bytes(source.to_bytes()) == source
        assert cuda.generate(again[call.spec.key].spec, TARGET) == source
        assert 1 <= len(call.grid) <= 3 and call.spec.summary


def test_every_operator_with_a_kernel_of_its_own_is_here() -> None:
    """All but the elementwise ones, and those that differ in an attribute of the kernel from one that is here."""
    like = {
        *elementwise.OPS, *VIEWS, *KINDS, "MatMul", "Conv", "LogSoftmax", "RMSNormalization", "GroupNormalization",
        "InstanceNormalization", "BatchNormalization", "ArgMin", "AveragePool", "DepthToSpace", "SpaceToDepth",
        "Expand", "Tile", "Slice", "Split", "Pad",
    }  # fmt: skip
    assert base.covered("cuda") <= like | {op for op, *_ in CASES}


def test_equal_shapes_share_a_kernel_and_batch_sizes_do() -> None:
    first, second = (select(request("Relu", (f"float32[n,{size}]",), {})) for size in (8, 8))
    assert isinstance(first, KernelCall) and isinstance(second, KernelCall)
    assert first.spec.symbol == second.spec.symbol
    assert "n" in cuda.generate(first.spec, TARGET).text.split("def ", 1)[1]


def test_architectures_have_their_own_binaries() -> None:
    call = select(request("Relu", ("float32[n,8]",), {}))
    assert call is not None
    keys = {cuda.binary_key(call.spec, GpuTarget(arch=arch)) for arch in (80, 89, 90)}
    assert len(keys) == 3
    assert cuda.binary_key(call.spec, TARGET) == cuda.binary_key(call.spec, GpuTarget(multiprocessors=1))


def test_a_binary_is_what_it_was() -> None:
    binary = cuda.Binary("lathe_x", 90, 8, 1024, b"\x7fELF...", ".entry lathe_x")
    data = binary.to_bytes()
    assert cuda.Binary.from_bytes(data) == binary
    for damaged in (b"", data[:-1], b"XXXX" + data[4:]):
        with pytest.raises(ArtifactError):
            cuda.Binary.from_bytes(damaged)


def test_selectors_of_one_device_are_not_asked_for_another() -> None:
    relu = request("Relu", ("float32[n,8]",), {})
    assert relu.gpu is TARGET
    with pytest.raises(TypeError, match="for CPUs was asked for a kernel for cuda"):
        _ = relu.cpu
    assert select(request("Relu", ("float32[n,8]",), {}, GpuTarget(device="none"))) is None


def test_narrow_constants_are_packed_once() -> None:
    call = select(request("FusedMatMul", ("bfloat16[n,9]", floats(9, 5)), {}))
    assert call is not None
    [packed] = [operand for operand in call.operands if hasattr(operand, "pack")]
    assert packed.pack(floats(9, 5)).dtype == np.dtype("bfloat16")
