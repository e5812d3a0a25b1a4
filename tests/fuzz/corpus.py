"""The seed models of mutations: ONNX's backend suite, bundled models, random graphs, functions and nested bodies."""

from __future__ import annotations

import random
import struct
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from lathe.core.frontends.export import export
from tests.core.random_nets import Net

_LARGEST = 40_000  # bytes: small models mutate fast, and every operator is in one
_RANDOM_GRAPHS = 100
_ROOT = Path(__file__).resolve().parents[2]


def models() -> list[bytes]:
    """All seeds, always in the same order."""
    found = [*_suite(), *_files(), *_random(), *structured()]
    return [data for data in found if len(data) <= _LARGEST]


def save(path: Path, corpus: Sequence[bytes]) -> None:
    """Write the seed models for child processes, since collecting them takes seconds."""
    path.write_bytes(b"".join(struct.pack("<I", len(data)) + data for data in corpus))


def read(path: Path) -> list[bytes]:
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        found.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return found


def _suite() -> Iterator[bytes]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package computes expected values of its cases, some of them not finite
        from onnx.backend.test.case.node import collect_testcases

        cases = collect_testcases(None)
    yield from (case.model.SerializeToString() for case in cases if case.model is not None)
    data = Path(onnx.__file__).parent / "backend" / "test" / "data"
    yield from (path.read_bytes() for path in sorted(data.glob("**/*.onnx")))


def _files() -> Iterator[bytes]:
    yield from (path.read_bytes() for path in sorted((_ROOT / "model_repo").glob("**/*.onnx")))


def _random() -> Iterator[bytes]:
    for seed in range(_RANDOM_GRAPHS):
        yield export(Net(random.Random(seed).randrange).grow(steps=1 + seed % 6), 22)


def structured() -> Iterator[bytes]:
    """Features that are rare in the suite: nested functions and bodies, sparse weights, dynamic shapes."""
    for depth in (1, 2, 3):
        yield _functions(depth).SerializeToString()
        yield _bodies(depth).SerializeToString()


def _functions(depth: int) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    functions = []
    for level in range(depth):
        inner = helper.make_node("Mul", ["a", "b"], ["p"])
        if level:
            inner = helper.make_node(f"F{level - 1}", ["a", "b"], ["p"], domain="local", alpha=0.5)
        relu = helper.make_node("LeakyRelu", ["p"], ["o"])
        relu.attribute.add(name="alpha", ref_attr_name="alpha", type=onnx.AttributeProto.FLOAT)
        function = helper.make_function("local", f"F{level}", ["a", "b"], ["o"], [inner, relu], opsets, ["alpha"])
        functions.append(function)
    call = helper.make_node(f"F{depth - 1}", ["x", "w"], ["y"], domain="local", alpha=0.25)
    graph = helper.make_graph([call], "functions", [_info("x", ["n", 3])], [_info("y", ["n", 3])])
    graph.sparse_initializer.append(_sparse("w", 3))
    return helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=10)


def _bodies(depth: int) -> onnx.ModelProto:
    nodes = [helper.make_node("Add", ["x", "one"], ["y"])]
    for level in range(depth):
        branches = [_branch(nodes, f"y{level}" if level else "y"), _branch([], "x")]
        nodes = [helper.make_node("If", ["c"], [f"y{level + 1}"], then_branch=branches[0], else_branch=branches[1])]
    initializers = [numpy_helper.from_array(np.float32([1]), "one")]
    inputs = [_info("x", ["n", 3]), helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, [])]
    graph = helper.make_graph(nodes, "bodies", inputs, [onnx.ValueInfoProto(name=f"y{depth}")], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _branch(nodes: list[onnx.NodeProto], result: str) -> onnx.GraphProto:
    through = helper.make_node("Identity", [result], [f"{result}_out"])
    return helper.make_graph([*nodes, through], "branch", [], [onnx.ValueInfoProto(name=f"{result}_out")])


def _info(name: str, shape: list[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)


def _sparse(name: str, size: int) -> onnx.SparseTensorProto:
    values = numpy_helper.from_array(np.float32([2]), name)
    return helper.make_sparse_tensor(values, numpy_helper.from_array(np.int64([1])), [size])
