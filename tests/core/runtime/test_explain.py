"""`explain()` of a session: work per node against the machine's peaks, the memory map, times."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import lathe
from lathe.core.frontends.export import export
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.kernels.target import Target
from lathe.core.plan.liveness import Affine
from lathe.core.plan.plan import Fallback, Memory, Plan, Port, Region, Segment, Step
from lathe.core.runtime.host import machine
from lathe.core.runtime.host.machine import Peaks
from lathe.core.runtime.session.explain import explain_plan
from lathe.core.runtime.session.profile import REFERENCE
from tests.core.runtime import graphs
from tests.core.targets import each_target

PEAKS = Peaks(flops=100e9, bandwidth=10e9)


def step(label: str, flops: Affine, nbytes: Affine) -> Step:
    return Step("symbol", (), label, "FusedMatMul", "gemm 6x64", ("float32[n,4]",), flops, nbytes)


def two_steps() -> Plan:
    """A plan of two steps: one is bound by arithmetic (1 ms per row), the other by memory (3 ms per row)."""
    return Plan(
        inputs=(Port("x", TensorType(DType.FLOAT32, (4,)), 2),),
        states=(),
        outputs=(),
        steps=(step("busy", Affine(a=100_000_000), Affine(a=8)), step("wide", Affine(b=8), Affine(a=30_000_000))),
        schedule=(Segment(0, 2), Fallback(0, "odd", "NonZero", "no kernel")),
        arena=Affine(a=192),
        weights=64,
        memory=Memory(192, 192, 192, 64),
        log=("fold: 3 rewrites",),
        regions=(Region(Affine(a=64), Affine(a=128), 1, 1, ("b", "c")), Region(Affine(), Affine(a=64), 0, 1, ())),
    )


def line(text: list[str], word: str) -> str:
    (found,) = (each for each in text if word in each)
    return found


def test_shares_are_those_of_the_least_time() -> None:
    text = explain_plan(two_steps(), 2, PEAKS)
    assert line(text, "busy").split()[-8:-1] == ["200.0", "MFLOP", "16", "B", "compute", "25.0%", "->"]
    assert line(text, "wide").split()[-8:-1] == ["8", "FLOP", "60.0", "MB", "memory", "75.0%", "->"]
    assert "FALLBACK to the reference: no kernel" in line(text, "odd")
    assert "fold: 3 rewrites" in line(text, "fold")
    assert "100 GFLOP/s, 10 GB/s" in line(text, "kernels")


def test_the_memory_map_is_in_order_of_address() -> None:
    text = explain_plan(two_steps(), 2, PEAKS)
    scratch, both = text.index(line(text, "scratch")), text.index(line(text, "b, c"))
    assert both == scratch + 1
    assert text[scratch].split()[:3] == ["0", "+128", "#" * 48]
    assert text[both].split()[:3] == ["128", "+256", "." * 24 + "#" * 24]


def test_regions_that_live_together_do_not_overlap() -> None:
    session = lathe.compile(graphs.convolution(), threads=2)
    plan = session._shapes.cached_runners()[()].shares[0].plan
    regions = plan.regions
    assert regions and max(r.offset.at(5) + r.size.at(5) for r in regions) == plan.arena.at(5)
    for one in regions:
        for other in regions:
            if one is not other and one.first <= other.last and other.first <= one.last:
                ends = one.offset.at(5) + one.size.at(5), other.offset.at(5) + other.size.at(5)
                assert ends[0] <= other.offset.at(5) or ends[1] <= one.offset.at(5)


def test_the_time_of_a_fallback_is_its_own() -> None:
    graph = Graph("middle")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (400, 400)))
    graph.outputs = [b("Exp", b("Det", b("Exp", x)))]
    with lathe.compile(graph, threads=1) as session:
        profile = session.profile({"x": np.eye(400, dtype=np.float32)}, runs=3)
    before, middle, after = profile.nodes
    assert (middle.op, middle.kernel) == ("Det", REFERENCE)
    assert middle.nanoseconds > 5 * after.nanoseconds > 0 and before.nanoseconds > 0


def test_a_share_of_the_peak_stands_beside_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lathe.core.runtime.host.executable.peaks", lambda: Peaks(2e9, 1e15))
    profile = lathe.compile(graphs.mlp(hidden=512), threads=1).profile({"x": np.ones((64, 20), np.float32)}, runs=2)
    for node in profile.nodes:
        assert node.least == node.flops // 2
        assert node.roofline == pytest.approx(node.gflops / 2, rel=1e-3)
    assert f"{profile.roofline:.1%}" in profile.table().splitlines()[-1]


@each_target
def test_measured_peaks_are_believable(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_BUFFER", 24 << 20)
    found = machine.measure(target)
    cycles = found.flops / (2 * target.lanes)  # multiply-adds of whole vectors per second
    assert 2e8 < cycles < 4e10
    assert 2e8 < found.bandwidth < 2e12


def test_peaks_are_measured_once_and_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LATHE_CACHE_DIR", str(tmp_path))
    measured: list[Target] = []
    monkeypatch.setattr(machine, "measure", lambda target: measured.append(target) or PEAKS)
    for _ in range(2):
        machine.peaks.cache_clear()
        assert machine.peaks() == PEAKS
    (tmp_path / "machine.json").write_text(json.dumps({"target": "another", "flops": 1, "bandwidth": 1}))
    machine.peaks.cache_clear()
    assert machine.peaks() == PEAKS and len(measured) == 2
    machine.peaks.cache_clear()


def test_explain_is_the_same_after_loading_an_artifact(tmp_path: Path) -> None:
    model, cache = export(graphs.mlp()), tmp_path / "cache"
    fresh = lathe.compile(graphs.mlp(), threads=1, cache_dir=cache).explain(batch=8)
    kept = [lathe.compile(model, threads=1, cache_dir=cache).explain(batch=8) for _ in range(2)]
    assert kept == [fresh, fresh] and "###" in fresh
