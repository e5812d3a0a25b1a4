"""The code of a model whose sequences are packed: for tokens, and for what is computed of whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from core.any_size import MakePart
from core.ir.graph import Graph
from core.ops.registry import describe
from core.options import Options
from core.passes.pack import Packed, pack
from core.passes.pipeline import Options as PassOptions
from core.passes.pipeline import optimize, prepare
from core.passes.token_flow import TOKENS
from core.runtime.given import Binding
from core.runtime.packed import MakePacked, PackedRuns
from core.runtime.session import BatchInfo, Description, PackInfo

# What names the two parts in the store, where the code of a shape has its values: no model has such symbols.
_TOKENS: Binding = (("packed.tokens", 0),)
_SEQUENCES: Binding = (("packed.sequences", 0),)


def pack_info(graph: Graph, options: Options) -> PackInfo:
    """Whether the sequences of a model can be packed, as it will be compiled."""
    found, tokens = pack(graph), options.packing
    reason = found if isinstance(found, str) else _unfused(found.tokens, options)
    if isinstance(found, str) or reason:
        return PackInfo(False, reason, tokens)
    return PackInfo(True, f"no token depends on another sequence than its own, along '{found.symbol}'", tokens)


def packed_maker(
    graph: Callable[[], Graph], description: Description, options: Options, make: MakePart
) -> MakePacked | None:
    """What makes the code of a model that can be packed; None for others."""
    info = description.packing
    if info is None or not info.packable:
        return None

    def packed() -> PackedRuns:
        parts = cache(lambda: _parts(graph()))
        batching = BatchInfo(False, "tokens meet those of their own sequence", TOKENS)
        described = replace(description, batching=batching)
        tokens = make(lambda: parts().tokens, described, _TOKENS, _of_tokens(options))
        done = {port.name for port in tokens.plan.outputs}
        rest = done.issuperset(description.outputs)
        sequences = None if rest else make(lambda: _rest(parts()), description, _SEQUENCES, options)
        return PackedRuns(tokens, sequences, tuple(description.outputs), info.tokens)

    return packed


def _of_tokens(options: Options) -> Options:
    """The options of the code for tokens, which are its rows."""
    return replace(options, max_batch=options.packing)


def _unfused(tokens: Graph, options: Options) -> str:
    """Attention that would be computed for all pairs of tokens, of different sequences, too: too much, and a NaN of one
    caller would reach the others. Empty where there is none."""
    compile_passes = optimize if options.optimize else prepare
    graph, _ = compile_passes(tokens, PassOptions(precision=options.precision))
    left = next((node for node in graph.nodes if node.op == "SegmentSoftmax"), None)
    return f"{describe(left)}: no kernel computes this attention within sequences" if left is not None else ""


def _parts(graph: Graph) -> Packed:
    found = pack(graph)
    if isinstance(found, str):
        raise ValueError(f"model {graph.name} cannot be packed: {found}")
    return found


def _rest(parts: Packed) -> Graph:
    if parts.sequences is None:
        raise ValueError("nothing is computed of whole sequences")
    return parts.sequences
