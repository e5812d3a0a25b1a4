"""Sequence packing: one graph for the tokens of many sequences, without padding, and one plan for every length.

`pack` splits a model of [batch, sequence, ...] into two graphs. The first computes on tokens of all sequences; the
second on values with one row per sequence (the first token, a mean). The split includes the proof that sequences do not
influence each other (see `token_flow`). If the proof fails, the reason names the node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from lathe.core.ir.dim import DATA_DEPENDENT_PREFIX, Dim, symbol, symbols
from lathe.core.ir.graph import Graph, Node, Value, attr_symbols, node_reads
from lathe.core.ir.verify import verify
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.ops.opdef.registry import describe
from lathe.core.passes.pipeline import canonical_passes, run_passes
from lathe.core.passes.proofs.batch_info import BatchInfo
from lathe.core.passes.proofs.row_counts import ProofFailed
from lathe.core.passes.proofs.rows import rows
from lathe.core.passes.proofs.token_flow import LAYOUT_INPUTS, TOKENS, Flow, TokenFlow
from lathe.core.passes.rewrite.base import shape_of


@dataclass(frozen=True)
class Packed:
    """The two graphs of a packed model.

    `tokens` has n tokens where the model has a batch of sequences; values with one row per sequence are outputs with
    room for n rows. `sequences` is the rest of the model and reads those outputs; None if no output depends on whole
    sequences. `symbol` is the name of the sequence length in the model.
    """

    tokens: Graph
    sequences: Graph | None
    symbol: str


def pack(graph: Graph) -> Packed | str:
    """The two graphs of a packed model, or the reason why it cannot be packed."""
    try:
        return _pack(graph)
    except ProofFailed as reason:
        return str(reason)


def _pack(graph: Graph) -> Packed:
    batch, length = _symbols(graph)
    whole, _ = run_passes(graph, canonical_passes())
    env: dict[str, Dim] = {length: symbol(TOKENS), **({batch: 1} if batch is not None else {})}
    tokens = whole.clone(env)
    flow = TokenFlow(tokens, {value: _flow_of_input(value) for value in tokens.inputs})
    flow.run()
    pooled = {value.name for value in tokens.values() if flow.of(value).pooled}
    outputs = [value for value in tokens.outputs if not flow.of(value).pooled]
    for value in outputs:
        if len(flow.of(value).axes) != 1 or value.shape[0] != 1:
            raise ProofFailed(
                f"output '{value.name}' ({value.type}) has neither one row per token nor one per sequence"
            )
    sequences = _sequence_graph(whole, batch, pooled, flow.pools)
    _finish(tokens, outputs, {} if sequences is None else _pools_read(sequences, flow.pools))
    return Packed(tokens, sequences, length)


def _symbols(graph: Graph) -> tuple[str | None, str]:
    """The symbols of the batch (None if all inputs have a leading extent of 1) and of the sequence length.

    ProofFailed if the model keeps state, its rows are not independent, or it has more or fewer dynamic dimensions.
    ProofFailed also if an input has no known rank, or a name that packing reserves for inputs of its own.
    """
    if graph.states:
        raise ProofFailed(f"the model keeps state (%{graph.states[0].value.name}) from run to run")
    taken = {value.name for value in graph.inputs} & LAYOUT_INPUTS
    if taken:
        raise ProofFailed(f"input '{taken.pop()}' has a name that packing reserves")
    if any(shape_of(value) is None for value in graph.inputs):
        raise ProofFailed("an input has no known rank")
    single = bool(graph.inputs) and all(value.shape[:1] == (1,) for value in graph.inputs)
    proof = BatchInfo(True, "") if single else rows(graph)
    if not proof.batchable:
        raise ProofFailed(proof.reason)
    found = {name for value in graph.inputs for dim in value.shape for name in symbols(dim)} - {proof.symbol}
    if len(found) != 1:
        raise ProofFailed(
            f"expected one dynamic dimension besides the batch, the length; found {sorted(found) or 'none'}"
        )
    return proof.symbol, found.pop()


def _flow_of_input(value: Value) -> Flow:
    axes = tuple(axis for axis, dim in enumerate(value.shape) if TOKENS in symbols(dim))
    if len(axes) > 1 or any(value.shape[axis] != symbol(TOKENS) for axis in axes):
        raise ProofFailed(f"input '{value.name}' ({value.type}) does not hold one row per token")
    return Flow(axes) if axes else Flow(pooled=True)


def _sequence_graph(whole: Graph, batch: str | None, pooled: set[str], pools: Iterable[str]) -> Graph | None:
    """The part of a model (`whole`) after its pools, which become inputs of the part.

    Pools are the first values with one row per sequence. `pools` has their names, and `pooled` the names of all values
    with one row per sequence. `batch` stays a symbol. None if no output of the model has one row per sequence.
    ProofFailed if the part reads inputs of tokens, if an input with one row per sequence is an output of the model, or
    if `batch` is None.
    """
    graph = whole.clone()
    graph.outputs = [value for value in graph.outputs if value.name in pooled]
    if not graph.outputs:
        return None
    passed_on = next((value.name for value in graph.outputs if value in graph.inputs), None)
    if passed_on is not None:
        raise ProofFailed(f"output '{passed_on}' is an input, and no node computes one row per sequence from it")
    if batch is None:
        raise ProofFailed("the model has outputs of whole sequences, but no batch dimension")
    values = {value.name: value for value in graph.values()}
    sources = [values[name] for name in pools]
    for value in sources:
        value.producer = None
    graph.nodes = [node for node in graph.nodes if node.output not in sources]
    of_tokens = {value for value in graph.inputs if value.name not in pooled}
    graph.inputs = [*(value for value in graph.inputs if value.name in pooled), *sources]
    graph.outputs = [_computed_output(graph, value) for value in graph.outputs]
    graph.remove_dead()
    _check_reads(graph, of_tokens)
    read = {value for node in graph.nodes for value in node_reads(node)}
    graph.inputs = [value for value in graph.inputs if value in read]
    _check_sequences(graph, batch)
    return graph


def _check_reads(sequences: Graph, of_tokens: Collection[Value]) -> None:
    """ProofFailed if the graph of sequences reads an input of tokens, or its shape: packed, its extents differ."""
    for node in sequences.nodes:
        for value in node_reads(node):
            if value in of_tokens:
                raise ProofFailed(
                    f"{describe(node)}: computes on whole sequences, but needs input '{value.name}' of tokens"
                )


def _computed_output(graph: Graph, value: Value) -> Value:
    """The value if a node computes it; otherwise the output of a new Identity, which takes the value's name.

    The value, an input, is renamed.
    """
    if value.producer is not None:
        return value
    name, value.name = value.name, graph.fresh_name(f"{value.name}.pooled")
    node = Node("Identity", [value], [], {}, name)
    node.outputs = [Value(name, value.type, node)]
    graph.nodes.append(node)
    return node.output


def _check_sequences(graph: Graph, batch: str) -> None:
    verify(graph, "packing")
    proof = rows(graph)
    varying = {name for value in graph.inputs for dim in value.shape for name in symbols(dim)}
    if not proof.batchable or varying != {batch}:
        raise ProofFailed(f"the part that computes on whole sequences: {proof.reason}")
    for node in graph.nodes:
        if named := sorted(name for name in attr_symbols(node) - {batch} if not name.startswith(DATA_DEPENDENT_PREFIX)):
            raise ProofFailed(f"{describe(node)}: computes on whole sequences, but needs their length '{named[0]}'")


def _pools_read(sequences: Graph, pools: dict[str, Value]) -> dict[str, Value]:
    """The values of the graph of tokens that are inputs of the graph of sequences, by the names of these inputs."""
    names = pools | {f"{name}.pooled": pool for name, pool in pools.items()}
    return {value.name: names[value.name] for value in sequences.inputs if value.name in names}


def _finish(tokens: Graph, outputs: list[Value], pools: dict[str, Value]) -> None:
    """Finishes the graph of tokens: its outputs become `outputs` and `pools`, which get the names in `pools`.

    Dead nodes and unread inputs are removed, and types inferred again.
    """
    tokens.outputs = [*outputs, *pools.values()]
    tokens.remove_dead()
    for name, value in pools.items():
        value.name = name
    read = {value for node in tokens.nodes for value in node.inputs} | set(tokens.outputs)
    tokens.inputs = [value for value in tokens.inputs if value in read]
    infer_graph(tokens)
    verify(tokens, "packing")
