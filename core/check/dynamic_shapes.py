"""Checks plans of dynamic-shape code for several values of the sizes: with numbers, they are ordinary plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from lathe.core.check.plans import check_plan
from lathe.core.ir.dim import Dim, SymDim, evaluate, substitute, violated_assumption
from lathe.core.ir.dims import size_index
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import TensorType, ValueType
from lathe.core.kernels.target import GpuTarget, Target
from lathe.core.ops.opdef.assumed_extents import assumptions
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.plan.liveness import Affine
from lathe.core.plan.plan import PlannedGraph

# Values for the sizes: size i takes entry i modulo 4 of a tuple. The tuples differ so much that buffers in different
# units, if a plan wrongly shares their memory, overlap for one of the tuples.
_SIZES = ((1, 1, 1, 1), (2, 3, 5, 7), (7, 5, 3, 2), (3, 16, 17, 4), (1, 40, 1, 33), (900, 3, 900, 2), (2, 900, 2, 900))


def check_dynamic_shape_plan(graph: Graph, planned: PlannedGraph, target: Target | GpuTarget, winograd: bool) -> None:
    """`check_plan` with numbers in place of the sizes (dynamic dimensions), for up to seven sets of numbers.

    PlanError for a wrong plan, as in `check_plan`. Sets for which a value is empty, or an assumption of the graph
    fails, are skipped. The kernels need not be those that the catalog offers.
    """
    inputs = [value.type for value in graph.inputs if isinstance(value.type, TensorType)]
    places = {name: place for type_ in inputs for name in type_.symbols if (place := size_index(name)) is not None}
    twin = graph.clone()
    supposed = assumptions(twin, infer_graph(twin), places)
    for values in _SIZES:
        env = {name: values[place % len(values)] for name, place in places.items()}
        bound = graph.clone({**env})
        if not violated_assumption(supposed, env) and not any(_is_empty(value.type) for value in bound.values()):
            check_plan(bound, _planned_with_numbers(planned, env), target, winograd, offered=False)


def _is_empty(type_: ValueType) -> bool:
    """Whether a tensor has an extent less than 1. Dynamic-shape code does not serve such sizes."""
    dims = type_.shape or () if isinstance(type_, TensorType) else ()
    return any(isinstance(dim, int) and dim < 1 for dim in dims)


def _planned_with_numbers(planned: PlannedGraph, env: Mapping[str, Dim]) -> PlannedGraph:
    """The plan with numbers for sizes. Specs with numbers have other function names; the steps get these names, too."""
    bound: PlannedGraph = _with_numbers(planned, env)
    symbols = {
        spec.symbol: new.symbol
        for (_, before), (_, after) in zip(planned.calls, bound.calls, strict=True)
        for spec, new in zip((before.code, *before.parts), (after.code, *after.parts), strict=True)
    }
    steps = tuple(dataclasses.replace(step, symbol=symbols[step.symbol]) for step in bound.plan.steps)
    specs = {symbols[name]: spec for name, spec in bound.specs.items()}
    return dataclasses.replace(bound, plan=dataclasses.replace(bound.plan, steps=steps), specs=specs)


def is_dynamic_shape_graph(graph: Graph) -> bool:
    """Whether the graph is for dynamic-shape code: an input has a size as a dimension."""
    types = [value.type for value in graph.inputs if isinstance(value.type, TensorType)]
    return any(size_index(name) is not None for type_ in types for name in type_.symbols)


def _with_numbers(value: Any, env: Mapping[str, Dim]) -> Any:
    """A copy of dataclasses, tuples and dicts in which numbers replace sizes, also inside them; not inside graphs."""
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
