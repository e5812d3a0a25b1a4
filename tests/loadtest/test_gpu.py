"""The GPU measurement, tested on a simulated device: it keeps its findings however it ends, and continues later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from lathe.core.errors import DeviceLost
from lathe.core.kernels import kernel_table_cuda
from lathe.core.kernels.call import VIEWS
from lathe.core.runtime.artifact.store import Store
from loadtest.gpu import __main__ as front
from loadtest.gpu import families, models, run, worker
from loadtest.gpu import pytorch_peers as peers
from loadtest.gpu.case import Bench, Case, Finding, Options
from loadtest.gpu.parts import CASES, MEASURES, PARTS, SHARES, sanitizer, speed
from loadtest.gpu.results import Results
from loadtest.gpu.run import Clock, Line, Run, Start

ROOT = Path(__file__).resolve().parents[2]
# Packages that Lathe's service and its load tests need, and that an image for GPUs lacks.
ABSENT = (
    "orjson,httptools,uvloop,pydantic,pydantic_settings,fastapi,uvicorn,sqlalchemy,prometheus_client,typer,rich,httpx"
)
SMALL = replace(run._SMALL, device="simulated")


def run_measurement(
    arguments: Sequence[str], tmp_path: Path, blocked: str = ABSENT
) -> subprocess.CompletedProcess[str]:
    """Run the measurement in a process of its own and its workers in others, with packages missing."""
    site = tmp_path / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(
        "import os\nif os.environ.get('LATHE_TEST_BLOCKED'):\n"
        "    from tests.loadtest.blocked_imports import block\n    block(os.environ['LATHE_TEST_BLOCKED'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(site), str(ROOT))), "LATHE_TEST_BLOCKED": blocked}
    command = [sys.executable, "-m", "loadtest.gpu", *arguments]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=540)


@pytest.mark.slow
@pytest.mark.timeout(560)  # a run on a GPU has nine minutes
def test_the_whole_path_runs_without_the_packages_of_the_service(tmp_path: Path) -> None:
    """A second run continues its file and measures nothing that is known."""
    arguments = ["--device", "simulated", "--small", "--minutes", "8", "--out", "found.jsonl"]
    done = run_measurement(arguments, tmp_path)
    log = (tmp_path / "found.jsonl.log").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log
    results = Results(tmp_path / "found.jsonl")
    [begun] = [record for record in results.records if record["kind"] == "run"]
    found = results.cases(begun["code"])
    assert list(found) == [case.key for part in PARTS for case in CASES[part](SMALL)]
    assert all(record["ended"] == "" and record["ok"] is not False for record in found.values())
    assert found["speed/small/float32/2"]["figures"]["whole"]["lathe"] > 0
    again = run_measurement(arguments, tmp_path)
    assert again.returncode == 0 and "probe      27 of 27 cases, 0 broken, 0 lost, 0 not reached" in again.stdout
    assert len(Results(tmp_path / "found.jsonl").records) == len(results.records) + 1


def test_missing_packages_are_named(tmp_path: Path) -> None:
    done = run_measurement([], tmp_path, "llvmlite,ml_dtypes")
    assert done.returncode == 2
    assert "needs numpy, onnx, protobuf, llvmlite, ml-dtypes; missing: llvmlite, ml-dtypes" in done.stderr
    assert front.missing() == []


def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    done = run_measurement(["--small", "--out", "found.jsonl", "--minutes", "2"], tmp_path, f"{ABSENT},cuda")
    assert done.returncode == 2 and "device 'cuda:0' needs" in done.stdout
    assert {record.get("part") for record in Results(tmp_path / "found.jsonl").records} == {None, "probe"}


# -- workers that a test defines ---------------------------------------------------------------------------------------


class Script:
    """Workers that behave as said for a case: return a finding, die, or hang. `time` advances as they work."""

    def __init__(self, **by_name: Any) -> None:
        self.by_name, self.time = by_name, 0.0
        self.began: list[str] = []

    def now(self) -> float:
        return self.time

    def __call__(self, cases: Sequence[Case], bench: Bench) -> Iterator[Line | None]:
        for case in cases:
            self.began.append(case.name)
            yield {"begin": case.key}
            does = self.by_name.get(case.name, 1.0)
            if does == "dies":
                yield {"status": -11}
                return
            while does == "hangs":
                self.time += 1
                yield None
            self.time += does
            yield {"case": case.key, "ok": True, "text": case.name, "figures": {"took": does}, "seconds": does}
        yield {"status": 0}


def run_of(tmp_path: Path, script: Start, options: Options = SMALL) -> Run:
    store = tmp_path / "store"
    store.mkdir(exist_ok=True)
    return Run(Results(tmp_path / "found.jsonl"), options, Store(store), script)


@pytest.fixture
def three_cases(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One part with three cases."""
    names = ["a", "b", "c"]
    monkeypatch.setitem(run.CASES, "tiles", lambda _: [Case("tiles", name, 30.0) for name in names])  # type: ignore[index]
    return names


def endings(made: Run) -> dict[str, str]:
    return {record["name"]: record["ended"] for record in made.results.cases(made.code).values()}


def test_a_case_that_kills_its_process_costs_no_other_case(tmp_path: Path, three_cases: list[str]) -> None:
    script = Script(b="dies")
    made = run_of(tmp_path, script)
    made.run_parts(["tiles"], Clock(100, script.now))
    assert endings(made) == {"a": "", "b": "exit status -11", "c": ""}


def test_a_case_that_hangs_is_killed_and_comes_last_next_time(tmp_path: Path, three_cases: list[str]) -> None:
    script = Script(a="hangs")
    made = run_of(tmp_path, script)
    made.run_parts(["tiles"], Clock(100, script.now))
    assert endings(made) == {"a": "timeout after 30 s", "b": "", "c": ""} and 30 <= script.time < 40
    three_cases.append("d")
    again = Script()
    made = run_of(tmp_path, again)
    made.run_parts(["tiles"], Clock(100, again.now))
    assert again.began == ["d", "a"] and set(endings(made).values()) == {""}


def test_cases_after_the_time_limit_are_left_to_the_next_run(tmp_path: Path, three_cases: list[str]) -> None:
    script = Script(a=4.0, b="hangs")
    made = run_of(tmp_path, script)
    made.run_parts(["tiles"], Clock(10, script.now))
    assert endings(made) == {"a": ""} and script.time <= 11


def test_every_part_gets_its_share_and_what_others_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in PARTS:
        cases = [Case(part, str(index)) for index in range(1000)]
        monkeypatch.setitem(run.CASES, part, lambda _, cases=cases: cases)  # type: ignore[index]
    monkeypatch.setattr(Run, "has_device", lambda self: True)
    script = Script()
    made = run_of(tmp_path, script)
    made.run_parts(PARTS, Clock(1000, script.now))
    counts = {part: sum(key.startswith(f"{part}/") for key in made.results.cases(made.code)) for part in PARTS}
    for part in PARTS:
        assert abs(counts[part] - 1000 * SHARES[part] / sum(SHARES.values())) <= 2
    assert 0.99 < sum(SHARES.values()) <= 1.01


def test_findings_of_other_code_are_ignored(tmp_path: Path, three_cases: list[str]) -> None:
    first = Script()
    made = run_of(tmp_path, first)
    made.code = "of another commit"
    made.run_parts(["tiles"], Clock(100, first.now))
    second = Script()
    run_of(tmp_path, second).run_parts(["tiles"], Clock(100, second.now))
    assert second.began == three_cases


def test_errors_are_findings_and_a_lost_device_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(case: Case, bench: Bench) -> Finding:
        if case.name == "bad":
            raise ValueError("no such thing")
        if case.name == "lost":
            raise DeviceLost("gone")
        return Finding("fine", True)

    monkeypatch.setitem(MEASURES, "tiles", measure)  # type: ignore[index]
    said: list[Any] = []
    cases = [Case("tiles", name) for name in ("good", "bad", "lost", "never")]
    worker.work(cases, Bench(SMALL), said.append)
    assert [(line["ok"], line["text"]) for line in said if "case" in line] == [
        (True, "fine"), (False, "ValueError: no such thing"), (False, "DeviceLost: gone")
    ]  # fmt: skip


def test_a_real_worker_that_hangs_is_killed(tmp_path: Path) -> None:
    """The process is killed, although a pipe stays open."""
    start = run.in_process(tmp_path, tmp_path / "log")
    lines = start([Case("sanitizer", "memcheck/kernels")], Bench(SMALL))
    assert any(line and "begin" in line for line in lines)
    lines.close()  # type: ignore[attr-defined]  # returns although the worker would run for minutes


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_truncated_line_is_dropped_and_the_file_continues(tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    results = Results(path)
    results.add("case", part="tiles", name="a", code="x", ended="")
    with path.open("ab") as file:
        file.write(b'{"kind": "case", "par')
    results = Results(path)
    results.add("case", part="tiles", name="b", code="x", ended="")
    assert list(Results(path).cases("x")) == ["tiles/a", "tiles/b"]


def test_caches_are_stored_in_the_file_up_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.gpu.results.MAX_BYTES", 4000)
    results = Results(tmp_path / "found.jsonl")
    noise = np.random.default_rng(0).bytes(2000)
    assert results.add_cache_file("objects/a.o", noise) and results.add_cache_file("objects/a.o", noise)
    assert not results.add_cache_file("objects/b.o", noise)
    again = Results(tmp_path / "found.jsonl")
    assert list(again.carried()) == [("objects/a.o", noise)] and again.without_cache() == ""


def test_another_file_is_refused_and_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("notes\n")
    assert run.main(["--out", str(path)]) == 2
    assert "is no result of loadtest.gpu" in capsys.readouterr().err and path.read_text() == "notes\n"
    assert run.main(["--only", "luck", "--out", str(tmp_path / "new")]) == 2
    assert "--only luck: expected probe, agreement" in capsys.readouterr().err


# -- the measurements --------------------------------------------------------------------------------------------------


def test_every_family_of_kernels_is_probed() -> None:
    """All operators but the elementwise ones, and operators that differ from a listed one in an attribute."""
    from lathe.core.kernels.elementwise import cuda_spec as elementwise
    from lathe.core.kernels.reduce.spec import KINDS

    like = {
        *elementwise.OPS, *VIEWS, *KINDS, "MatMul", "Conv", "LogSoftmax", "GuardedSoftmax", "RMSNormalization",
        "GroupNormalization", "InstanceNormalization", "BatchNormalization", "ArgMin", "AveragePool", "DepthToSpace",
        "SpaceToDepth", "Expand", "Tile", "Slice", "Split", "Pad",
    }  # fmt: skip
    assert set(kernel_table_cuda.TABLE) <= like | {op for op, *_ in families.FAMILIES}


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from lathe.core.kernels.reference import cpu as reference
    from lathe.core.ops.nn.activation import Relu
    from loadtest.gpu.parts import probe

    graph = families.graph_of("Relu", ("float32[n,8]",), {})
    assert probe._kernel(graph, "simulated").ok is True
    right = reference.ReferenceKernel.run

    def wrong(self: Any, grid: Any, addresses: Sequence[int], n: int, view: Any) -> None:
        right(self, grid, addresses, n, view)
        view(addresses[-1], 4 * 8 * n).view(np.float32)[...] += 1  # in every row, because the rows are compared too

    monkeypatch.setattr(reference.ReferenceKernel, "run", wrong)
    assert Relu is not None and probe._kernel(graph, "simulated").ok is False


def test_a_peer_that_does_not_run_costs_only_its_own_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that was not compiled is not reported as compiled."""
    import loadtest.gpu.comparison as versus

    def right(name: str, model: Any, x: Any, precision: str) -> peers.Engine:
        result = np.ones((2, 2), np.float32)
        return peers.Engine(lambda: result, lambda: time.sleep(1e-3), lambda: 1e-3)

    def refused(*_: Any) -> peers.Engine:
        raise RuntimeError("PyTorch compiled 3 graphs with 2 breaks, expected one without")

    monkeypatch.setattr(versus, "torch_is_usable", lambda device: True)
    found = versus.compare("small", "float32", 2, {"eager": right, "compiled": refused}, Bench(SMALL))
    assert set(found.figures["whole"]) == {"lathe", "eager", "ahead"}
    assert found.figures["refused"] == {
        "compiled": "RuntimeError: PyTorch compiled 3 graphs with 2 breaks, expected one without"
    }
    assert found.ok is False and "off from ['eager']" in found.text  # the model does not return ones


def test_a_graph_break_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from collections import Counter

    counters = {"stats": Counter(unique_graphs=1), "graph_break": Counter()}
    utilities = SimpleNamespace(counters=counters)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utilities)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch._dynamo", SimpleNamespace(utils=utilities))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(_dynamo=None))  # type: ignore[arg-type]
    peers.check_one_graph()
    counters["graph_break"]["a print"] = 1
    with pytest.raises(RuntimeError, match="1 graphs with 1 breaks"):
        peers.check_one_graph()


@pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed: make test-cuda does not need it")
def test_pytorch_models_match_the_files_and_compile_to_one_graph() -> None:
    """On the processor. The second model is compiled in the process of the first one."""
    import torch

    for name, rows in (("small", 2), ("minilm", 1), ("small", 3)):
        file = models.onnx_of(name)
        x = np.random.default_rng(0).standard_normal((rows, *models.LARGE[name].shape)).astype(np.float32)
        (want,) = ort.InferenceSession(file.SerializeToString()).run(None, {"x": x})
        network = peers.network_of(name, file, "float32", x.ndim, "cpu")
        peers.reset_compiler()
        made = torch.compile(network, dynamic=False, fullgraph=True, backend="aot_eager")
        with torch.inference_mode():
            for _ in range(2):
                assert np.abs(made(torch.from_numpy(x)).numpy() - want).max() < 1e-4 * np.abs(want).max()
        peers.check_one_graph()


def test_a_sanitizer_that_finds_something_or_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\ncase $2 in memcheck) exit 9;; racecheck) exec sleep 30;; esac\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sanitizer, "TOOLKIT", str(tmp_path))
    monkeypatch.setattr(sanitizer.shutil, "which", lambda name, path=None: path and str(tool))
    monkeypatch.setattr(sanitizer, "_LIMIT", 0.5)
    bench = Bench(replace(SMALL, device="cuda"))
    memory = sanitizer.measure(Case("sanitizer", "memcheck/kernels"), bench)
    race = sanitizer.measure(Case("sanitizer", "racecheck/training"), bench)
    assert (memory.ok, memory.text) == (False, "memcheck of kernels: exit status 9")
    assert (race.ok, race.text) == (None, "racecheck of training: not done in 0 s")


def test_case_names_are_unique_and_important_cases_come_first() -> None:
    for part in PARTS:
        keys = [case.key for case in CASES[part](Options())]
        assert len(keys) == len(set(keys)) > 0
    assert speed.cases(Options())[0].name == "resnet50/bfloat16/1"
    assert PARTS[0] == "probe" and PARTS[-1] == "sanitizer"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "minilm"])
def test_the_large_models_agree_with_onnx_runtime(name: str) -> None:
    model = models.onnx_of(name)
    x = np.random.default_rng(0).standard_normal((2, *models.LARGE[name].shape)).astype(np.float32)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": x})
    assert result.shape == (2, *models.LARGE[name].output) and np.isfinite(result).all() and result.std() > 0


def test_findings_can_be_shown_without_the_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results(tmp_path / "found.jsonl")
    results.add("case", part="tiles", name="a", code="x", ended="")
    results.add_cache_file("objects/a.o", b"1234")
    assert run.main(["--show", "--out", str(tmp_path / "found.jsonl")]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line)["name"] == "a"
