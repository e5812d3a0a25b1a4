"""The source text of GPU kernels: generating it needs neither Triton nor a GPU; equal specs give equal text."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lathe.core.errors import ArtifactError
from lathe.core.ir.types import DType
from lathe.core.kernels import cuda
from lathe.core.kernels.call import VIEWS, KernelCall, Request
from lathe.core.kernels.choose import candidates, select
from lathe.core.kernels.cuda.algebra import Algebra, Reg
from lathe.core.kernels.cuda.source import Writer
from lathe.core.kernels.elementwise import cuda_spec as elementwise
from lathe.core.kernels.kernel_table_cuda import TABLE
from lathe.core.kernels.reduce.spec import KINDS
from lathe.core.kernels.target import GpuTarget
from loadtest.gpu.families import FAMILIES
from tests.core.kernels.harness import single_node
from tests.core.kernels.sweep import floats, tensor

TARGET = GpuTarget()
CASES = FAMILIES


def request(op: str, inputs: tuple[Any, ...], attrs: dict[str, Any], target: GpuTarget = TARGET) -> Request:
    graph = single_node(op, *(tensor(each) if isinstance(each, str) else each for each in inputs), **attrs)
    return Request(graph.nodes[0], graph.constants, target)


def kernels(calls: Sequence[KernelCall]) -> dict[str, KernelCall]:
    """The distinct calls of single kernels, by the key of their spec."""
    return {kernel.key: kernel for call in calls for _, kernel in call.kernels}


@pytest.mark.parametrize(("op", "inputs", "attrs"), CASES, ids=lambda each: each if isinstance(each, str) else "")
def test_every_offer_is_a_function_of_its_operands(op: str, inputs: tuple[Any, ...], attrs: dict[str, Any]) -> None:
    calls, again = (kernels(candidates(request(op, inputs, attrs))) for _ in range(2))
    assert calls
    for key, call in calls.items():
        source = cuda.generate(call.spec, TARGET)
        [function] = [node for node in ast.parse(source.text).body if isinstance(node, ast.FunctionDef)]
        assert function.name == call.spec.symbol == source.symbol
        assert len(function.args.args) == len(call.operands) + 1 == len(source.operands) + 1
        assert cuda.Source.from_bytes(source.to_bytes()) == source
        assert cuda.generate(again[key].spec, TARGET) == source
        assert 1 <= len(call.grid) <= 3 and call.spec.summary


def test_every_operator_with_a_kernel_of_its_own_is_here() -> None:
    """All but elementwise operators, and operators that differ from a listed one only in an attribute of the kernel."""
    like = {
        *elementwise.OPS, *VIEWS, *KINDS, "MatMul", "Conv", "LogSoftmax", "GuardedSoftmax", "RMSNormalization",
        "GroupNormalization", "InstanceNormalization", "BatchNormalization", "ArgMin", "AveragePool", "DepthToSpace",
        "SpaceToDepth", "Expand", "Tile", "Slice", "Split", "Pad",
    }  # fmt: skip
    assert set(TABLE) <= like | {op for op, *_ in CASES}


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


def test_binaries_read_back_equal_and_damaged_ones_are_refused() -> None:
    binary = cuda.Binary("lathe_x", 90, 8, 1024, b"\x7fELF...", ".entry lathe_x")
    data = binary.to_bytes()
    assert cuda.Binary.from_bytes(data) == binary
    for damaged in (b"", data[:-1], b"XXXX" + data[4:]):
        with pytest.raises(ArtifactError):
            cuda.Binary.from_bytes(damaged)


def test_selectors_of_one_device_are_not_called_for_another() -> None:
    relu = request("Relu", ("float32[n,8]",), {})
    assert relu.gpu is TARGET
    with pytest.raises(TypeError, match="target: expected a CPU, got cuda"):
        _ = relu.cpu
    assert select(request("Relu", ("float32[n,8]",), {}, GpuTarget(device="none"))) is None


def test_narrow_constants_are_packed_once() -> None:
    call = select(request("FusedMatMul", ("bfloat16[n,9]", floats(9, 5)), {}))
    assert call is not None
    [packed] = [operand for operand in call.operands if hasattr(operand, "pack")]
    assert packed.pack(floats(9, 5)).dtype == np.dtype("bfloat16")


class _Numbers:
    """The Triton functions that a line of a kernel calls, on NumPy arrays."""

    float32, float64, int1 = np.float32, np.float64, np.bool_
    exp, abs, where = staticmethod(np.exp), staticmethod(np.abs), staticmethod(np.where)
    div_rn = staticmethod(np.divide)

    @staticmethod
    def full(shape: tuple[int, ...], value: float, dtype: Any) -> Any:
        return dtype(value)

    @staticmethod
    def fma(x: Any, y: Any, z: Any) -> Any:
        return x * y + z


def test_tanh_is_exact_to_the_last_bits_of_either_type() -> None:
    """The lines of the function, on numbers around the place where its two forms meet, and on tiny and large ones."""
    rng = np.random.default_rng(0)
    exponents = 10.0 ** rng.uniform(-30, 1, 2000)
    edge = np.nextafter(0.625, [0.0, 1.0])
    numbers = np.concatenate([rng.uniform(-1, 1, 8000), rng.uniform(-25, 25, 2000), exponents, edge, [0.0, 90.0]])
    for dtype, name in ((np.float64, DType.FLOAT64), (np.float32, DType.FLOAT32)):
        x = numbers.astype(dtype)
        writer = Writer("k")
        result = Algebra(writer).tanh(Reg("x", name))
        found: dict[str, Any] = {"tl": _Numbers, "x": x}
        with np.errstate(over="ignore"):
            exec(textwrap.dedent(writer.source().text.partition("):\n")[2]), found)
        want = np.tanh(x.astype(np.longdouble))
        apart = np.abs(found[result.name] - want) / np.spacing(np.abs(want).astype(dtype))
        assert found[result.name].dtype == dtype
        assert apart.max() < 4
        assert np.all(np.abs(found[result.name]) <= 1)
