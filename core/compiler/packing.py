"""The code of a model whose sequences are packed: code for tokens, and code for whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from lathe.core.compiler.dynamic_shapes import MakePart
from lathe.core.compiler.options import Options
from lathe.core.ir.dim import symbols
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType, ValueType
from lathe.core.ops.opdef.registry import describe
from lathe.core.passes.pipeline import Options as PassOptions
from lathe.core.passes.pipeline import optimize, prepare
from lathe.core.passes.proofs.batch_info import BatchInfo
from lathe.core.passes.proofs.pack import Packed, pack
from lathe.core.passes.proofs.token_flow import TOKENS
from lathe.core.runtime.session.packed import MakePacked, PackedRuns
from lathe.core.runtime.session.run_inputs import Binding
from lathe.core.runtime.session.session import Description, PackInfo

# The bindings that name the two parts in the store, in place of the values of a shape. No model has such symbols.
_TOKENS: Binding = (("packed.tokens", 0),)
_SEQUENCES: Binding = (("packed.sequences", 0),)


def pack_info(graph: Graph, options: Options) -> PackInfo:
    """Whether the sequences of a model can be packed with these options, and the reason."""
    found, tokens = pack(graph), options.packing
    reason = found if isinstance(found, str) else _unfused_attention(found.tokens, options)
    if isinstance(found, str) or reason:
        return PackInfo(False, reason, tokens)
    return PackInfo(True, f"no token depends on another sequence than its own, along '{found.symbol}'", tokens)


def takes_tokens(graph: Graph) -> bool:
    """Whether all inputs are integers [batch, length], as those of text encoders are: ids, masks, types."""
    return bool(graph.inputs) and all(_is_token_array(value.type) for value in graph.inputs)


def _is_token_array(type_: ValueType) -> bool:
    if not isinstance(type_, TensorType) or type_.dtype not in (DType.INT64, DType.INT32):
        return False
    return type_.shape is not None and len(type_.shape) == 2 and bool(symbols(type_.shape[1]))


def make_packed_maker(
    graph: Callable[[], Graph], description: Description, options: Options, make: MakePart
) -> MakePacked | None:
    """A function that compiles a model's code for packed runs when called.

    None if the model cannot be packed, or the options do not ask for packing. `make` compiles or loads each of the two
    graphs: of tokens, and of whole sequences if some output needs it.
    """
    info = description.packing
    if info is None or not info.packable:
        return None

    def packed() -> PackedRuns:
        parts = cache(lambda: _parts(graph()))
        batching = BatchInfo(False, "tokens meet those of their own sequence", TOKENS)
        described = replace(description, batching=batching)
        tokens = make(lambda: parts().tokens, described, _TOKENS, _token_options(options))
        done = {port.name for port in tokens.plan.outputs}
        rest = done.issuperset(description.outputs)
        sequences = None if rest else make(lambda: _sequence_graph(parts()), description, _SEQUENCES, options)
        return PackedRuns(tokens, sequences, tuple(description.outputs), info.tokens)

    return packed


def _token_options(options: Options) -> Options:
    """The options for the code of tokens: its rows are tokens, so its batch size is the most tokens of a run."""
    return replace(options, max_batch=options.packing)


def _unfused_attention(tokens: Graph, options: Options) -> str:
    """Why attention in the graph of tokens would be computed for all pairs of tokens, across sequences.

    "" if it is computed within sequences. Across sequences it would be too much work, and a NaN of one caller would
    reach the other callers.
    """
    compile_passes = optimize if options.optimize else prepare
    graph, _ = compile_passes(tokens, PassOptions(precision=options.precision))
    left = next((node for node in graph.nodes if node.op == "SegmentSoftmax"), None)
    return f"{describe(left)}: no kernel computes this attention within sequences" if left is not None else ""


def _parts(graph: Graph) -> Packed:
    found = pack(graph)
    if isinstance(found, str):
        raise ValueError(f"model {graph.name} cannot be packed: {found}")
    return found


def _sequence_graph(parts: Packed) -> Graph:
    if parts.sequences is None:
        raise ValueError("no output is computed from whole sequences")
    return parts.sequences
