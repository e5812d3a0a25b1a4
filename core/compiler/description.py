"""The description of a model, made before its shapes are known: inputs, outputs, batching, packing, dynamic shapes."""

from __future__ import annotations

from dataclasses import replace

from lathe.core.compiler.dynamic_shapes import find_dynamic_shapes
from lathe.core.compiler.options import Options
from lathe.core.compiler.packing import pack_info
from lathe.core.compiler.run_passes import OptimizedGraph
from lathe.core.compiler.symbol_binding import code_assumptions, leading_symbol
from lathe.core.ir.graph import Graph
from lathe.core.ops.opdef.registry import may_run_forever
from lathe.core.passes.lowering.length_inputs import with_length_inputs
from lathe.core.passes.proofs.assumptions import assume_one_batch
from lathe.core.passes.proofs.batch_info import BatchInfo
from lathe.core.passes.proofs.rows import rows
from lathe.core.passes.proofs.size_inputs import size_inputs
from lathe.core.runtime.session.session import Description


def describe_model(graph: Graph, options: Options) -> tuple[Graph, Description, OptimizedGraph | None]:
    """The graph to compile, its description, and the graph after the passes.

    The third result is None unless the model gets dynamic-shape code in which each node has a kernel. The graph to
    compile may assume more of its inputs than the model declares (`passes/proofs/assumptions.py`); then the description
    keeps the declared types, too. The graph may also have length inputs (`passes/lowering/length_inputs.py`).
    """
    together, proof = assume_one_batch(graph)
    declared = {value.name: value.type for value in graph.inputs} if together is not graph else {}
    description = _describe_proven(together, options, proof)
    sized = find_dynamic_shapes(together, description.batching, options, _is_packed(description))
    if not sized.whole and (shaded := with_length_inputs(together)) is not together:
        other = describe(shaded, options)
        found = find_dynamic_shapes(shaded, other.batching, options, _is_packed(other))
        if found.whole:
            together, description, sized = shaded, other, found
    in_parts = bool(sized.binding) and not sized.whole
    fed_sizes = size_inputs(together) if not sized.whole and not options.devices else ()
    description = replace(
        description, declared=declared, any_size=sized.binding, in_parts=in_parts, size_inputs=fed_sizes
    )
    return together, description, sized.optimized


def describe(graph: Graph, options: Options) -> Description:
    """The description of a graph without changes to its inputs, and without a search for dynamic-shape code."""
    return _describe_proven(graph, options, rows(graph))


def _is_packed(description: Description) -> bool:
    return description.packing is not None and description.packing.packable


def _describe_proven(graph: Graph, options: Options, proof: BatchInfo) -> Description:
    """The description of a graph, given the proof whether its rows are independent (`rows`, `assume_one_batch`)."""
    symbol = proof.symbol or leading_symbol(graph)
    batching = replace(proof, symbol=symbol, supposed=code_assumptions(graph, symbol))
    inputs = {value.name: value.type for value in graph.inputs}
    outputs = {value.name: value.type for value in graph.outputs}
    packing = pack_info(graph, options) if options.packing else None
    endless = may_run_forever(graph.nodes)
    # The states belong to one compiled code, so a model with states has no variants with fed defaults.
    defaults = {value.name: type_ for value, type_ in graph.defaults.items()} if not graph.states else {}
    return Description(graph.name, inputs, outputs, batching, options.max_batch, packing, endless, defaults)
