"""Compiling for other devices than the host: place nodes, cut the graph, and plan each part for its own device."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from core.codegen.target import host
from core.ir.dim import Dim
from core.ir.graph import Graph
from core.kernels.cpu import object_for
from core.kernels.target import GpuTarget, Target
from core.options import Options
from core.plan.placement import HOST, Part, Placement, Site, Wishes, placed
from core.plan.plan import Planned, weight_chunks
from core.plan.planner import make_plan
from core.runtime.compiled import Compiled, Split
from core.runtime.device_trial import device_bench
from core.runtime.devices import open_device
from core.runtime.machine import peaks
from core.runtime.placed import Wiring
from core.runtime.room import room_of
from core.runtime.store import Store, open_store
from core.runtime.trial import Bench, host_bench
from core.tune import Choices, Prepare, Record, choices

_NO_TIME = 1e-9  # seconds: what is known still counts
_MARGIN = 0.95  # of what a try asks for, once one has shown how a plan compares with what placing counted


def split(graph: Graph, options: Options, log: Sequence[str], supposed: tuple[Dim, ...] = ()) -> Split:
    """Parts of an optimized graph whose only symbol is `n`, each planned for its device; `log` is what passes did.
    `supposed`: see `make_plan`."""
    store = open_store(options.cache_dir)
    placement, planned = _within_limits(graph, options, Tuning(options, store), supposed)
    notes = (*log, f"placement: {', '.join(placement.notes) or 'nothing to run'}")
    parts = tuple(
        _compiled(part, *each, store, () if index else notes)
        for index, (part, each) in enumerate(zip(placement.parts, planned, strict=True))
    )
    return Split(parts, _wiring(graph, placement), {s.value.name: s.initial for s in placement.states})


class Tuning:
    """The kernels of parts: measured as long as the options allow, for all devices together."""

    def __init__(self, options: Options, store: Store | None) -> None:
        self._options, self._store = options, store
        self._known: dict[str, tuple[tuple[str, str], ...]] = {}  # by device

    def choices(self, part: Part) -> Choices:
        """What was found for one part is there for those that come later, on the same device."""
        options = replace(self._options, findings=self._known.get(part.device, self._options.findings))
        target = target_on(part.device, options)
        record = Record(self._store.tuning, target) if self._store else None
        started = time.perf_counter()
        found = choices(part.graph, target, options, record, self._bench(part.device), self._prepare(part.device))
        if options.tune:
            left = options.tune - (time.perf_counter() - started)
            self._options = replace(self._options, tune=max(left, _NO_TIME))
        self._known[part.device] = tuple(found.findings.items())
        return found

    def _prepare(self, name: str) -> Prepare | None:
        cache = self._store.objects if self._store else None
        return None if name == HOST else lambda specs: open_device(name).prepare(specs, cache)

    def _bench(self, name: str) -> Bench | None:
        cache = self._store.objects if self._store else None
        if name == HOST:
            return host_bench(partial(object_for, target=host(), cache=cache))
        device = open_device(name)
        return device_bench(device, cache) if device.keeps_time else None


def _within_limits(
    graph: Graph, options: Options, tuning: Tuning, supposed: tuple[Dim, ...]
) -> tuple[Placement, list[tuple[Planned, Choices]]]:
    """A placement whose plans keep to the limits. What a device takes is only known once its parts are planned: where
    that is too much, it gets less. With nothing left to it, all runs on the host."""
    goals = dict(options.limits)
    while True:
        placement = placement_of(graph, options, goals)
        planned = [_planned(part, options, tuning.choices(part), supposed) for part in placement.parts]
        taken = _taken(placement, [plan for plan, _ in planned], options.max_batch)
        over = {name: limit / taken[name] for name, limit in options.limits if taken.get(name, 0) > limit}
        if not over:
            return placement, planned
        goals |= {name: int(goals[name] * ratio * _MARGIN) for name, ratio in over.items()}


def placement_of(graph: Graph, options: Options, limits: Mapping[str, int]) -> Placement:
    """Which of the options' devices runs each node, within `limits` of bytes, by device."""
    sites = [_site(name, options) for name in (*options.devices, HOST)]
    wishes = Wishes(dict(options.pins), options.by_cost, options.max_batch)
    return placed(graph, [replace(site, memory=limits.get(site.name)) for site in sites], wishes)


def _planned(part: Part, options: Options, choose: Choices, supposed: tuple[Dim, ...]) -> tuple[Planned, Choices]:
    threads = options.threads if part.device == HOST else 1
    target = target_on(part.device, options)
    return make_plan(part.graph, target, threads, choose, options.winograd, supposed), choose


def _taken(placement: Placement, planned: Sequence[Planned], rows: int) -> Counter[str]:
    """Bytes that each device gives to its parts."""
    taken: Counter[str] = Counter()
    for part, each in zip(placement.parts, planned, strict=True):
        taken[part.device] += 0 if part.device == HOST else room_of(each.plan, rows).total
    return taken


def _site(name: str, options: Options) -> Site:
    """`peaks` is only asked where costs decide: on the host it compiles code and measures."""
    target = target_on(name, options)
    if not options.by_cost:
        return Site(name, target)
    most, threads = (peaks(), options.threads) if name == HOST else (open_device(name).peaks(), 1)
    return Site(name, target, None, most.flops * threads, most.bandwidth * threads)


def target_on(name: str, options: Options) -> Target | GpuTarget:
    """What kernels for a device are chosen for."""
    if name == HOST:
        return host()
    device, chooses = open_device(name), options.tune or options.findings
    return replace(device.target, tf32=options.precision == "tf32", cublaslt=device.library() if chooses else 0)


def _compiled(part: Part, planned: Planned, choices: Choices, store: Store | None, log: tuple[str, ...]) -> Compiled:
    """The objects of a part, by the generators of its device."""
    cache = store.objects if store else None
    code: Callable[..., bytes] = partial(object_for, target=host())
    if part.device != HOST:
        device = open_device(part.device)
        device.prepare(planned.specs.values(), cache)
        code = device.code
    objects = {symbol: code(spec, cache=cache) for symbol, spec in planned.specs.items()}
    states = {state.value.name: state.initial for state in part.graph.states}
    plan = replace(planned.plan, log=log)
    return Compiled(plan, objects, lambda: weight_chunks(planned), states, choices.used, part.device)


def _wiring(graph: Graph, placement: Placement) -> Wiring:
    return Wiring(
        inputs=tuple(value.name for value in graph.inputs),
        outputs=tuple(value.name for value in graph.outputs),
        states={state.value.name: state.update.name for state in placement.states},
        constants={value.name: graph.constants[value] for value in graph.outputs if value in graph.constants},
        crossings=placement.crossings,
    )
