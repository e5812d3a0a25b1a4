"""Recorded runs: every kernel, in order, inside the run's time; recording does not change results."""

from __future__ import annotations

import itertools
from time import perf_counter_ns
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.runtime.session.record import REFERENCE, KernelRun
from lathe.core.runtime.session.session import Session
from tests.core.runtime import graphs
from tests.core.runtime.test_chunks import images, rows_at_once
from tests.core.runtime.test_packed import WHOLE, packing


def recorded(session: Session, feeds: dict[str, Any]) -> list[KernelRun]:
    """Run once with a record and once without: equal results, and the record lies within the run."""
    record: list[KernelRun] = []
    began = perf_counter_ns()
    got = session.run(feeds, record.append)
    ended = perf_counter_ns()
    for name, want in session.run(feeds).items():
        np.testing.assert_array_equal(got[name], want)
    assert all(began <= run.began <= run.ended <= ended for run in record)
    assert all(run.ended <= later.began for run, later in itertools.pairwise(record))
    return record


@pytest.mark.parametrize("threads", [1, 2])
def test_every_kernel_is_recorded_in_order(threads: int) -> None:
    with lathe.compile(graphs.mlp(hidden=512), threads=threads) as session:
        feeds = {"x": np.random.default_rng(0).standard_normal((256, 20), np.float32)}
        nodes = session.profile(feeds, runs=1).nodes
        assert [(run.label, run.op, run.kernel, run.device) for run in recorded(session, feeds)] == [
            (node.label, node.op, node.kernel, "cpu") for node in nodes
        ]


def test_fallbacks_are_recorded_between_kernels() -> None:
    graph = Graph("middle")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (40, 40)))
    graph.outputs = [b("Exp", b("Det", b("Exp", x)))]
    with lathe.compile(graph, threads=1) as session:
        runs = recorded(session, {"x": np.eye(40, dtype=np.float32)})
    assert [(run.op, run.kernel == REFERENCE) for run in runs] == [("Exp", False), ("Det", True), ("Exp", False)]


def test_a_batch_in_chunks_records_every_kernel_once_per_chunk() -> None:
    with lathe.compile(graphs.convolution(), threads=1) as session:
        once = [run.op for run in recorded(session, images(rows_at_once(session)))]
        assert [run.op for run in recorded(session, images(3 * rows_at_once(session)))] == 3 * once


def test_sequences_that_run_packed() -> None:
    with packing(WHOLE.model(), 64) as session:
        assert "SegmentAttention" in {run.op for run in recorded(session, WHOLE.feeds(2, 9))}
        record: list[KernelRun] = []
        session.run_packed([WHOLE.feeds(1, 5), WHOLE.feeds(2, 9)], record.append)
        assert "SegmentAttention" in {run.op for run in record}
