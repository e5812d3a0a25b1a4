"""The memory that a compiled file declares is the memory it takes; reading the declaration loads nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import lathe
from lathe.core.errors import ArtifactError
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph
from lathe.core.runtime.artifact.memory_needs import memory_needs
from tests.core.runtime import graphs
from tests.core.runtime.test_artifact import made


def test_weights_and_the_arena_of_the_largest_batch(tmp_path: Path) -> None:
    path = made(tmp_path)
    with lathe.load_compiled(path, threads=1) as session:
        memory = session.memory
    assert memory is not None
    found = memory_needs(path)
    assert found.weights == memory.weights >= 4 * (20 * 48 + 48 + 48 * 7 + 7)
    assert 7 * memory.peak <= found.run <= 8 * memory.peak  # the memory is for batches of eight


def test_a_model_compiled_per_shape_holds_its_graph_and_its_weights(tmp_path: Path) -> None:
    graph: Graph = graphs.sequence()
    [x], builder = graph.outputs, Builder(graph)
    weight = np.ones((8, 40_000), np.float32)
    graph.outputs = [builder("MatMul", x, builder.constant(weight, "w"))]
    found = memory_needs(made(tmp_path, graph))
    assert (found.weights, found.run) == (pytest.approx(2 * weight.nbytes, rel=0.01), 0)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"nothing")
    with pytest.raises(ArtifactError):
        memory_needs(tmp_path / "x")
