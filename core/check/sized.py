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
from core.ir.types import TensorType, ValueType
from core.kernels.target import GpuTarget, Target
from core.ops.inference import infer_graph
from core.ops.supposed import suppositions
from core.plan.liveness import Affine
from core.plan.plan import Planned

# Values of the sizes in their order. Buffers that fit for these and not for others would have to be of the same unit.
_SIZES = ((1, 1, 1, 1), (2, 3, 5, 7), (7, 5, 3, 2), (3, 16, 17, 4), (1, 40, 1, 33), (900, 3, 900, 2), (2, 900, 2, 900))


def check_sized(graph: Graph, planned: Planned, target: Target | GpuTarget, winograd: bool) -> None:
    """As `check_plan`, for several values of the sizes: those for which no value is empty, and the types are right."""
    inputs = [value.type for value in graph.inputs if isinstance(value.type, TensorType)]
    places = {name: place for type_ in inputs for name in type_.symbols if (place := place_of(name)) is not None}
    twin = graph.clone()
    supposed = suppositions(twin, infer_graph(twin), places)
    for values in _SIZES:
        env = {name: values[place % len(values)] for name, place in places.items()}
        bound = graph.clone({**env})
        if not broken(supposed, env) and not any(_is_empty(value.type) for value in bound.values()):
            check_plan(bound, _planned_with_numbers(planned, env), target, winograd, offered=False)


def _is_empty(type_: ValueType) -> bool:
    """Whether an extent is less than one: code for any sizes does not serve such sizes."""
    dims = type_.shape or () if isinstance(type_, TensorType) else ()
    return any(isinstance(dim, int) and dim < 1 for dim in dims)


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
