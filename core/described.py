"""The description of a model, made before its shapes are known: inputs, outputs, batching, packing, and whether code
for any sizes serves it."""

from __future__ import annotations

from dataclasses import replace

from core.any_size import sizes_of
from core.ir.graph import Graph
from core.ops.registry import may_not_end
from core.options import Options
from core.packing import pack_info
from core.passes.assumptions import as_one_batch
from core.passes.fed_sizes import with_shadows
from core.passes.rows import BatchInfo as Proof
from core.passes.rows import rows
from core.rewriting import Rewritten
from core.runtime.session import BatchInfo, Description
from core.sizes import leading_symbol, supposed_of


def described(graph: Graph, options: Options) -> tuple[Graph, Description, Rewritten | None]:
    """The graph to compile, its description, and what passes leave of it for any sizes, if that code is whole. The
    graph may assume more of its inputs than the model declares (`passes/assumptions.py`); then the description keeps
    the declared types, too."""
    together, proof = as_one_batch(graph)
    declared = {value.name: value.type for value in graph.inputs} if together is not graph else {}
    description = _describe(together, options, proof)
    sized = sizes_of(together, description.batching, options)
    if not sized.whole and (shaded := with_shadows(together)) is not together:
        other = describe(shaded, options)
        found = sizes_of(shaded, other.batching, options)
        if found.whole:
            together, description, sized = shaded, other, found
    in_parts = bool(sized.binding) and not sized.whole
    description = replace(description, declared=declared, any_size=sized.binding, in_parts=in_parts)
    return together, description, sized.rewritten


def describe(graph: Graph, options: Options) -> Description:
    """The description of a graph that is compiled as it is."""
    return _describe(graph, options, rows(graph))


def _describe(graph: Graph, options: Options, proof: Proof) -> Description:
    """The description of a model whose shapes are not known yet."""
    symbol = proof.symbol or leading_symbol(graph)
    batching = BatchInfo(proof.batchable, proof.reason, symbol, supposed_of(graph, symbol))
    inputs = {value.name: value.type for value in graph.inputs}
    outputs = {value.name: value.type for value in graph.outputs}
    packing = pack_info(graph, options) if options.packing else None
    endless = may_not_end(graph.nodes)
    # State belongs to one code, so no other may run with it.
    defaults = {value.name: type_ for value, type_ in graph.defaults.items()} if not graph.states else {}
    return Description(graph.name, inputs, outputs, batching, options.max_batch, packing, endless, defaults)
