"""Everything that only a GPU can show, in one call: `python -m loadtest.gpu` (the extra `cuda`; PyTorch for peers).

1. agreement   the zoo on the GPU and on the CPU: 1e-4 of the largest output in float32, 2e-2 in bfloat16
2. training    steps on the GPU and on the CPU, losses and parameters: the same bounds; their time beside PyTorch's
3. sanitizer   small models and a training step once more under NVIDIA's compute-sanitizer, where it is installed
4. overhead    what a run costs the host, besides waiting for the GPU: at most 15 microseconds
5. ceilings    what a large product and a large copy reach on this GPU
6. speed       ResNet-50 and MiniLM, tuned, beside PyTorch, eager and compiled with CUDA graphs; engines take turns in
               rounds, and "ahead" is the median of (best peer's time / Lathe's time) within a round; every step of
               those two as a share of the ceilings

Each part is a process of its own: after a fault of the GPU, or one that takes too long, the others go on. The full
tables go to a file (--out) as they come, a short one is printed last. Exit status 1 when a promise is broken, 2 when
there is no GPU. `--device simulated` tries the script itself; its times say nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

import core
from core.errors import LatheError, UnsupportedError
from core.ir.build import Builder
from core.ir.graph import Graph
from core.ir.types import DType, TensorType, symbol
from core.runtime.device_executable import DeviceExecutable
from core.runtime.devices import open_device
from core.runtime.machine import Peaks
from core.runtime.session import Session
from loadtest import gpu_models, gpu_training, training, zoo
from loadtest.engine import relative_error, slice_ms
from loadtest.gpu_report import InProcesses, Report, Run, summary_of

SMALL = ("lenet", "mlp", "transformer")
SMALL_TRAINING = ("lenet", "mlp")
SANITIZER_SECONDS = 1500
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
PRECISIONS = ("float32", "tf32", "bfloat16", "float16")
MOST_OVERHEAD = 15.0  # microseconds
PRODUCT, COPY = 8192, 1 << 28  # rows of a square matrix, elements of a copy: far beyond any cache
ROUNDS, SLICE = 7, 0.3
SANITIZER, TOOLKIT = "compute-sanitizer", "/usr/local/cuda/bin"
CASES_AT_ONCE = 8  # of speed, within the limit of one part: PyTorch compiles each for minutes


# -- 1, 2: the right numbers ------------------------------------------------------------------------------------------


def agreement(report: Report, device: str, names: Sequence[str]) -> None:
    report.line(f"{'model':20s} {'precision':10s} {'error':>9s}  runs on")
    worst = dict.fromkeys(TOLERANCES, 0.0)
    for name in names:
        model, feeds = zoo.model(name).SerializeToString(), zoo.feeds(name, 3)
        with core.compile(model, tune="off") as session:
            want = session.run(feeds)["y"]
        for precision in TOLERANCES:
            error, where = _disagreement(model, feeds, want, device, precision)
            worst[precision] = max(worst[precision], error)
            report.line(f"{name:20s} {precision:10s} {error:9.1e}  {where}")
    for precision, most in TOLERANCES.items():
        text = f"agreement in {precision}: {worst[precision]:.1e} at most {most:.0e} over {len(names)} models"
        report.conclude(text, worst[precision] <= most)


def _disagreement(
    model: bytes, feeds: dict[str, Any], want: NDArray[Any], device: str, precision: Any
) -> tuple[float, str]:
    """The largest error, launched and by a graph, and where parts of the model run."""
    try:
        with core.compile(model, device=device, precision=precision, tune="off", max_batch=4) as session:
            runs = []
            for _ in range(3):
                runs.append(session.run(feeds)["y"])
                session.settle(60)
            return max(relative_error(run, want) for run in runs), ", ".join(_devices(session))
    except Exception as error:  # whatever it is, other models are measured all the same
        return float("inf"), f"{type(error).__name__}: {str(error)[:200]}"


def _devices(session: Session) -> list[str]:
    head = next((line for line in session.explain().splitlines() if " parts on " in line), "")
    return head.partition(" parts on ")[2].split(", ")


def sanitizer(report: Report, device: str, out: Path) -> None:
    """No error of memory, nor a race for shared memory: by processes of their own, since the tool makes all slow."""
    tool = shutil.which(SANITIZER) or shutil.which(SANITIZER, path=TOOLKIT)
    if tool is None or not device.startswith("cuda"):
        report.conclude(f"{SANITIZER}: not installed, or no GPU", None)
        return
    for check in ("memcheck", "racecheck"):
        for part, models in (("agreement", SMALL), ("training-agreement", SMALL_TRAINING)):
            script = [sys.executable, "-m", "loadtest.gpu", "--device", device, "--out", f"{out}.{check}"]
            command = [tool, "--tool", check, "--error-exitcode", "9", *script, "--only", part]
            what = f"{SANITIZER} {check}, {part} of {', '.join(models)}"
            try:
                done = subprocess.run(
                    [*command, "--models", ",".join(models)], capture_output=True, text=True, timeout=SANITIZER_SECONDS
                )
            except subprocess.TimeoutExpired:
                report.conclude(f"{what}: not done in {SANITIZER_SECONDS} s", None)
                continue
            report.line(done.stdout[-2000:] + done.stderr[-2000:])
            report.conclude(f"{what}: exit status {done.returncode}", done.returncode == 0)


# -- 3: the host's part -----------------------------------------------------------------------------------------------


class _Waiting:
    """Counts how long the host waits for an event."""

    def __init__(self, event: Any) -> None:
        self.seconds = 0.0
        self._wait = event.synchronize
        event.synchronize = self.synchronize

    def synchronize(self) -> None:
        started = time.perf_counter()
        self._wait()
        self.seconds += time.perf_counter() - started


def overhead(report: Report, device: str) -> None:
    with core.compile(_elementwise(64), device=device) as session:
        executable = _only_part(session)
        x = np.ones((1, 64), np.float32)
        for _ in range(3):
            executable.run(1, [x])
            executable.settle(60)
        waits = [_Waiting(slot.done) for slot in executable._slots]
        samples = [_host_seconds(executable, x, waits) for _ in range(300)]
    microseconds = statistics.median(samples) * 1e6
    holds = microseconds <= MOST_OVERHEAD if device.startswith("cuda") else None
    report.conclude(f"host overhead per run: {microseconds:.1f} us, at most {MOST_OVERHEAD:.0f}", holds)


def _host_seconds(executable: DeviceExecutable, x: NDArray[Any], waits: Sequence[_Waiting]) -> float:
    waited, started = sum(wait.seconds for wait in waits), time.perf_counter()
    executable.run(1, [x])
    return time.perf_counter() - started - (sum(wait.seconds for wait in waits) - waited)


def _only_part(session: Session) -> DeviceExecutable:
    runner: Any = next(iter(session._shapes.made().values()))
    part = runner._parts[0]
    if not isinstance(part, DeviceExecutable):
        raise LatheError(f"the model runs on {part.shares[0].device}")
    return part


def _elementwise(width: int) -> Graph:
    graph = Graph("elementwise")
    b = Builder(graph)
    graph.outputs = [b("Abs", b.input("x", TensorType(DType.FLOAT32, (symbol("batch"), width))))]
    return graph


# -- 4: what this GPU can do ------------------------------------------------------------------------------------------


def ceilings(report: Report, device: str, size: int, elements: int) -> dict[str, Peaks]:
    """By precision, as Lathe's own kernels reach them: what a step is a share of."""
    copied = _step_seconds(_elementwise(1024), device, "float32", elements // 1024)
    bandwidth = 8 * elements / copied
    found = {}
    for precision in PRECISIONS:
        seconds = _step_seconds(_product(size), device, precision, size)
        found[precision] = Peaks(flops=2 * size**3 / seconds, bandwidth=bandwidth)
        text = f"{precision}: product of {size}: {found[precision].flops / 1e12:.1f} TFLOP/s"
        report.conclude(f"{text}, copy {bandwidth / 1e9:.0f} GB/s", None)
    return found


def _product(size: int) -> Graph:
    graph = Graph("product")
    b = Builder(graph)
    x = b.input("x", TensorType(DType.FLOAT32, (symbol("batch"), size)))
    weight = np.random.default_rng(0).standard_normal((size, size)).astype(np.float32)
    graph.outputs = [b("MatMul", x, graph.add_constant(weight))]
    return graph


def _step_seconds(graph: Graph, device: str, precision: Any, rows: int) -> float:
    """Of the step that takes longest."""
    width = int(graph.inputs[0].shape[1])  # type: ignore[arg-type]
    with core.compile(graph, device=device, precision=precision, max_batch=rows) as session:
        nodes = session.profile({"x": np.ones((rows, width), np.float32)}, runs=5).nodes
    return max(node.nanoseconds for node in nodes) / 1e9


# -- 5, 6: how fast ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    model: str
    batch: int
    precision: str

    def __str__(self) -> str:
        return f"{self.model}, batch {self.batch}, {self.precision}"


def speed(
    report: Report, device: str, cases: Sequence[Case], most: dict[str, Peaks], seconds: float, tune: str = "off"
) -> None:
    """Median milliseconds per call, host to host."""
    if find_spec("torch") is None:
        report.conclude("PyTorch is not installed: nothing to compare with", None)
    ratios: list[float] = []
    report.line(
        f"{'model':10s} {'batch':>5s} {'precision':10s} {'lathe ms':>9s} {'eager':>9s} {'compiled':>9s} {'ahead':>6s}"
    )
    for case in cases:

        def measure(case: Case = case) -> None:
            ms, ahead = _compare(report, case, device, most, seconds, tune)
            if ahead is not None:
                ratios.append(ahead)
                _conclude_ahead(report, ratios)
            times = [f"{ms[e]:9.3f}" if e in ms else f"{'-':>9s}" for e in ("lathe", "eager", "compiled")]
            last = f"x{ahead:.2f}" if ahead is not None else "-"
            report.line(f"{case.model:10s} {case.batch:5d} {case.precision:10s} {' '.join(times)} {last:>6s}")

        report.attempt(f"speed of {case}", measure)


def _conclude_ahead(report: Report, ratios: Sequence[float]) -> None:
    """After every case, over those that there are."""
    mean = statistics.geometric_mean(ratios)
    text = f"ahead of PyTorch's best by x{mean:.2f} in the geometric mean, worst x{min(ratios):.2f}"
    report.conclude(f"{text}, over {len(ratios)} cases", mean >= 1.0, about="ahead")


def _compare(
    report: Report, case: Case, device: str, most: dict[str, Peaks], seconds: float, tune: Any
) -> tuple[dict[str, float], float | None]:
    model = gpu_models.onnx_of(case.model)
    shape = gpu_models.LARGE[case.model].shape
    x = np.random.default_rng(case.batch).standard_normal((case.batch, *shape)).astype(np.float32)
    precision: Any = case.precision
    data = model.SerializeToString()
    with core.compile(data, device=device, precision=precision, max_batch=case.batch, tune=tune) as session:
        runs: dict[str, Callable[[], Any]] = {"lathe": lambda: session.run({"x": x})["y"]}
        runs |= _peers(report, case, model, x) if device.startswith("cuda") else {}
        _agree(report, case, {engine: np.asarray(run()) for engine, run in runs.items()})
        for run in runs.values():
            slice_ms(run, seconds)
        session.settle(60)
        rounds = [{engine: slice_ms(run, seconds) for engine, run in runs.items()} for _ in range(ROUNDS)]
        _kernels(report, case, session, x, most[case.precision])
    ms = {engine: statistics.median(each[engine] for each in rounds) for engine in runs}
    peers = [engine for engine in runs if engine != "lathe"]
    ahead = [min(each[peer] for peer in peers) / each["lathe"] for each in rounds] if peers else []
    return ms, statistics.median(ahead) if ahead else None


def _peers(report: Report, case: Case, model: onnx.ModelProto, x: NDArray[Any]) -> dict[str, Callable[[], Any]]:
    """Those that run here: a PyTorch without CUDA, or that does not compile a model, costs only its own figure."""
    if find_spec("torch") is None:
        return {}
    made: dict[str, Callable[[], Any]] = {}

    def load() -> None:
        from loadtest.gpu_torch import peers

        made.update(peers(case.model, model, x, case.precision))

    report.try_peer(f"PyTorch, {case}", load)
    return {engine: run for engine, run in made.items() if report.try_peer(f"{engine}, {case}", run)}


def _agree(report: Report, case: Case, results: dict[str, NDArray[Any]]) -> None:
    """With eager PyTorch, as far as the precision goes."""
    if "eager" in results:
        error = relative_error(results["lathe"], results["eager"])
        if error > (1e-3 if case.precision == "float32" else 5e-2):
            report.conclude(f"{case.model} in {case.precision}, batch {case.batch}: off by {error:.1e}", False)


def _kernels(report: Report, case: Case, session: Session, x: NDArray[Any], most: Peaks) -> None:
    """The steps that take longest, as shares of what this GPU can do."""
    nodes = session.profile({"x": x}).nodes
    total = sum(node.nanoseconds for node in nodes)
    least = sum(most.seconds(node.flops, node.bytes) for node in nodes) * 1e9
    report.line(f"  {case}: steps {total / 1e6:.3f} ms, {least / total:.0%} of the ceilings")
    for node in sorted(nodes, key=lambda node: -node.nanoseconds)[:15]:
        share = most.seconds(node.flops, node.bytes) * 1e9 / node.nanoseconds
        bound = most.limit(node.flops, node.bytes)
        report.line(f"    {node.nanoseconds / 1e3:9.1f} us {share:6.1%} of {bound:7s} {node.op:16s} {node.kernel}")


# -- the call ---------------------------------------------------------------------------------------------------------


PARTS = ("agreement", "training", "sanitizer", "overhead", "ceilings", "speed")
DEVICE = "device"  # what is measured: said by a process of its own, as GPUs may be for one process at a time


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", choices=(DEVICE, *PARTS, "training-agreement"), help="one part, in this process")
    parser.add_argument("--models", type=names, help="of the zoo for agreement, of loadtest.training for training")
    parser.add_argument("--large", type=names, default=list(gpu_models.LARGE))
    parser.add_argument("--batches", type=lambda text: [int(b) for b in text.split(",")], default=[1, 8, 32, 128])
    parser.add_argument("--precisions", type=names, default=list(PRECISIONS))
    parser.add_argument("--tune", default="60", help="seconds of measuring kernels for each case of speed; off, full")
    parser.add_argument("--product", type=int, default=PRODUCT, help="rows of the matrix that shows the ceiling")
    parser.add_argument("--copy", type=int, default=COPY, help="elements of the copy that shows the bandwidth")
    parser.add_argument("--slice", type=float, default=SLICE, help="seconds per engine and round")
    parser.add_argument("--limit", type=float, default=1800, help="seconds that a part may take")
    parser.add_argument("--out", type=Path, default=Path("gpu-report.txt"), help="where the full tables go")
    return parser.parse_args(arguments)


def cases_of(chosen: argparse.Namespace) -> Iterator[Case]:
    for model in chosen.large:
        for precision in chosen.precisions:
            yield from (Case(model, batch, precision) for batch in chosen.batches)


def run_part(part: str, chosen: argparse.Namespace, report: Report) -> None:
    """One of them, here. Ceilings are kept beside the report for the speed that is measured after them."""
    device = chosen.device
    trained = [name for name in chosen.models or training.MODELS if name in training.MODELS]
    zoo_models = [name for name in chosen.models or zoo.ZOO if name != "heavy" and name in zoo.ZOO]
    match part:
        case "device":
            here = open_device(device)
            report.conclude(f"{here.name}: {here.target}, {here.memory().total / 2**30:.0f} GiB", None)
        case "agreement":
            agreement(report, device, zoo_models)
        case "training" | "training-agreement":
            gpu_training.agreement(report, device, trained)
            if part == "training":
                gpu_training.speed(report, device, trained, chosen.slice)
        case "sanitizer":
            sanitizer(report, device, chosen.out)
        case "overhead":
            overhead(report, device)
        case "ceilings":
            found = ceilings(report, device, chosen.product, chosen.copy)
            _ceilings_at(chosen.out).write_text(json.dumps({name: astuple(peaks) for name, peaks in found.items()}))
        case "speed":
            if not _ceilings_at(chosen.out).exists():
                run_part("ceilings", chosen, report)
            known = json.loads(_ceilings_at(chosen.out).read_text())
            most_by_precision = {name: Peaks(*facts) for name, facts in known.items()}
            speed(report, device, list(cases_of(chosen)), most_by_precision, chosen.slice, chosen.tune)


def main(arguments: Sequence[str] | None = None, run: Run | None = None) -> int:
    """`run` runs a part; by default in a process of its own."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    chosen = parse(given)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    if chosen.only is not None and not _is_here(chosen.device):
        return 2
    chosen.out.write_text("")
    report = Report(chosen.out)
    if chosen.only is not None:
        report.attempt(chosen.only, lambda: run_part(chosen.only, chosen, report))
        report.save()
    elif not _all(report, chosen, run or _in_processes(given, chosen)):
        return 2
    report.line("\n".join(["", *report.summary]))
    return 1 if report.broken else 0


def _is_here(device: str) -> bool:
    try:
        open_device(device)
    except UnsupportedError as error:
        print(f"no GPU to measure: {error}", file=sys.stderr)
        return False
    return True


def _in_processes(given: Sequence[str], chosen: argparse.Namespace) -> InProcesses:
    """The sanitizer runs four times, and there may be many cases of speed."""
    times = {"sanitizer": 4.0, "speed": max(1.0, len(list(cases_of(chosen))) / CASES_AT_ONCE)}
    return InProcesses("loadtest.gpu", given, chosen.limit, times)


def _all(report: Report, chosen: argparse.Namespace, run: Run) -> bool:
    """Whether there was a device to measure."""
    _ceilings_at(chosen.out).unlink(missing_ok=True)
    for part in (DEVICE, *PARTS):
        out = chosen.out.with_name(f"{chosen.out.name}.{part}")
        for old in (out, summary_of(out)):
            old.unlink(missing_ok=True)
        status = run(part, out)
        if part == DEVICE and status == 2:
            return False
        report.take(part, out, status)
    return True


def _ceilings_at(out: Path) -> Path:
    """One place for all parts of a report, whose tables lie side by side."""
    return out.with_name("gpu-ceilings.json")


if __name__ == "__main__":
    sys.exit(main())
