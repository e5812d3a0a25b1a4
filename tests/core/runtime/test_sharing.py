"""Weights shared by several executables are in memory once, until the last of them is closed."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

import lathe
import lathe.core.ops
from lathe.core.compiler import pipeline, symbol_binding
from lathe.core.compiler.description import describe
from lathe.core.frontends.export import export
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.runtime.artifact.bundle import LARGE, Span
from lathe.core.runtime.host import weight_sharing
from lathe.core.runtime.host.memory import address_of
from lathe.core.runtime.host.weight_sharing import DeduplicatedWeights
from tests.core.runtime.test_artifact import made

WIDTH = 256
MATRIX = 4 * WIDTH * WIDTH  # bytes


def encoder(scale: float = 1.0, seed: int = 0, width: int = WIDTH) -> Graph:
    """[batch, length, width] through two matrices, the second one `scale` times as large."""
    rng = np.random.default_rng(seed)
    graph = Graph("encoder")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (symbol("batch"), symbol("length"), width)))
    for factor in (1.0, scale):
        weight = rng.standard_normal((width, width), np.float32) * np.float32(factor / 16)
        x = b("Tanh", b("MatMul", x, b.constant(weight, "w")))
    graph.outputs = [x]
    return graph


def rows(length: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(length).standard_normal((2, length, WIDTH), np.float32)}


def check(session: lathe.Session, graph: Graph, length: int) -> None:
    (got,), (expected,) = session.run(rows(length)).values(), lathe.interpret(graph, rows(length)).values()
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def mapped(name: str) -> int:
    """Resident bytes of this process that come from files of this name."""
    found, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            here = line.endswith(name)
        elif here and first == "Rss:":
            found += 1024 * int(line.split()[1])
    return found


def test_offsets_point_to_the_first_copy() -> None:
    first, second = np.zeros(2 * LARGE, np.uint8), np.zeros(2 * LARGE, np.uint8)
    digest, end = "digest of the test", 2048 + LARGE
    one = DeduplicatedWeights(first, [Span(0, 64, "small"), Span(64, LARGE, digest)])
    two = DeduplicatedWeights(second, [Span(2048, LARGE, digest), Span(end, 64, "small")])
    away = address_of(first) + 64 - address_of(second)
    assert [one.offset(at) for at in (0, 64, 1087, 64 + LARGE)] == [0, 64, 1087, 64 + LARGE]
    assert [two.offset(at) for at in (2047, 2048, end - 1, end)] == [2047, away, away + LARGE - 1, end]
    del one, two
    gc.collect()
    assert not {digest, "small"} & set(weight_sharing._spans_in_memory)


def test_all_shapes_of_a_model_share_its_weights(tmp_path: Path) -> None:
    graph = encoder()
    path = tmp_path / "model.onnx"
    path.write_bytes(export(graph))
    options = {"cache_dir": tmp_path / "cache", "threads": 1, "tune": "off", "new_shapes": "wait"}
    with lathe.compile(path, **options) as session:
        check(session, graph, 4)
        before = mapped(".lathe")
        for length in (5, 8, 9):
            check(session, graph, length)
        assert mapped(".lathe") - before < MATRIX
        with lathe.compile(path, **options) as other:
            before = mapped(".lathe")
            for length in (4, 5, 8, 9):
                check(other, graph, length)
            assert mapped(".lathe") - before < MATRIX
        check(session, graph, 4)


@pytest.mark.slow
def test_specialised_code_shares_weights_with_dynamic_shape_code(tmp_path: Path) -> None:
    width, path = 512, tmp_path / "model.onnx"
    graph, rng = encoder(width=width), np.random.default_rng(0)
    path.write_bytes(export(graph))
    with lathe.compile(path, cache_dir=tmp_path / "cache", threads=1, tune="off") as session:
        session.run({"x": np.zeros((1, 16, width), np.float32)})
        before = mapped(".lathe")
        for length in (17, 64, 256):
            x = rng.standard_normal((1, length, width), np.float32)
            (expected,) = lathe.interpret(graph, {"x": x}).values()
            for _ in range(20):  # first by dynamic-shape code, then by specialised code
                np.testing.assert_allclose(*session.run({"x": x}).values(), expected, rtol=1e-4, atol=1e-4)
            assert session.settle(timeout=60)
        assert len(session._shapes.cached_runners()) == 3 and "Strassen" not in session.explain()
        assert mapped(".lathe") - before < 3 * 4 * width * width  # one matrix for each length instead of two


@pytest.mark.parametrize("first_goes", [True, False])
def test_shared_weights_outlive_the_executable_that_loaded_them(first_goes: bool, tmp_path: Path) -> None:
    graphs = [encoder(), encoder(scale=2.0)]  # versions that differ in one matrix of two
    options = pipeline.make_options("cpu", "float32", 1, 8, True, tmp_path / "cache", "off")
    sessions = []
    for index, graph in enumerate(graphs):
        binding = symbol_binding.bind(graph, describe(graph, options).batching, (("length", 4),))
        sessions.append(lathe.load_compiled(made(tmp_path / str(index), binding), threads=1))
    gone = 0 if first_goes else 1
    sessions.pop(gone).close()
    gc.collect()
    with sessions[0] as left:
        check(left, graphs[1 - gone], 4)
