"""Compiles for devices besides the host: places nodes, cuts the graph, and plans each part for its own device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial

from lathe.core.codegen.target import host
from lathe.core.compiler.device_memory import DeviceMemory, forecast_seconds
from lathe.core.compiler.options import Options
from lathe.core.compiler.tuner import Choices, Prepare, Record, choices
from lathe.core.errors import UnsupportedError
from lathe.core.ir.dim import Dim
from lathe.core.ir.graph import Graph
from lathe.core.kernels.cpu import object_for
from lathe.core.kernels.target import GPU_PREFIX, GpuTarget, Target
from lathe.core.plan.movables import MemoryLimit
from lathe.core.plan.placement import HOST, DeviceSite, Part, Placement, PlacementOptions, place_nodes
from lathe.core.plan.plan import PlannedGraph, weight_chunks
from lathe.core.plan.planner import make_plan
from lathe.core.runtime.artifact.compiled import Compiled, Split
from lathe.core.runtime.artifact.store import Store, open_store
from lathe.core.runtime.device.device_trial import device_bench
from lathe.core.runtime.device.devices import canonical, open_device
from lathe.core.runtime.host.machine import peaks
from lathe.core.runtime.host.trial import Bench, host_bench
from lathe.core.runtime.session.placed import Wiring

_MIN_SECONDS = 1e-9  # seconds: too few to measure, but existing findings are used


def split(graph: Graph, options: Options, log: Sequence[str], supposed: tuple[Dim, ...] = ()) -> Split:
    """The parts of an optimized graph whose only symbol is `n`, each planned and compiled for its device.

    `log`: the reports of the passes, as lines. `supposed`: dimensions that the plans assume to be 0 or more.
    UnsupportedError if a pin names no node, or its device cannot run the node within its memory.
    """
    store = open_store(options.cache_dir)
    placement, planned = _within_limits(graph, options, Tuning(options, store), supposed)
    notes = (*log, f"placement: {', '.join(placement.notes) or 'nothing to run'}")
    parts = tuple(
        _compile_part(part, *each, store, () if index else notes)
        for index, (part, each) in enumerate(zip(placement.parts, planned, strict=True))
    )
    return Split(parts, _wiring(graph, placement), {s.value.name: s.initial for s in placement.states})


class Tuning:
    """Selects the kernels of all parts of a model; the time for measuring, `options.tune`, is spent once for all."""

    def __init__(self, options: Options, store: Store | None) -> None:
        self._options, self._store = options, store
        self._known: dict[str, tuple[tuple[str, str], ...]] = {}  # by device

    def choices(self, part: Part) -> Choices:
        """The kernel choices for a part, after measuring in the time that is left.

        Later parts on the same device reuse its findings.
        """
        options = replace(self._options, findings=self._known.get(part.device, self._options.findings))
        target = target_on(part.device, options)
        record = Record(self._store.tuning_folder, target) if self._store else None
        started = time.perf_counter()
        found = choices(part.graph, target, options, record, self._bench(part.device), self._prepare(part.device))
        if options.tune:
            left = options.tune - (time.perf_counter() - started)
            self._options = replace(self._options, tune=max(left, _MIN_SECONDS))
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
        return device_bench(device, cache) if device.has_clock else None


def _within_limits(
    graph: Graph, options: Options, tuning: Tuning, supposed: tuple[Dim, ...]
) -> tuple[Placement, list[tuple[PlannedGraph, Choices]]]:
    """A placement whose plans keep to the memory limits, and for each of its parts the plan with the kernel choices.

    If the placement is by cost and something swaps, the same without swapping is planned, too, and the faster of the
    two by forecast is taken. UnsupportedError as for `split`.
    """
    _name_devices(graph, options.devices)
    placement, planned = _planned(graph, options, tuning, supposed, True)
    if not options.by_cost or not any(each.plan.transfers for each, _ in planned):
        return placement, planned
    other, others = _planned(graph, options, tuning, supposed, False)
    seconds = [
        forecast_seconds(where, [each for each, _ in plans], options.max_batch, options.threads)
        for where, plans in ((placement, planned), (other, others))
    ]
    note = f"forecast {seconds[0] * 1e6:.1f} us with swapping, {seconds[1] * 1e6:.1f} us with nodes on {HOST} instead"
    chosen, plans = (placement, planned) if seconds[0] <= seconds[1] else (other, others)
    return replace(chosen, notes=(*chosen.notes, note)), plans


def _planned(
    graph: Graph, options: Options, tuning: Tuning, supposed: tuple[Dim, ...], swaps: bool
) -> tuple[Placement, list[tuple[PlannedGraph, Choices]]]:
    """A placement whose plans keep to the memory limits, and for each of its parts the plan with the kernel choices.

    The memory that a device needs is only known after planning its parts. If it exceeds the limit, values and weights
    swap with the host, or all nodes are placed again with a lower goal for the device, in the extreme case all on the
    host. Without `swaps`, only devices that nodes are pinned to swap. UnsupportedError as for `split`.
    """
    pinned = frozenset(device for _, device in options.pins) | {node.device for node in graph.nodes}
    last = options.devices[-1:] if swaps else ()
    memory = DeviceMemory(options.devices, dict(options.limits), pinned, options.max_batch, swaps={*last})
    while True:
        placement = placement_of(graph, options, memory.goals, memory.swaps)
        chosen = [tuning.choices(part) for part in placement.parts]

        def plan_part(
            index: int, limit: MemoryLimit | None, placement: Placement = placement, chosen: list[Choices] = chosen
        ) -> PlannedGraph:
            return _plan_part(placement.parts[index], options, chosen[index], supposed, limit)

        planned = memory.plan(placement, plan_part)
        if planned is not None:
            noted = replace(placement, notes=(*placement.notes, *memory.notes))
            return noted, list(zip(planned, chosen, strict=True))


def _name_devices(graph: Graph, devices: Sequence[str]) -> None:
    """Give the annotations of a graph the names that devices have here ("cuda" becomes "cuda:0").

    If kernels are compiled ahead for the description of a GPU, that one stands for all GPUs. UnsupportedError for a
    name that is no device.
    """
    absent = next((name for name in devices if name.startswith(GPU_PREFIX)), None)
    for node in graph.nodes:
        if node.device:
            try:
                name = canonical(node.device)
            except UnsupportedError as error:
                raise UnsupportedError(error.reason, where=f"node '{node.name}'") from None
            node.device = absent if absent is not None and name != HOST else name


def placement_of(graph: Graph, options: Options, limits: Mapping[str, int], swaps: Set[str] = frozenset()) -> Placement:
    """The device of each node, among those of the options, within `limits` (bytes by device).

    The last device keeps nodes beyond its limit if it is one of those that `swaps` names, as does every such device for
    nodes that are pinned there. UnsupportedError as for `split`.
    """
    sites = [_site(name, options) for name in (*options.devices, HOST)]
    wishes = PlacementOptions(dict(options.pins), options.by_cost, options.max_batch, frozenset(swaps))
    return place_nodes(graph, [replace(site, memory=limits.get(site.name)) for site in sites], wishes)


def _plan_part(
    part: Part, options: Options, choose: Choices, supposed: tuple[Dim, ...], limit: MemoryLimit | None
) -> PlannedGraph:
    threads = options.threads if part.device == HOST else 1
    target = target_on(part.device, options)
    return make_plan(part.graph, target, threads, choose, options.winograd, supposed, limit)


def _site(name: str, options: Options) -> DeviceSite:
    """The device `name` as `place_nodes` needs it, without a memory limit.

    Its peak rates are measured, and right, only if costs decide the placement: on the host that takes time.
    """
    target = target_on(name, options)
    if not options.by_cost:
        return DeviceSite(name, target)
    most, threads = (peaks(), options.threads) if name == HOST else (open_device(name).peaks(), 1)
    return DeviceSite(name, target, None, most.flops * threads, most.bandwidth * threads)


def target_on(name: str, options: Options) -> Target | GpuTarget:
    """The target for which kernels of a device are selected."""
    if name == HOST:
        return host()
    device, chooses = open_device(name), options.tune or options.findings
    return replace(device.target, tf32=options.precision == "tf32", cublaslt=device.library_version() if chooses else 0)


def _compile_part(
    part: Part, planned: PlannedGraph, choices: Choices, store: Store | None, log: tuple[str, ...]
) -> Compiled:
    """A part with the object code of its kernels, which its device generates, or the cache has.

    `log` is stored in its plan.
    """
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
