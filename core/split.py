"""Compiling for other devices than the host: place nodes, cut the graph, and plan each part for its own device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from core.codegen.target import host
from core.ir.graph import Graph
from core.kernels.cpu import object_for
from core.options import Options
from core.plan.placement import HOST, Part, Placement, Site, Wishes, placed
from core.plan.planner import make_plan, weight_chunks
from core.runtime.compiled import Compiled, Split
from core.runtime.devices import open_device
from core.runtime.machine import peaks
from core.runtime.placed import Wiring
from core.runtime.store import open_store


def split(graph: Graph, options: Options, log: Sequence[str]) -> Split:
    """Parts of an optimized graph whose only symbol is `n`, each planned for its device; `log` is what passes did."""
    wishes = Wishes(dict(options.pins), options.by_cost, options.max_batch)
    placement = placed(graph, [_site(name, options) for name in (*options.devices, HOST)], wishes)
    lines = (*log, f"placement: {', '.join(placement.notes) or 'nothing to run'}")
    parts = tuple(_compiled(part, options, () if index else lines) for index, part in enumerate(placement.parts))
    return Split(parts, _wiring(graph, placement), {s.value.name: s.initial for s in placement.states})


def _site(name: str, options: Options) -> Site:
    if name == HOST:
        most = peaks()
        return Site(HOST, host(), None, most.flops * options.threads, most.bandwidth * options.threads)
    device = open_device(name)
    most, limit = device.peaks(), dict(options.limits).get(name)
    return Site(name, device.target, limit, most.flops, most.bandwidth)


def _compiled(part: Part, options: Options, log: tuple[str, ...]) -> Compiled:
    """One part through the planner and the generators of its device."""
    store = open_store(options.cache_dir)
    cache = store.objects if store else None
    if part.device == HOST:
        planned = make_plan(part.graph, host(), options.threads, winograd=options.winograd)
        code = partial(object_for, target=host(), cache=cache)
    else:
        device = open_device(part.device)
        planned = make_plan(part.graph, device.target)
        code = partial(device.code, cache=cache)
    objects = {symbol: code(spec) for symbol, spec in planned.specs.items()}
    states = {state.value.name: state.initial for state in part.graph.states}
    plan, limit = replace(planned.plan, log=log), dict(options.limits).get(part.device)
    return Compiled(plan, objects, lambda: weight_chunks(planned), states, {}, part.device, limit)


def _wiring(graph: Graph, placement: Placement) -> Wiring:
    return Wiring(
        inputs=tuple(value.name for value in graph.inputs),
        outputs=tuple(value.name for value in graph.outputs),
        states={state.value.name: state.update.name for state in placement.states},
        constants={value.name: graph.constants[value] for value in graph.outputs if value in graph.constants},
        crossings=placement.crossings,
    )
