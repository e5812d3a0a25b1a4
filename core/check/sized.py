"""Plans for any sizes, checked for some: with numbers in the places of sizes they are plans like any other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from core.check.plans import check_plan
from core.ir.dim import Dim, SymDim, broken, evaluate, substitute
from core.ir.dims import place_of
from core.ir.graph import Graph
from core.ir.types import TensorType
from core.kernels.target import GpuTarget, Target
from core.plan.liveness import Affine
from core.plan.plan import Planned

# Values of the sizes in their order. Buffers that fit for these and not for others would have to be of the same unit.
_SIZES = ((1, 1, 1, 1), (2, 3, 5, 7), (7, 5, 3, 2), (3, 16, 17, 4), (1, 40, 1, 33))


def check_sized(
    graph: Graph, planned: Planned, target: Target | GpuTarget, winograd: bool, supposed: tuple[Dim, ...] = ()
) -> None:
    """As `check_plan`, for several values of the sizes that do not break what is `supposed` of them."""
    names = {name for value in graph.inputs if isinstance(value.type, TensorType) for name in value.type.symbols}
    for values in _SIZES:
        env: dict[str, Dim] = {}
        for name in names:
            place = place_of(name)
            if place is not None:
                env[name] = values[place % len(values)]
        if not broken(supposed, {name: int(str(value)) for name, value in env.items()}):
            check_plan(graph.clone(env), _planned_with_numbers(planned, env), target, winograd)


def _planned_with_numbers(planned: Planned, env: Mapping[str, Dim]) -> Planned:
    """The plan, whose steps name the functions of the specs with numbers where they named those of their specs."""
    bound: Planned = _with_numbers(planned, env)
    named = {
        spec.symbol: new.symbol
        for (_, before), (_, after) in zip(planned.calls, bound.calls, strict=True)
        for spec, new in zip((before.code, *before.parts), (after.code, *after.parts), strict=True)
    }
    steps = tuple(dataclasses.replace(step, symbol=named[step.symbol]) for step in bound.plan.steps)
    specs = {named[name]: spec for name, spec in bound.specs.items()}
    return dataclasses.replace(bound, plan=dataclasses.replace(bound.plan, steps=steps), specs=specs)


def is_sized_graph(graph: Graph) -> bool:
    """Whether the graph is for any sizes."""
    types = [value.type for value in graph.inputs if isinstance(value.type, TensorType)]
    return any(place_of(name) is not None for type_ in types for name in type_.symbols)


def _with_numbers(value: Any, env: Mapping[str, Dim]) -> Any:
    """Plain data with numbers in the places of sizes."""
    match value:
        case SymDim():
            return substitute(value, env)
        case Affine():
            numbers = {name: int(str(number)) for name, number in env.items()}
            return Affine(value.a, value.b + sum(count * evaluate(unit, numbers) for unit, count in value.units))
        case TensorType():
            return value.substitute(env)
        case tuple():
            return tuple(_with_numbers(item, env) for item in value)
        case dict():
            return {key: _with_numbers(item, env) for key, item in value.items()}
        case Graph() | np.ndarray():
            return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        changed = {name: _with_numbers(getattr(value, name), env) for name in fields}
        same = all(changed[name] is getattr(value, name) for name in fields)
        return value if same else dataclasses.replace(value, **changed)
    return value
