"""The code of a model whose sequences are packed: for tokens, and for what is computed of whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from core.any_size import MakePart, any_size
from core.ir.graph import Graph
from core.ir.types import TensorType, ValueType
from core.ops.registry import are_everywhere, describe
from core.options import Options
from core.passes.pack import Packed, pack
from core.passes.pipeline import Options as PassOptions
from core.passes.pipeline import optimize, prepare
from core.passes.token_flow import TOKENS
from core.runtime.any_length import AnyLength
from core.runtime.background import Background
from core.runtime.general import General
from core.runtime.given import Binding
from core.runtime.packed import MakePacked, PackedRuns
from core.runtime.session import BatchInfo, Description, PackInfo
from core.runtime.shapes import StandIn
from core.specialise import Source

# What names the two parts in the store, where the code of a shape has its values: no model has such symbols.
_TOKENS: Binding = (("packed.tokens", 0),)
_SEQUENCES: Binding = (("packed.sequences", 0),)
PACKED: Binding = (("packed", 0),)  # both of them

# Tokens that the code for any length is chosen for: kernels are about as fast for fewer, and memory grows with them.
_ANY_LENGTH = 2048


def pack_info(graph: Graph, options: Options) -> PackInfo:
    """Whether the sequences of a model can be packed, as it will be compiled."""
    found, tokens = pack(graph), options.packing
    reason = found if isinstance(found, str) else _unfused(found.tokens, options)
    if isinstance(found, str) or reason:
        return PackInfo(False, reason, tokens)
    return PackInfo(True, f"no token depends on another sequence than its own, along '{found.symbol}'", tokens)


def of_any_length(graph: Graph, batching: BatchInfo, options: Options) -> bool:
    """Whether one code can answer for all lengths of the model's sequences until each has code of its own. Nobody asked
    for packing, so a proof is only looked for where there may be one."""
    others = {name for value in graph.inputs for name in _symbols(value.type)} - {batching.symbol}
    if graph.states or options.packing or options.devices or len(others) != 1:
        return False
    return batching.divisible and pack_info(graph, for_any_length(options)).packable


def _symbols(type_: ValueType) -> frozenset[str]:
    return type_.symbols if isinstance(type_, TensorType) else frozenset()


def for_any_length(options: Options) -> Options:
    """The options of such code: it is there at once, so nothing is measured."""
    return replace(options, packing=_ANY_LENGTH, tune=0.0, tune_later=0.0)


def stand_in(
    graph: Graph, description: Description, options: Options, make: MakePart, source: Source | None
) -> StandIn:
    """What answers for shapes that have no code of their own yet. `source`: where a child process finds the graph."""
    if description.any_size:
        return any_size(graph, description, options, make, source)
    general, chosen = General(graph), for_any_length(options)
    described = replace(description, packing=PackInfo(True, "", chosen.packing))
    packed = packed_maker(lambda: graph, described, chosen, make)
    if packed is None or not description.any_length:
        return general

    def at_hand() -> bool:
        return source is not None and source.place(_TOKENS, _of_tokens(chosen)).exists()

    def compile_beside(background: Background) -> None:
        if source is not None and are_everywhere():
            background.run_child(source.command(PACKED, chosen))

    return AnyLength(packed, tuple(description.inputs), tuple(description.outputs), general, at_hand, compile_beside)


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
