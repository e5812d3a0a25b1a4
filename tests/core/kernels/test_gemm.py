"""Matrix products against NumPy: tails, strides, batches, epilogues; any n with one compiled kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Array, Value
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.kernels.call import Request
from lathe.core.kernels.choose import select
from lathe.core.kernels.gemm.cpu import generate
from lathe.core.kernels.gemm.spec import GemmSpec, gemm
from lathe.core.kernels.target import Target
from lathe.core.plan.kernel_choice import KernelChoice
from tests.core.kernels.harness import NodeKernel, scalar_body, single_node
from tests.core.targets import each_target, vectors

F32 = DType.FLOAT32
N = symbol("n")


def floats(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def tensor(*dims: Any) -> TensorType:
    return TensorType(F32, dims)


@pytest.mark.parametrize("columns", [1, 7, 16, 17, 33, 48, 70, 128])
@pytest.mark.parametrize("depth", [1, 3, 33])
@pytest.mark.sample(3)
def test_every_tail_of_rows_and_columns(depth: int, columns: int) -> None:
    kernel = NodeKernel("FusedMatMul", tensor(N, depth), floats(depth, columns))
    for n in (1, 2, 3, 5, 6, 7, 13, 33):
        kernel.check(floats(n, depth))


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize("columns", [3, 21, 130])
def test_targets_and_threads(target: Target, columns: int) -> None:
    kernel = NodeKernel("FusedMatMul", tensor(N, 19), floats(19, columns), target=target)
    for n, threads in ((1, 2), (17, 1), (40, 3)):
        kernel.check(floats(n, 19), threads=threads)


@each_target
@pytest.mark.parametrize("columns", [10, 84, 120])
def test_every_count_of_rows_below_two_tiles(target: Target, columns: int) -> None:
    kernel = NodeKernel("FusedMatMul", tensor(N, 8), floats(8, columns), target=target)
    for n in range(1, 21):
        kernel.check(floats(n, 8))


def test_rows_are_a_multiple_of_n() -> None:
    kernel = NodeKernel("FusedMatMul", tensor(N, 7, 20), floats(20, 40))
    for n in (1, 4, 9):
        kernel.check(floats(n, 7, 20))


def test_batches_of_a_constant_matrix_become_rows() -> None:
    kernel = NodeKernel("FusedMatMul", tensor(N, 5, 3, 20), floats(20, 40))
    assert str(kernel.call.spec.rows) == "15*n"  # type: ignore[attr-defined]
    kernel.check(floats(2, 5, 3, 20), threads=2)


@pytest.mark.parametrize(
    ("a", "b"),
    [((N, 4, 7, 9), (N, 4, 9, 33)), ((N, 4, 7, 9), (4, 9, 17)), ((N, 1, 7, 9), (3, 9, 17)), ((7, 9), (N, 9, 16))],
)
def test_batches_of_two_computed_matrices(a: tuple[Any, ...], b: tuple[Any, ...]) -> None:
    kernel = NodeKernel("FusedMatMul", tensor(*a), tensor(*b))
    for n in (1, 3):
        kernel.check(*(floats(*(n if d is N else d for d in shape)) for shape in (a, b)), threads=n)


def test_batches_of_constant_matrices_are_packed() -> None:
    kernel = NodeKernel("FusedMatMul", tensor(N, 3, 5, 9), floats(3, 9, 20))
    kernel.check(floats(2, 3, 5, 9))


@each_target
@pytest.mark.parametrize(("time", "size"), [(33, 8), (16, 17), (5, 3)])
def test_attention_scores_and_values(target: Target, time: int, size: int) -> None:
    heads = tensor(N, time, 2, size)
    q, k = floats(3, time, 2, size), floats(3, time, 2, size)
    scores = NodeKernel("FusedMatMul", heads, heads, perm_a=(0, 2, 1, 3), perm_b=(0, 2, 3, 1), target=target)
    scores.check(q, k, threads=2)
    weights = tensor(N, 2, time, time)
    values = NodeKernel("FusedMatMul", weights, heads, perm_b=(0, 2, 1, 3), perm_y=(0, 2, 1, 3), target=target)
    values.check(floats(3, 2, time, time), k)


def test_transposed_operands_and_output() -> None:
    perms = {"perm_a": (0, 2, 1), "perm_b": (1, 0), "perm_y": (0, 2, 1)}
    kernel = NodeKernel("FusedMatMul", tensor(N, 9, 6), floats(21, 9), **perms)
    computed = NodeKernel("FusedMatMul", tensor(N, 9, 6), tensor(21, 9), **perms)
    for n in (1, 8):
        kernel.check(floats(n, 9, 6), threads=2)
        computed.check(floats(n, 9, 6), floats(21, 9))


@pytest.mark.parametrize("shape", [(), (21,), (1, 21), (5, 1), (5, 21), (N, 1, 1), (N, 5, 21), (1, 5, 1), (N, 1, 21)])
def test_extra_inputs_of_every_broadcast_pattern(shape: tuple[Any, ...]) -> None:
    def write(b: Builder, value: Value, extra: Value) -> Value:
        return b("Relu", b("Add", value, extra))

    kernel = NodeKernel("FusedMatMul", tensor(N, 5, 9), floats(9, 21), tensor(*shape), epilogue=scalar_body(2, write))
    for n in (1, 3):
        kernel.check(floats(n, 5, 9), floats(*(n if d is N else d for d in shape)), threads=n)


def test_a_residual_may_be_overwritten_unless_it_is_multiplied() -> None:
    """The kernel allows overwriting the residual; that the left operand is the same value is for the planner to see."""
    add = scalar_body(2, lambda b, x, y: b("Add", x, y))
    graph = single_node("FusedMatMul", tensor(N, 9), floats(9, 9), tensor(N, 9), epilogue=add)
    call = select(Request(graph.nodes[0], graph.constants, vectors()))
    assert call is not None
    assert call.inplace == (2,)
    (node,) = graph.nodes
    assert KernelChoice([node], {node: call}).may_overwrite(node, 2)
    node.inputs[2] = node.inputs[0]
    assert not KernelChoice([node], {node: call}).may_overwrite(node, 2)


def test_gelu_epilogue() -> None:
    def write(b: Builder, x: Value, bias: Value) -> Value:
        y = b("Add", x, bias)
        gate = b("Add", b("Erf", b("Mul", y, b.constant(0.70710677, dtype=F32))), b.constant(1.0, dtype=F32))
        return b("Mul", b("Mul", y, gate), b.constant(0.5, dtype=F32))

    kernel = NodeKernel("FusedMatMul", tensor(N, 30), floats(30, 50), floats(50), epilogue=scalar_body(2, write))
    kernel.check(floats(13, 30))


def test_depth_that_depends_on_the_batch_is_declined() -> None:
    graph = single_node("FusedMatMul", tensor(4, N), tensor(N, 5))
    assert gemm(Request(graph.nodes[0], graph.constants, vectors())) is None


def test_equal_weights_share_their_packed_form() -> None:
    weight = floats(20, 70)
    few, many = (NodeKernel("FusedMatMul", tensor(rows, 20), weight) for rows in (1, 500))
    assert few.call.operands[1] == many.call.operands[1]
    assert few.call.spec != many.call.spec


def test_row_dependent_operands_are_prefetched_before_a_tile() -> None:
    add = scalar_body(2, lambda b, x, extra: b("Add", x, extra))
    fetched = []
    for extra in (tensor(40), tensor(N, 40)):  # a bias, and the first term of a residual sum
        kernel = NodeKernel("FusedMatMul", tensor(N, 20), floats(20, 40), extra, epilogue=add)
        assert isinstance(kernel.call.spec, GemmSpec)
        fetched.append(generate(kernel.call.spec, vectors()).finish().count("llvm.prefetch"))
    bias, residual = fetched
    assert residual > bias


@pytest.mark.sample(3, native=True)
@each_target
@pytest.mark.parametrize("columns", [40, 1000])
@pytest.mark.parametrize("rows", [1, 4, 7])
def test_equal_columns_give_equal_results_wherever_they_stand(target: Target, rows: int, columns: int) -> None:
    """Also in the last panel, which may be narrower: another order of summation there would change results."""
    weight = np.repeat(floats(501, 1), columns, axis=1)
    x = floats(rows, 501)
    [product] = NodeKernel("FusedMatMul", tensor(N, 501), weight, target=target)(x)
    image = TensorType(F32, (N, 1, rows, 501))
    convolved = NodeKernel("FusedConv", image, weight.T.reshape(columns, 501, 1, 1), layout="NHWC", target=target)
    for y in (product, convolved(x.reshape(1, 1, rows, 501))[0]):
        assert (y == y[..., :1]).all()
