"""Values inside other values: parts and concatenated tensors need no copies, whatever reads and writes them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import lathe
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph, Value
from lathe.core.ir.types import Dim, DType, TensorType, symbol
from lathe.core.plan.windows import view_strides

N = symbol("n")
Write = Callable[[Builder, Value], list[Value]]


def ran(write: Write, *shape: Dim, threads: int = 1) -> list[str]:
    """The operators that run natively, sorted, once results agree with the reference for several batch sizes."""
    graph = Graph("g")
    builder = Builder(graph)
    graph.outputs = write(builder, builder.input("x", TensorType(DType.FLOAT32, shape)))
    session = lathe.compile(graph, threads=threads, optimize=False, tune="off")
    for rows in (0, 1, 3, 17):
        x = np.random.default_rng(rows).standard_normal([rows if dim is N else dim for dim in shape], np.float32)
        got, want = session.run({"x": x}), lathe.interpret(graph, {"x": x})
        for name, expected in want.items():
            np.testing.assert_allclose(got[name], expected, rtol=1e-4, atol=1e-4)
    assert "FALLBACK" not in session.explain()
    return sorted(node.op for node in session.profile({"x": x}).nodes)


def conv(b: Builder, x: Value, columns: int, size: int = 3) -> Value:
    weight = np.random.default_rng(columns).standard_normal((columns, x.shape[-1], size, size)).astype(np.float32) / 16
    attrs = {"pads": (size // 2,) * 4, "strides": (1, 1), "dilations": (1, 1), "group": 1, "layout": "NHWC"}
    return b("FusedConv", x, b.constant(weight), **attrs)  # type: ignore[arg-type]


def test_convolutions_write_into_their_concatenation() -> None:
    def net(b: Builder, x: Value) -> list[Value]:
        pooled = b("MaxPool", x, kernel_shape=(1, 1), layout="NHWC")
        return [b("Relu", b("Concat", conv(b, x, 5), conv(b, x, 7, size=1), conv(b, x, 40), pooled, axis=-1))]

    assert ran(net, N, 6, 6, 20) == ["FusedConv", "FusedConv", "FusedConv", "MaxPool", "Relu"]


def test_winograd_writes_into_concatenations() -> None:
    def net(b: Builder, x: Value) -> list[Value]:
        return [b("Relu", b("Concat", conv(b, x, 32), conv(b, x, 48), axis=-1))]

    assert ran(net, N, 13, 13, 32) == ["FusedConv", "FusedConv", "Relu"]


def test_dense_blocks_need_no_copies() -> None:
    def net(b: Builder, x: Value) -> list[Value]:
        parts = [b("Relu", x)]
        for _ in range(3):
            joined = b("Concat", *parts, axis=3) if len(parts) > 1 else parts[0]
            parts.append(conv(b, b("Tanh", joined), 4))
        return [b("Abs", b("Concat", *parts, axis=3))]

    assert "Concat" not in ran(net, N, 4, 4, 20, threads=2)


def test_a_part_with_other_readers() -> None:
    def net(b: Builder, x: Value) -> list[Value]:
        skip = conv(b, x, 8)
        small = b("MaxPool", skip, kernel_shape=(2, 2), strides=(2, 2), layout="NHWC")
        return [b("Relu", b("Concat", skip, conv(b, x, 3), axis=3)), small]

    assert "Concat" not in ran(net, N, 6, 6, 20)


def test_values_that_cannot_be_written_there_are_copied() -> None:
    def net(b: Builder, x: Value) -> list[Value]:
        kept = b("Relu", x)
        return [kept, b("Neg", b("Concat", x, kept, b("Exp", x), b("Softmax", x, axis=1), axis=1))]

    assert ran(net, N, 5).count("Concat") == 1


def test_one_value_concatenated_twice() -> None:
    def net(b: Builder, x: Value) -> list[Value]:
        y = b("Relu", x)
        return [b("Concat", y, b("Exp", x), y, axis=1)]

    assert ran(net, N, 5).count("Concat") == 1


def test_one_value_concatenated_twice_that_is_a_part_of_another() -> None:
    """The value's stride along the axis means nothing, because its extent there is 1."""

    def net(b: Builder, x: Value) -> list[Value]:
        y = b("Relu", x)
        twice = b("Neg", b("Concat", y, y, axis=1))
        return [twice, b("Abs", b("Concat", y, b("Exp", x), axis=1))]

    assert ran(net, N, 1, 8).count("Concat") == 1


def test_results_are_written_into_an_output_of_the_model() -> None:
    def net(b: Builder, x: Value) -> list[Value]:
        return [b("Concat", b("Relu", x), b("Exp", x), axis=1)]

    assert ran(net, N, 5) == ["Exp", "Relu"]


def test_a_part_that_begins_after_the_rows_of_a_batch_is_copied() -> None:
    def net(b: Builder, x: Value) -> list[Value]:
        return [b("Tanh", b("Concat", b("Relu", x), b("Exp", x), axis=0))]

    assert ran(net, N, 5) == ["Concat", "Exp", "Relu", "Tanh"]


def test_vectors_become_rows_of_a_matrix() -> None:
    def net(b: Builder, x: Value) -> list[Value]:
        rows = [b("Unsqueeze", b(op, x), axes=(1,)) for op in ("Relu", "Exp", "Abs")]
        return [b("Neg", b("Concat", *rows, axis=1))]

    assert ran(net, N, 5) == ["Abs", "Exp", "Neg", "Relu"]


def test_parts_are_read_in_place() -> None:
    def net(b: Builder, x: Value) -> list[Value]:
        y = b("Exp", x)
        first, second = b.emit("Split", y, outputs=2, axis=1, split=(4, 4))
        product = b("MatMul", b("Slice", y, starts=(1,), ends=(7,), axes=(1,)), b.constant(np.ones((6, 3), np.float32)))
        return [b("Mul", first, second), product]

    assert ran(net, N, 8) == ["Exp", "MatMul", "Mul"]


def test_parts_that_are_no_lines_of_neighbours_are_copied() -> None:
    def net(b: Builder, x: Value) -> list[Value]:
        y = b("Exp", x)
        backwards = b("Slice", y, starts=(-1,), ends=(-9,), axes=(1,), steps=(-2,))
        column = b("Gather", y, b.constant(np.array(-2)), axis=1)
        return [b("Neg", backwards), b("Relu", column)]

    assert ran(net, N, 8) == ["Exp", "Gather", "Neg", "Relu", "Slice"]


def test_a_part_is_not_overwritten_while_the_rest_is_needed() -> None:
    def net(b: Builder, x: Value) -> list[Value]:
        y = b("Exp", x)
        half = b("Slice", y, starts=(0,), ends=(4,), axes=(1,))
        return [b("Add", b("Neg", half), b("Abs", half)), b("Relu", y)]

    assert "Slice" not in ran(net, N, 8)


def test_a_part_of_a_joined_tensor() -> None:
    def net(b: Builder, x: Value) -> list[Value]:
        joined = b("Concat", b("Relu", x), b("Exp", x), axis=1)
        middle = b("Slice", joined, starts=(3,), ends=(8,), axes=(1,))
        return [b("Concat", b("Neg", middle), b("Abs", joined), axis=1)]

    assert ran(net, N, 5) == ["Abs", "Exp", "Neg", "Relu"]


def test_parts_of_inputs_and_parts_that_are_outputs() -> None:
    def net(b: Builder, x: Value) -> list[Value]:
        left, right = b.emit("Split", x, outputs=2, axis=1, split=(3, 5))
        return [left, b("Exp", right)]

    assert ran(net, N, 8) == ["Exp", "Split"]


@pytest.mark.parametrize("threads", [1, 3])
def test_heads_of_one_product(threads: int) -> None:
    def net(b: Builder, x: Value) -> list[Value]:
        joint = b("Reshape", b("Relu", x), shape=(N, 6, 3, 2, 4))
        q, k, v = (b("Gather", joint, b.constant(np.array(i)), axis=2) for i in range(3))
        perms = {"perm_q": (0, 2, 1, 3), "perm_k": (0, 2, 3, 1), "perm_v": (0, 2, 1, 3), "perm_y": (0, 2, 1, 3)}
        return [b("FusedAttention", q, k, v, **perms)]

    assert ran(net, N, 6, 24, threads=threads) == ["FusedAttention", "Relu"]


def test_strides_under_another_shape() -> None:
    assert view_strides((N, 1, 5), (40, 7, 1), (N, 5)) == (40, 1)
    assert view_strides((N, 5), (40, 1), (1, N, 1, 5)) == (0, 40, 0, 1)
    assert view_strides((N, 10), (40, 1), (N, 2, 5)) is None
