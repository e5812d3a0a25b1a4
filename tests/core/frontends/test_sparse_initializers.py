"""Sparse initializers: values of ONNX Runtime, and kernels that keep only the elements of the file where that pays."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import lathe
from lathe import Coo
from lathe.core.codegen.target import x86_64_v3
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
