"""Variants of a graph: defaults turned into inputs, inputs into constants, or inputs of other types or ranks."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

import numpy as np

from lathe.core.errors import UnsupportedError
from lathe.core.ir.dim import Dim, SymDim, is_data_dependent, symbol, symbols
from lathe.core.ir.graph import Array, Graph, Value
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ir.verify import verify
from lathe.core.ops.opdef.inference import forget_types, infer_graph


def with_default_inputs(graph: Graph, names: Collection[str]) -> Graph:
    """A copy of `graph` in which the defaults of these names are additional inputs, after all others.

    They keep the graph's order and have the types of `graph.defaults`. The copy has no further defaults. All types are
    inferred again, as some may have followed from a default's value. ValueError for a name that is no default;
    ModelError if a node does not accept the types.
    """
    copy = graph.clone()
    fed = {value: type_ for value, type_ in copy.defaults.items() if value.name in names}
    if len(fed) != len(set(names)):
        unknown = sorted(set(names) - {value.name for value in fed})
        raise ValueError(f"graph {graph.name} has no defaults named {', '.join(unknown)}")
    for value, type_ in fed.items():
        del copy.constants[value]
        value.type = type_
        copy.inputs.append(value)
    copy.defaults.clear()
    return _infer_again(copy, "feeding defaults")


def with_constants(graph: Graph, values: Mapping[str, Array]) -> Graph:
    """A copy of `graph` in which the inputs named in `values` are constants with copies of these arrays.

    Symbols of their shapes become the arrays' extents, if no other input shows them. The same holds for extents that
    follow from the values, and which attributes may name. Other names are ignored. All types are inferred again.
    ModelError if a node does not accept the values.
    """
    copy = graph.clone(_extents_by_symbol(graph, values))
    for value in [value for value in copy.inputs if value.name in values]:
        copy.inputs.remove(value)
        copy.constants[value] = array = np.array(values[value.name])
        array.setflags(write=False)
        value.type = TensorType(DType.from_numpy(array.dtype), array.shape)
    copy = _infer_again(copy, "giving inputs their values")
    decided = _decided_extents(graph, copy)
    return _infer_again(copy.clone(decided), "giving extents their values") if decided else copy


def _decided_extents(graph: Graph, copy: Graph) -> dict[str, Dim]:
    """The numbers in the types of `copy`, a copy of `graph`, by the data-dependent symbols in their place."""
    found: dict[str, Dim] = {}
    for before, after in zip(graph.nodes, copy.nodes, strict=True):
        for old, new in zip(before.outputs, after.outputs, strict=True):
            pairs = zip(_dims(old), _dims(new), strict=False)
            found |= {
                str(dim): extent for dim, extent in pairs if isinstance(extent, int) and _is_data_dependent_symbol(dim)
            }
    return found


def _is_data_dependent_symbol(dim: Dim) -> bool:
    return isinstance(dim, SymDim) and is_data_dependent(dim) and dim == symbol(str(dim))


def _dims(value: Value) -> tuple[Dim, ...]:
    return value.type.shape or () if isinstance(value.type, TensorType) else ()


def _extents_by_symbol(graph: Graph, values: Mapping[str, Array]) -> dict[str, Dim]:
    """The extents of the arrays, by the symbols that the inputs' types have in their place.

    Without symbols that other inputs have as well: each run shows these. They may stand for different extents here,
    where inputs only share a name of their first dimension.
    """
    shown = {
        name for value in graph.inputs if value.name not in values for dim in _dims(value) for name in symbols(dim)
    }
    found: dict[str, Dim] = {}
    for value in graph.inputs:
        if value.name in values:
            pairs = zip(_dims(value), values[value.name].shape, strict=False)
            found |= {str(dim): extent for dim, extent in pairs if isinstance(dim, SymDim) and dim == symbol(str(dim))}
    return {name: extent for name, extent in found.items() if name not in shown}


def with_types(graph: Graph, types: Mapping[str, ValueType]) -> Graph:
    """A copy of `graph` whose inputs have the given types, by name; other inputs keep theirs.

    All types are inferred again. ModelError or VerifyError if the graph does not accept the types.
    """
    copy = graph.clone()
    for value in copy.inputs:
        value.type = types.get(value.name, value.type)
    return _infer_again(copy, "giving inputs other types")


def with_ranks(graph: Graph, ranks: Mapping[str, int]) -> Graph:
    """A copy of `graph` whose inputs of these names have these ranks, with a new symbol for each dimension.

    Inputs that are no tensors keep their types. ModelError if some node does not accept the rank. UnsupportedError for
    a graph with state, since the state belongs to one compiled executable. KeyError for a name that is no input.
    """
    if graph.states:
        raise UnsupportedError("a model with state needs inputs of declared rank: its state belongs to one executable")
    taken = {name for value in graph.values() for name in getattr(value.type, "symbols", ())}
    fresh = map(symbol, filter(lambda name: name not in taken, map("dim{}".format, itertools.count())))
    types = {value.name: value.type for value in graph.inputs}
    for name, rank in ranks.items():
        declared = types[name]
        if isinstance(declared, TensorType):
            types[name] = TensorType(declared.dtype, tuple(itertools.islice(fresh, rank)))
    return with_types(graph, types)


def _infer_again(graph: Graph, stage: str) -> Graph:
    forget_types(graph)
    infer_graph(graph)
    verify(graph, stage)
    return graph
