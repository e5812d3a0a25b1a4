"""One graph for the tokens of many sequences: no padding, and one plan for every length.

`pack` splits a model of [batch, sequence, ...] into a graph that computes on tokens, whatever sequence they are of, and
one that computes on what was made of whole sequences (the first token, a mean). It is a proof as well: what would mix
sequences and is not known (see `token_flow`) makes the answer no, and the reason names the node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from core.ir.dim import OPEN, Dim, symbol, symbols
from core.ir.graph import Graph, Node, Value, attr_symbols, node_reads
from core.ir.verify import verify
from core.ops.inference import infer_graph
from core.ops.registry import describe
from core.passes.base import shape_of
from core.passes.pipeline import for_proofs, run_passes
from core.passes.row_counts import Mixed
from core.passes.rows import BatchInfo, rows
from core.passes.token_flow import MARKS, TOKENS, Flow, TokenFlow


@dataclass(frozen=True)
class Packed:
    """`tokens`: inputs and outputs have n tokens where the model has a batch of sequences, and what is one row per
    sequence is an output with room for n of them. `sequences`: the rest of the model, from those on; None where that is
    nothing. `symbol` names the length in the model."""

    tokens: Graph
    sequences: Graph | None
    symbol: str


def pack(graph: Graph) -> Packed | str:
    """The model's two graphs; or why it has none."""
    try:
        return _packed(graph)
    except Mixed as reason:
        return str(reason)


def _packed(graph: Graph) -> Packed:
    batch, length = _symbols(graph)
    whole, _ = run_passes(graph, for_proofs())
    env: dict[str, Dim] = {length: symbol(TOKENS), **({batch: 1} if batch is not None else {})}
    tokens = whole.clone(env)
    flow = TokenFlow(tokens, {value: _flow_of_input(value) for value in tokens.inputs})
    flow.run()
    pooled = {value.name for value in tokens.values() if flow.of(value).pooled}
    outputs = [value for value in tokens.outputs if not flow.of(value).pooled]
    for value in outputs:
        if len(flow.of(value).axes) != 1 or value.shape[0] != 1:
            raise Mixed(f"output '{value.name}' ({value.type}) is neither of tokens nor of sequences")
    sequences = _of_sequences(whole, batch, pooled, flow.pools)
    _finish(tokens, outputs, {} if sequences is None else _read(sequences, flow.pools))
    return Packed(tokens, sequences, length)


def _symbols(graph: Graph) -> tuple[str | None, str]:
    """The symbols of the batch, None where sequences come one at a time, and of the length."""
    if graph.states:
        raise Mixed(f"the model keeps state (%{graph.states[0].value.name}) from run to run")
    taken = {value.name for value in graph.inputs} & MARKS
    if taken:
        raise Mixed(f"input '{taken.pop()}' has a name that packing needs")
    if any(shape_of(value) is None for value in graph.inputs):
        raise Mixed("an input has no known rank")
    single = bool(graph.inputs) and all(value.shape[:1] == (1,) for value in graph.inputs)
    proof = BatchInfo(True, "") if single else rows(graph)
    if not proof.batchable:
        raise Mixed(proof.reason)
    found = {name for value in graph.inputs for dim in value.shape for name in symbols(dim)} - {proof.symbol}
    if len(found) != 1:
        raise Mixed(
            f"expected one dimension besides the batch that varies, the length; found {sorted(found) or 'none'}"
        )
    return proof.symbol, found.pop()


def _flow_of_input(value: Value) -> Flow:
    axes = tuple(axis for axis, dim in enumerate(value.shape) if TOKENS in symbols(dim))
    if len(axes) > 1 or any(value.shape[axis] != symbol(TOKENS) for axis in axes):
        raise Mixed(f"input '{value.name}' ({value.type}) does not hold one row per token")
    return Flow(axes) if axes else Flow(pooled=True)


def _of_sequences(whole: Graph, batch: str | None, pooled: set[str], pools: Iterable[str]) -> Graph | None:
    """The part of a model from its pools on. Its batch stays a symbol."""
    graph = whole.clone()
    graph.outputs = [value for value in graph.outputs if value.name in pooled]
    if not graph.outputs:
        return None
    passed_on = next((value.name for value in graph.outputs if value in graph.inputs), None)
    if passed_on is not None:
        raise Mixed(f"output '{passed_on}' is an input, of which no node makes one row per sequence")
    if batch is None:
        raise Mixed("what is computed of whole sequences has no batch dimension")
    values = {value.name: value for value in graph.values()}
    sources = [values[name] for name in pools]
    for value in sources:
        value.producer = None
    graph.nodes = [node for node in graph.nodes if node.output not in sources]
    of_tokens = {value for value in graph.inputs if value.name not in pooled}
    graph.inputs = [*(value for value in graph.inputs if value.name in pooled), *sources]
    graph.outputs = [_computed(graph, value) for value in graph.outputs]
    graph.remove_dead()
    _check_reads(graph, of_tokens)
    read = {value for node in graph.nodes for value in node_reads(node)}
    graph.inputs = [value for value in graph.inputs if value in read]
    _check_sequences(graph, batch)
    return graph


def _check_reads(sequences: Graph, of_tokens: Collection[Value]) -> None:
    """Mixed where what is computed of whole sequences needs a number of tokens, or of sequences, that only an input of
    tokens shows: packed, that input has other extents."""
    for node in sequences.nodes:
        for value in node_reads(node):
            if value in of_tokens:
                raise Mixed(
                    f"{describe(node)}: what is computed of whole sequences needs input '{value.name}' of tokens"
                )


def _computed(graph: Graph, value: Value) -> Value:
    """An output that is computed: what comes in under the same name goes through a node."""
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
        raise Mixed(f"what is computed of whole sequences: {proof.reason}")
    for node in graph.nodes:
        if named := sorted(name for name in attr_symbols(node) - {batch} if not name.startswith(OPEN)):
            raise Mixed(f"{describe(node)}: what is computed of whole sequences needs their length, '{named[0]}'")


def _read(sequences: Graph, pools: dict[str, Value]) -> dict[str, Value]:
    """The pools that the other graph takes, by its names for them."""
    names = pools | {f"{name}.pooled": pool for name, pool in pools.items()}
    return {value.name: names[value.name] for value in sequences.inputs if value.name in names}


def _finish(tokens: Graph, outputs: list[Value], pools: dict[str, Value]) -> None:
    """Drop what is not of tokens, and give the pools as outputs."""
    tokens.outputs = [*outputs, *pools.values()]
    tokens.remove_dead()
    for name, value in pools.items():
        value.name = name
    read = {value for node in tokens.nodes for value in node.inputs} | set(tokens.outputs)
    tokens.inputs = [value for value in tokens.inputs if value in read]
    infer_graph(tokens)
    verify(tokens, "packing")
