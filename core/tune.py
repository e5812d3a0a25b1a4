"""Which of several kernels runs a node fastest on this machine: measured once, noted, and used again.

Every node for which the catalog has candidates is a problem, named by the digest of all of them: equal shapes share it.
The problems with the most work come first, until the budget is spent; what is not measured keeps the kernel that the
catalog prefers, unless its family lost elsewhere and is one of which that says enough (`KernelSpec.telling`).
Candidates take turns on operands of real sizes, at several batch sizes, on a bench: one thread of the host, or a stream
of a device. A challenger needs a clear lead over the preferred kernel in the median of rounds, so that noise changes
nothing.

A `Record` of findings belongs to one target and one version of the generators. It lies in the store, or travels inside
an artifact: compiling with the findings of an artifact and without measuring gives that artifact again, byte by byte.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
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

from core.codegen.jit import generator_version, llvm_version
from core.errors import ArtifactError, DeviceMemoryError
from core.ir.graph import Graph, Node
from core.kernels.catalog import KernelCall, KernelSpec, Request, candidates, select
from core.kernels.catalog.base import is_exact
from core.kernels.cuda import triton_version
from core.kernels.target import GpuTarget, Target
from core.options import Options
from core.plan.choice import plannable
from core.plan.plan import affine_of
from core.runtime.bundle import Bundle
from core.runtime.trial import Bench, Timed

Prepare: TypeAlias = Callable[[Iterable[KernelSpec]], None]
Findings: TypeAlias = dict[str, str]  # problem -> the kernel to use, as `KernelSpec.finding` names it

_FEW = 3  # candidates tried when time is short
_LEAST_WORK = 2_000_000  # operations at the largest batch size; below, a choice could not be felt
_MOST_WORK = 200_000_000_000  # a trial must end, and its operands must fit beside whatever else runs here:
_MOST_BYTES = 1 << 29
_BYTE = 8  # operations that take about as long as moving a byte
_SAMPLE_BATCH = 8
_ROUNDS, _LEAST_ROUNDS = 7, 3
_LEAD = 1.03  # over all batch sizes together
_LOSS = 0.98  # at any one of them
_HOPELESS = 0.85


@dataclass(frozen=True)
class Problem:
    """One choice to make: the candidates, the preferred one first, and the batch sizes to measure at."""

    request: Request
    calls: tuple[KernelCall, ...]
    batches: tuple[int, ...]

    @property
    def few(self) -> Problem:
        """The smaller choice, for when time is short."""
        return replace(self, calls=self.calls[:_FEW])

    @cached_property
    def key(self) -> str:
        """The same for equal candidates, in whatever model; on GPUs, for equal ones."""
        target = self.request.target
        place = [target.likeness] if isinstance(target, GpuTarget) else []
        lines = [*place, str(self.batches), *(call.spec.key for call in self.calls)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]

    @property
    def work(self) -> int:
        """Operations at the largest batch size, bytes counted as so many operations each."""
        call, n = self.calls[0], self.batches[-1]
        return affine_of(call.flops).at(n) + _BYTE * affine_of(call.bytes).at(n)

    @property
    def nbytes(self) -> int:
        """The memory of the operands at the largest batch size."""
        return affine_of(self.calls[0].bytes).at(self.batches[-1])

    def found(self, findings: Mapping[str, str]) -> KernelCall | None:
        """What was found, among all candidates or else among the few."""
        finding = findings.get(self.key) or findings.get(self.few.key) or ""
        symbol, _, rest = finding.partition(" ")
        call = next((call for call in self.calls if call.spec.symbol == symbol), None)
        return call.spec.recalled(call, rest) if call is not None and rest else call

    def other_than(self, beaten: Collection[str]) -> KernelCall | None:
        """The first candidate of another family, where the preferred one is of a family that was beaten."""
        if self.calls[0].spec.family not in beaten:
            return None
        return next((call for call in self.calls if call.spec.family not in beaten), None)


@dataclass
class Choices:
    """Picks kernels by findings. `used` collects those that mattered: what an artifact has to keep."""

    findings: Mapping[str, str]
    batches: tuple[int, ...]
    winograd: bool = True  # see Request
    used: Findings = field(default_factory=dict)
    looked_at: Mapping[Node, Problem] = field(default_factory=dict)  # as long as operands lie in tensors of their own
    beaten: frozenset[str] = frozenset()  # families that lost where it was measured, see `beaten`

    def __call__(self, request: Request) -> KernelCall | None:
        """The kernel for a node, as `catalog.select` would answer."""
        request = replace(request, winograd=self.winograd and not is_exact(request.node))
        if not self.findings:
            return select(request)
        problem = self._problem(request)
        chosen = problem.found(self.findings) or problem.other_than(self.beaten) if len(problem.calls) > 1 else None
        if chosen is not None:
            self.used[problem.key] = chosen.spec.finding
            return chosen
        return problem.calls[0] if problem.calls else None

    def _problem(self, request: Request) -> Problem:
        inside = request.placed or any(
            value in request.strides for value in (*request.node.inputs, *request.node.outputs)
        )
        found = None if inside else self.looked_at.get(request.node)
        return found or Problem(request, candidates(request), self.batches)


def choices(
    graph: Graph,
    target: Target | GpuTarget,
    options: Options,
    record: Record | None,
    bench: Bench | None,
    prepare: Prepare | None = None,
) -> Choices:
    """What is known of a graph's nodes, after as much measuring as the options allow.

    Without tuning only the findings that the options bring count, so that the result depends on nothing else. So it is
    without a bench, where the record counts, too: nothing is measured then, but `prepare` has the candidates that would
    be, for a GPU elsewhere to find them compiled. See `tune`.
    """
    batches = batches_of(target, options.max_batch)
    findings = dict(options.findings)
    by_node: dict[Node, Problem] = {}
    if options.tune:
        findings = {**(record.read() if record else {}), **findings}
        by_node = problems(graph, target, options.threads, batches, options.winograd)
        todo = worthwhile(by_node.values()) if bench is not None or prepare is not None else []
        new = tune(todo, findings, options.tune, bench, prepare) if bench is not None else {}
        if bench is None and prepare is not None:
            tried = todo if options.tune == inf else [problem.few for problem in todo]
            prepare(call.spec for problem in tried for call in problem.calls)
        if new and record:
            record.add(new)
        findings |= new
    lost = beaten(by_node.values(), findings)
    return Choices(findings, batches, options.winograd, looked_at=by_node, beaten=lost)


def beaten(given: Iterable[Problem], findings: Mapping[str, str]) -> frozenset[str]:
    """Telling families whose kernels were preferred, but lost most of the work that was measured: what was not measured
    had better run on others, too."""
    scores: Counter[str] = Counter()
    for problem in {problem.key: problem for problem in given if problem.calls}.values():
        found, preferred = problem.found(findings), problem.calls[0].spec
        if found is not None and preferred.telling:
            scores[preferred.family] += problem.work if found.spec.family == preferred.family else -problem.work
    return frozenset(family for family, score in scores.items() if score < 0)


def batches_of(target: Target | GpuTarget, most: int) -> tuple[int, ...]:
    """The batch sizes to measure at, where batches of up to `most` are expected: a GPU is made for large ones."""
    sizes = (1, min(most, _SAMPLE_BATCH), *([most] if isinstance(target, GpuTarget) else []))
    return tuple(dict.fromkeys(sizes))


def problems(
    graph: Graph, target: Target | GpuTarget, threads: int, batches: tuple[int, ...], winograd: bool = True
) -> dict[Node, Problem]:
    """The choice that every node of known shapes leaves."""
    found = {}
    for node in filter(_is_static, graph.nodes):
        request = Request(node, graph.constants, target, threads, winograd=winograd and not is_exact(node))
        found[node] = Problem(request, candidates(request), batches)
    return found


def worthwhile(given: Iterable[Problem]) -> list[Problem]:
    """Choices to be made, equal ones once, those with the most work first; none of too little work to be felt. Before
    them comes the greatest of every telling family, so that even a short time says something of all."""
    found: dict[str, Problem] = {}
    work: Counter[str] = Counter()
    for problem in given:
        if len(problem.calls) > 1 and problem.work <= _MOST_WORK and problem.nbytes <= _MOST_BYTES:
            found.setdefault(problem.key, problem)
            work[problem.key] += problem.work
    keys = [key for key, total in work.most_common() if total >= _LEAST_WORK]
    specs = {key: found[key].calls[0].spec for key in reversed(keys)}
    first = {spec.family: key for key, spec in specs.items() if spec.telling}.values()
    return [found[key] for key in dict.fromkeys((*first, *keys))]


def tune(
    todo: Iterable[Problem],
    known: Mapping[str, str],
    seconds: float,
    bench: Bench,
    prepare: Prepare | None = None,
) -> Findings:
    """Findings for problems that are not `known`, as many as fit into `seconds`; infinity: all candidates of all, which
    `prepare` may compile at once before. What a device has no room to try is left as it is."""
    findings: Findings = {}
    if seconds == inf and prepare is not None:
        todo = [problem for problem in todo if problem.key not in known]
        prepare(call.spec for problem in todo for call in problem.calls)
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
            findings[problem.key] = fastest(problem, bench, end).spec.finding
        longest = max(longest, time.perf_counter() - started)
    return findings


def fastest(problem: Problem, bench: Bench, end: float = inf) -> KernelCall:
    """The first candidate, or another that is clearly faster; past `end` the fewest rounds have to do."""
    calls, gains = list(problem.calls), []
    with bench(problem.calls, problem.request) as trials_at:
        for n in problem.batches:
            with trials_at(n) as trials:
                gains.append(_gains(trials, end))
                calls = [trial.settled(call) for trial, call in zip(trials, calls, strict=True)]
    by_call = list(zip(calls, zip(*gains, strict=True), strict=True))
    contenders = [(geometric_mean(each), call) for call, each in by_call if min(each) >= _LOSS]
    score, best = max(contenders, key=lambda contender: contender[0])
    return best if score >= _LEAD else calls[0]


def _gains(trials: Sequence[Timed], end: float) -> list[float]:
    """For each trial the first one's time over its own, in the median over rounds in which they take turns."""
    rounds: list[list[float]] = []
    running = list(range(len(trials)))
    gains = [1.0] * len(trials)
    for _ in range(_ROUNDS):
        times = {index: trials[index].seconds() for index in running}
        rounds.append([times[0] / times[index] if index in times else 0.0 for index in range(len(trials))])
        gains = [median(column) for column in zip(*rounds, strict=True)]
        if len(rounds) < _LEAST_ROUNDS:
            continue
        running = [index for index in running if index == 0 or gains[index] > _HOPELESS]
        if len(running) == 1 or time.perf_counter() > end:
            break
    return gains


def _is_static(node: Node) -> bool:
    """Whether every operand is a tensor whose shape is known once `n` is."""
    return all(plannable(value) for value in (*node.inputs, *node.outputs) if value is not None)


class Record:
    """Findings on disk, for one target and one version of the generators. Several processes may share it."""

    def __init__(self, folder: Path, target: Target | GpuTarget) -> None:
        place, compiler = (
            (target.likeness, triton_version()) if isinstance(target, GpuTarget) else (target.key, llvm_version())
        )
        self._origin = "\n".join((place, generator_version(), compiler))
        self.path = folder / f"{hashlib.sha256(self._origin.encode()).hexdigest()[:24]}.json"

    def read(self) -> Findings:
        """What is on disk; nothing where there is no file, or not a whole one of this target and version."""
        try:
            data = json.loads(self.path.read_bytes())
            findings = {str(key): str(symbol) for key, symbol in data["findings"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        whole = data.get("origin") == self._origin and data.get("sha256") == _digest(findings)
        return findings if whole else {}

    def add(self, findings: Mapping[str, str]) -> None:
        """Note more findings; whoever reads meanwhile sees the old file or the new one."""
        merged = {**self.read(), **findings}
        content = {"origin": self._origin, "sha256": _digest(merged), "findings": dict(sorted(merged.items()))}
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")
        with suppress(OSError):  # a full disk only costs the next tuning
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.write_text(json.dumps(content, indent=1))
            os.replace(temporary, self.path)
        temporary.unlink(missing_ok=True)


def read_findings(path: Path) -> Findings:
    """The findings inside an artifact. ArtifactError when it is none."""
    with Bundle(path) as bundle:
        findings = bundle.facts.get("findings", {})
    if not isinstance(findings, dict):
        raise ArtifactError(f"{path.name}: its findings are malformed")
    return {str(problem): str(symbol) for problem, symbol in findings.items()}


def _digest(findings: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(sorted(findings.items())).encode()).hexdigest()
