"""Sparse initializers: values of ONNX Runtime, and kernels that keep only the elements of the file where that pays."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import lathe
from lathe import Coo
from lathe.core.codegen.target import x86_64_v3
from lathe.core.frontends.sparse_initializers import sparse_initializer
from lathe.core.frontends.tensors import sparse_array
from tests.core.targets import runs_here
from tests.onnx_runtime import plain_session

DEPTH, COLUMNS, ROWS = 256, 192, 40
DENSE_KILOBYTES = 4 * DEPTH * COLUMNS / 1024


def model(share: float) -> bytes:
    """MatMul by a sparse initializer of which a share of the elements is 0."""
    random = np.random.default_rng(5)
    dense = random.standard_normal((DEPTH, COLUMNS)).astype(np.float32)
    dense[random.random(dense.shape) < share] = 0
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [ROWS, size])
        for name, size in zip("xy", (DEPTH, COLUMNS), strict=True)
    )
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "g", [x], [y], sparse_initializer=[Coo.from_dense(dense).to_onnx("w")])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.checker.check_model(made)
    return bytes(made.SerializeToString())


@pytest.mark.skipif(not runs_here(x86_64_v3()), reason="this machine lacks AVX2")
@pytest.mark.parametrize(("share", "is_kept"), [(0.95, True), (0.3, False)])
def test_a_kernel_keeps_the_elements_of_the_file_where_that_pays(share: float, is_kept: bool) -> None:
    data = model(share)
    x = np.random.default_rng(6).standard_normal((ROWS, DEPTH)).astype(np.float32)
    with lathe.compile(data, threads=1, tune="off") as session:
        (expected,) = plain_session(data).run(None, {"x": x})
        np.testing.assert_allclose(session.run({"x": x})["y"], expected, rtol=1e-4, atol=1e-4)
        text = session.explain()
    assert ("sparse, about 95 % zeros" in text) == is_kept
    kilobytes = re.search(r"weights ([0-9.]+) KiB", text)
    assert kilobytes is not None
    assert float(kilobytes[1]) < 0.2 * DENSE_KILOBYTES if is_kept else float(kilobytes[1]) == DENSE_KILOBYTES


def pruned(zeros: float) -> lathe.Graph:
    """A convolution and a product of 16 x 8 x 8 pixels, whose weights have this share of zeros."""
    source = lathe.load(network())
    return lathe.prune_weights(source, zeros)


def network() -> bytes:
    random = np.random.default_rng(7)
    weights = {"k": (24, 16, 3, 3), "w": (24 * 36, 10), "b": (10,)}
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", ["n", 16, 8, 8]), ("y", ["n", 10]))
    )
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Flatten", ["r"], ["f"]),
        helper.make_node("Gemm", ["f", "w", "b"], ["y"]),
    ]
    tensors = [
        numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), name)
        for name, shape in weights.items()
    ]
    made = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], tensors), opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    return bytes(made.SerializeToString())


def test_a_pruned_model_becomes_smaller_and_other_runtimes_read_it() -> None:
    graph = pruned(0.9)
    dense, small = lathe.export(graph), lathe.export(graph, sparse=True)
    onnx.checker.check_model(small)
    shapes = [tuple(each.dims) for each in onnx.load_from_string(small).graph.sparse_initializer]
    assert shapes == [(24, 16, 3, 3), (864, 10)]
    assert len(small) < 0.35 * len(dense)
    x = np.random.default_rng(8).standard_normal((3, 16, 8, 8)).astype(np.float32)
    (expected,) = plain_session(dense).run(None, {"x": x})
    np.testing.assert_array_equal(plain_session(small).run(None, {"x": x})[0], expected)
    with lathe.compile(small, threads=1, tune="off") as session:
        np.testing.assert_allclose(session.run({"x": x})["y"], expected, rtol=1e-4, atol=1e-4)


def test_constants_stay_dense_where_that_is_not_larger() -> None:
    for zeros in (0.0, 0.6):
        graph = pruned(zeros) if zeros else lathe.load(network())
        assert lathe.export(graph, sparse=True) == lathe.export(graph)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_sparse_constant_keeps_each_bit(dtype: type) -> None:
    array = np.zeros((40, 30), dtype)
    array[3, 4], array[5, 6], array[7, 8] = -0.0, np.nan, np.inf
    found = sparse_initializer(array, "a")
    assert found is not None
    assert sparse_array(found, "a").tobytes() == array.tobytes()


@pytest.mark.parametrize("array", [np.zeros((40, 30), np.float32), np.eye(40, dtype=np.int64), np.float32(0)])
def test_other_constants_are_not_sparse(array: Any) -> None:
    assert sparse_initializer(np.asarray(array), "a") is None
