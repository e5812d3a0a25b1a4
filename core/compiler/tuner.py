"""The autotuner: finds the fastest of several kernels for a node by timing them on this machine, and keeps the result.

Every node with several candidate kernels (`lathe.core.kernels.choose.candidates`) is a problem, identified by a digest
of the candidates and batch sizes: nodes of equal shapes share a problem. The problems with the most work come first,
until the time budget is spent. A problem that is not measured keeps the preferred kernel, the first candidate, unless
the kernel's family lost on other problems and that is evidence for the whole family (`KernelSpec.represents_family`).
Candidates take turns on operands of real sizes, at several batch sizes, on a bench: one thread of the host, or a stream
of a device. To replace the preferred kernel, a candidate needs a clear lead in the median over rounds, so that noise
changes nothing.

Findings belong to one target and one version of the generators. They are kept in the store (`Record`) and inside
artifacts. Compiling with the findings of an artifact and without measuring gives the same artifact, byte by byte.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from pathlib import Path
from statistics import geometric_mean, median
from typing import TypeAlias

from lathe.core.codegen.jit import generator_version, llvm_version
from lathe.core.compiler.options import Options
from lathe.core.errors import ArtifactError, DeviceMemoryError
from lathe.core.files import replace_file
from lathe.core.ir.graph import Graph, Node
from lathe.core.kernels.call import KernelCall, KernelSpec, Request, by_batch, first_batches, is_exact, recalled_call
from lathe.core.kernels.choose import candidates, select
from lathe.core.kernels.cuda import triton_version
from lathe.core.kernels.target import GpuTarget, Target
from lathe.core.plan.kernel_choice import is_plannable
from lathe.core.plan.plan import estimated_affine
from lathe.core.runtime.artifact.bundle import Bundle
from lathe.core.runtime.host.trial import Bench, TimedKernel

Prepare: TypeAlias = Callable[[Iterable[KernelSpec]], None]
Findings: TypeAlias = dict[str, str]  # problem -> the kernel to use, as `KernelSpec.finding` names it

_FEW_CANDIDATES, _FEW_ON_GPU = 3, 6  # candidates that are timed when time is short
_MIN_WORK = 2_000_000  # operations at the largest batch size; below this a choice makes no noticeable difference
_MAX_WORK = 200_000_000_000  # bounds the time of a trial; the next line bounds its memory
_MAX_BYTES = 1 << 29
_BYTE = 8  # operations in the time of moving one byte, roughly
_SAMPLE_BATCH = 8
_SAMPLE_STEP = 4  # factor between the batch sizes that are measured on a GPU
_MAX_ROUNDS, _MIN_ROUNDS = 7, 3
_MIN_LEAD = 1.03  # the least speed-up, as geometric mean over all batch sizes
_MAX_LOSS = 0.98  # the least speed-up at any one batch size
_DROP_BELOW = 0.85  # a candidate below this speed-up is not timed further


@dataclass(frozen=True)
class Problem:
    """One tuning problem: a node's candidate kernels `calls`, the preferred one first.

    `batches`: the batch sizes to measure at, ascending.
    """

    request: Request
    calls: tuple[KernelCall, ...]
    batches: tuple[int, ...]

    @property
    def few(self) -> Problem:
        """A copy for when time is short: it has only the first 3 candidates, or the first 6 if the target is a GPU."""
        on_gpu = isinstance(self.request.target, GpuTarget)
        return replace(self, calls=self.calls[: _FEW_ON_GPU if on_gpu else _FEW_CANDIDATES])

    @cached_property
    def key(self) -> str:
        """24 hex digits that identify the problem in findings of all models: a digest of candidates and batch sizes.

        On GPUs the properties of the GPU count, too.
        """
        target = self.request.target
        place = [target.tuning_key] if isinstance(target, GpuTarget) else []
        lines = [*place, str(self.batches), *(call.key for call in self.calls)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]

    @cached_property
    def kernels(self) -> tuple[KernelCall, ...]:
        """The calls of single kernels to measure, each once; on a CPU these are the candidates."""
        found = (kernel for call in self.calls for _, kernel in call.kernels)
        return tuple({kernel.key: kernel for kernel in found}.values())

    @property
    def work(self) -> int:
        """Operations at the largest batch size, where each byte counts as 8 operations (`_BYTE`)."""
        call, n = self.calls[0], self.batches[-1]
        return estimated_affine(call.flops).at(n) + _BYTE * estimated_affine(call.bytes).at(n)

    @property
    def nbytes(self) -> int:
        """The bytes that the preferred kernel reads and writes at the largest batch size."""
        return estimated_affine(self.calls[0].bytes).at(self.batches[-1])

    def recorded_candidate(self, findings: Mapping[str, str]) -> KernelCall | None:
        """The candidate that a finding names: the one for all candidates, otherwise that for the first few (`few`).

        None if there is no finding, or it names no candidate.
        """
        finding = findings.get(self.key) or findings.get(self.few.key) or ""
        return recalled_call(finding, {call.spec.symbol: call for call in self.kernels})

    def unbeaten(self, beaten: Collection[str]) -> KernelCall | None:
        """If the preferred kernel's family is in `beaten`, the first candidate of another family; None otherwise.

        None also if all candidates are of families in `beaten`.
        """
        if self.calls[0].spec.family not in beaten:
            return None
        return next((call for call in self.calls if call.spec.family not in beaten), None)


@dataclass
class Choices:
    """Selects kernels by findings (problem key to kernel). `used` collects the findings applied, for the artifact."""

    findings: Mapping[str, str]
    batches: tuple[int, ...]
    winograd: bool = True  # see Request
    used: Findings = field(default_factory=dict)
    problems: Mapping[Node, Problem] = field(default_factory=dict)  # valid for nodes whose operands are whole tensors
    beaten_families: frozenset[str] = frozenset()  # families that lost when measured, see `beaten_families`

    def __call__(self, request: Request) -> KernelCall | None:
        """The kernel for a node; None if there is none.

        The kernel is that of a finding; otherwise the first one of a family that did not lose, if the preferred
        kernel's family lost; otherwise the preferred one. The first two are noted in `used`.
        """
        request = replace(request, winograd=self.winograd and not is_exact(request.node))
        if not self.findings:
            return select(request)
        problem = self._problem(request)
        chosen = (
            problem.recorded_candidate(self.findings) or problem.unbeaten(self.beaten_families)
            if len(problem.calls) > 1
            else None
        )
        if chosen is not None:
            self.used[problem.key] = chosen.finding
            return chosen
        return problem.calls[0] if problem.calls else None

    def _problem(self, request: Request) -> Problem:
        inside = request.inputs_in_place or any(
            value in request.strides for value in (*request.node.inputs, *request.node.outputs)
        )
        found = None if inside else self.problems.get(request.node)
        return found or Problem(request, candidates(request), self.batches)


def choices(
    graph: Graph,
    target: Target | GpuTarget,
    options: Options,
    record: Record | None,
    bench: Bench | None,
    prepare: Prepare | None = None,
) -> Choices:
    """A selector of kernels by findings about a graph's nodes, after as much measuring as the options allow.

    Without tuning only the findings in the options count, so that the result depends on nothing else. With tuning but
    without a bench the record counts, too, and nothing is measured; `prepare` compiles the candidates, for a GPU
    elsewhere to measure. With both, new findings are added to the record.
    """
    batches = measured_batches(target, options.max_batch)
    findings = dict(options.findings)
    by_node: dict[Node, Problem] = {}
    if options.tune:
        findings = {**(record.read() if record else {}), **findings}
        by_node = problems(graph, target, options.threads, batches, options.winograd)
        todo = worthwhile_problems(by_node.values()) if bench is not None or prepare is not None else []
        new = tune(todo, findings, options.tune, bench, prepare) if bench is not None else {}
        if bench is None and prepare is not None:
            tried = todo if options.tune == inf else [problem.few for problem in todo]
            prepare(kernel.spec for problem in tried for kernel in problem.kernels)
        if new and record:
            record.add(new)
        findings |= new
    lost = beaten_families(by_node.values(), findings)
    return Choices(findings, batches, options.winograd, problems=by_node, beaten_families=lost)


def beaten_families(given: Iterable[Problem], findings: Mapping[str, str]) -> frozenset[str]:
    """The kernel families that were preferred in measured problems, but lost more than half of their work.

    Only kernels with `represents_family` count. Problems that were not measured avoid these families.
    """
    scores: Counter[str] = Counter()
    for problem in {problem.key: problem for problem in given if problem.calls}.values():
        found, preferred = problem.recorded_candidate(findings), problem.calls[0].spec
        if found is not None and preferred.represents_family:
            scores[preferred.family] += problem.work if found.spec.family == preferred.family else -problem.work
    return frozenset(family for family, score in scores.items() if score < 0)


def measured_batches(target: Target | GpuTarget, most: int) -> tuple[int, ...]:
    """The batch sizes to measure at, ascending: 1 and 8, on GPUs also 32 and so on by factors of 4, all up to `most`.

    The last one is `most` on GPUs, and at most 8 on CPUs.
    """
    if not isinstance(target, GpuTarget):
        return tuple(dict.fromkeys((1, min(most, _SAMPLE_BATCH))))
    sizes = [1, _SAMPLE_BATCH]
    while sizes[-1] < most:
        sizes.append(sizes[-1] * _SAMPLE_STEP)
    return (*(size for size in sizes if size < most), most)


def problems(
    graph: Graph, target: Target | GpuTarget, threads: int, batches: tuple[int, ...], winograd: bool = True
) -> dict[Node, Problem]:
    """The tuning problem of every node whose operands are all tensors of shapes that are known once `n` is."""
    found = {}
    for node in filter(_is_static, graph.nodes):
        request = Request(node, graph.constants, target, threads, winograd=winograd and not is_exact(node))
        found[node] = Problem(request, candidates(request), batches)
    return found


def worthwhile_problems(given: Iterable[Problem]) -> list[Problem]:
    """The problems to measure: equal ones once, the most work first; negligible and too large ones are left out.

    First comes the largest problem of each family with `represents_family`, so that even a short budget gives evidence
    on all of these families.
    """
    found: dict[str, Problem] = {}
    work: Counter[str] = Counter()
    for problem in given:
        if len(problem.calls) > 1 and problem.work <= _MAX_WORK and problem.nbytes <= _MAX_BYTES:
            found.setdefault(problem.key, problem)
            work[problem.key] += problem.work
    keys = [key for key, total in work.most_common() if total >= _MIN_WORK]
    specs = {key: found[key].calls[0].spec for key in reversed(keys)}
    first = {spec.family: key for key, spec in specs.items() if spec.represents_family}.values()
    return [found[key] for key in dict.fromkeys((*first, *keys))]


def tune(
    todo: Iterable[Problem],
    known: Mapping[str, str],
    seconds: float,
    bench: Bench,
    prepare: Prepare | None = None,
) -> Findings:
    """Findings (problem key to the fastest kernel) for problems without one in `known`, as many as fit into `seconds`.

    In limited time only the first candidates of each problem are measured (`Problem.few`). With infinite `seconds`, all
    candidates of all problems are measured, and `prepare` may compile them in parallel before. A problem that does not
    fit the device's memory is skipped.
    """
    findings: Findings = {}
    if seconds == inf and prepare is not None:
        todo = [problem for problem in todo if problem.key not in known]
        prepare(kernel.spec for problem in todo for kernel in problem.kernels)
    end = time.perf_counter() + seconds
    longest = 0.0
    for full in todo:
        problem = full if seconds == inf else full.few
        if problem.key in known or full.key in known:
            continue
        started = time.perf_counter()
        if started + longest > end:
            break
        with suppress(DeviceMemoryError):
            findings[problem.key] = fastest(problem, bench, end).finding
        longest = max(longest, time.perf_counter() - started)
    return findings


def fastest(problem: Problem, bench: Bench, end: float = inf) -> KernelCall:
    """The preferred kernels, or faster ones: on a GPU by batch size, on a CPU one kernel for all sizes.

    `bench` measures them. After the time `end` (of `time.perf_counter`) only 3 rounds are made. DeviceMemoryError if
    the operands do not fit a device's memory.
    """
    calls, gains, preferred = list(problem.kernels), [], []
    with bench(problem.kernels, problem.request) as trials_at:
        for n in problem.batches:
            key = problem.calls[0].at(n).key
            preferred.append(next(at for at, call in enumerate(problem.kernels) if call.key == key))
            with trials_at(n) as trials:
                gains.append(_speedups(trials, end, preferred[-1]))
                calls = [trial.settled(call) for trial, call in zip(trials, calls, strict=True)]
    if not isinstance(problem.request.target, GpuTarget):
        return _fastest_for_all(calls, gains)
    chosen = [
        max(range(len(calls)), key=lambda at: each[at]) if max(each) >= _MIN_LEAD else first
        for each, first in zip(gains, preferred, strict=True)
    ]
    return by_batch(list(zip(first_batches(problem.batches), [calls[at] for at in chosen], strict=True)))


def _fastest_for_all(calls: Sequence[KernelCall], gains: Sequence[Sequence[float]]) -> KernelCall:
    """The first call, or the fastest other one if that is clearly faster over all batch sizes.

    It must be 3 % faster in the geometric mean, and at most 2 % slower at any batch size. `gains`: for each batch size
    the speed-up of each call over the first one.
    """
    by_call = list(zip(calls, zip(*gains, strict=True), strict=True))
    contenders = [(geometric_mean(each), call) for call, each in by_call if min(each) >= _MAX_LOSS]
    score, best = max(contenders, key=lambda contender: contender[0])
    return best if score >= _MIN_LEAD else calls[0]


def _speedups(trials: Sequence[TimedKernel], end: float, preferred: int) -> list[float]:
    """For each trial the speed-up over the `preferred` one: the median over 3 to 7 rounds in which trials take turns.

    Slow trials are left out after 3 rounds. After the time `end` there are only 3 rounds.
    """
    rounds: list[list[float]] = []
    running = list(range(len(trials)))
    gains = [1.0] * len(trials)
    for _ in range(_MAX_ROUNDS):
        times = {index: trials[index].seconds() for index in running}
        rounds.append([_speedup(times[preferred], times.get(index, inf)) for index in range(len(trials))])
        gains = [median(column) for column in zip(*rounds, strict=True)]
        if len(rounds) < _MIN_ROUNDS:
            continue
        running = [index for index in running if index == preferred or gains[index] > _DROP_BELOW]
        if len(running) == 1 or time.perf_counter() > end:
            break
    return gains


def _speedup(reference: float, seconds: float) -> float:
    """How many times as fast as the reference; 0 for a kernel that does not run or was left out (infinite time)."""
    return 0.0 if seconds == inf else reference / seconds


def _is_static(node: Node) -> bool:
    """Whether every input and output of a node is a tensor whose shape is known once `n` is."""
    return all(is_plannable(value) for value in (*node.inputs, *node.outputs) if value is not None)


class Record:
    """Findings on disk, for one target and one version of the generators. Several processes may share it."""

    def __init__(self, folder: Path, target: Target | GpuTarget) -> None:
        place, compiler = (
            (target.tuning_key, triton_version()) if isinstance(target, GpuTarget) else (target.key, llvm_version())
        )
        self._origin = "\n".join((place, generator_version(), compiler))
        self.path = folder / f"{hashlib.sha256(self._origin.encode()).hexdigest()[:24]}.json"

    def read(self) -> Findings:
        """The findings on disk; empty if there is no valid file of this target and version."""
        try:
            data = json.loads(self.path.read_bytes())
            findings = {str(key): str(symbol) for key, symbol in data["findings"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        whole = data.get("origin") == self._origin and data.get("sha256") == _digest(findings)
        return findings if whole else {}

    def add(self, findings: Mapping[str, str]) -> None:
        """Add findings to those on disk; the file is replaced atomically. Nothing happens if it cannot be written."""
        merged = {**self.read(), **findings}
        content = {"origin": self._origin, "sha256": _digest(merged), "findings": dict(sorted(merged.items()))}
        with suppress(OSError):  # a full disk only costs the next tuning
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self.path, json.dumps(content, indent=1).encode())


def read_findings(path: Path) -> Findings:
    """The findings inside an artifact; empty if it has none, as an artifact that holds only a graph.

    ArtifactError if the file is missing, no artifact, or writable by another user, or if its findings are malformed.
    """
    with Bundle(path) as bundle:
        findings = bundle.facts.get("findings", {})
    if not isinstance(findings, dict):
        raise ArtifactError(f"{path.name}: its findings are malformed")
    return {str(problem): str(symbol) for problem, symbol in findings.items()}


def _digest(findings: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(sorted(findings.items())).encode()).hexdigest()
