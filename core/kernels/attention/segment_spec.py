"""Attention within packed sequences: many sequences whose tokens lie one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.dim import product, symbol
from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Operand, Out, Request, Scratch
from lathe.core.kernels.shared import body as bodies
from lathe.core.kernels.shared.matrices import Matrices, perm_attribute, to_product_axes
from lathe.core.kernels.shared.nest import Nest, has_plannable_types, is_plannable, traffic
from lathe.core.kernels.shared.panels import Tile, choose_tile
from lathe.core.kernels.target import Target

F32 = DType.FLOAT32
_PERMS = ("perm_q", "perm_k", "perm_v")
_FIRST_EXTRA = 4
_SOFTMAX_FLOPS = 12  # per score
_USUAL_LENGTH = 64  # of a sequence, assumed for costs, since lengths are data


@dataclass(frozen=True)
class SegmentAttentionSpec(KernelSpec):
    """Attention as in AttentionSpec; the queries and keys of sequence s are its own tokens.

    These are the tokens from `offsets[s]` up to, but without, `offsets[s + 1]`, where `offsets` is input 3 of the
    operator SegmentAttention. The operands of `batch` are Q, K, V, the extras and Y. Steps are strides between tokens;
    Q, K, V and Y are contiguous along a token's columns. Pairs of `extra_steps` are strides along (query, key).
    `scores` are the register tiles of the first product for blocks of 1, 2, ... vectors of queries: their rows are
    keys. `values` is the tile of the second product: its rows are queries. If `guarded`, queries whose weights are NaN
    get zeros.
    """

    family: ClassVar[str] = "segment_attention"
    generator: ClassVar[str] = "attention.segment_cpu"
    batch: Nest
    depth: int
    columns: int
    q_step: int
    k_step: int
    v_step: int
    y_step: int
    extra_steps: tuple[tuple[Dim, Dim], ...]
    epilogue: Graph | None
    extra_dtypes: tuple[DType, ...]
    scores: tuple[Tile, ...]
    values: Tile
    guarded: bool

    @property
    def summary(self) -> str:
        return f"attention within sequences, {self.scores[-1]} of their keys, {self.values}"

    @property
    def block(self) -> int:
        """The number of queries in a full block."""
        return self.scores[-1].columns

    @property
    def scratch_parts(self) -> tuple[Dim, Dim]:
        """Float32 elements of scratch: packed queries with a number per query, and scores of the longest sequence."""
        return (self.depth + 1) * self.block, symbol("n") * self.block


def segment_attention(request: Request) -> KernelCall | None:
    """Selector of SegmentAttention of float32: attention within packed sequences.

    There are `n` tokens; the strides between tokens and the numbers of columns are numbers; columns are contiguous.
    None for other nodes, if generated code cannot compute a dimension, and if the epilogue of the scores has operators
    that are not elementwise.
    """
    node = request.node
    if not _is_covered(node):
        return None
    q, k, v = (_operand(request, index, name) for index, name in enumerate(_PERMS))
    perm_y = perm_attribute(node, "perm_y")
    shape = to_product_axes(node.output.shape, perm_y)
    y = Matrices(shape, to_product_axes(request.strides_of(node.output), perm_y))
    scores = (*shape[:-1], shape[-2])
    extras = {i: Matrices(scores, request.walk(value, scores)) for i, value in _extras(node).items()}
    steps = _numbers(step for matrix in (q, k, v, y) for step in matrix.strides[-2:])
    sizes = _numbers((q.shape[-1], v.shape[-1]))
    if steps is None or sizes is None or 0 in sizes or steps[1::2] != [1, 1, 1, 1]:
        return None
    if q.shape[-2] != symbol("n"):  # for n tokens there is scratch memory
        return None
    batch, epilogue = shape[:-2], node.attrs.get("epilogue")
    nest = Nest(batch, tuple(matrix.along(batch) for matrix in (q, k, v, *extras.values(), y))).collapsed()
    if not all(map(is_plannable, (*nest.extents, *(step for steps in nest.strides for step in steps)))):
        return None
    spec = SegmentAttentionSpec(
        batch=nest,
        depth=sizes[0],
        columns=sizes[1],
        q_step=steps[0],
        k_step=steps[2],
        v_step=steps[4],
        y_step=steps[6],
        extra_steps=tuple((matrix.strides[-2], matrix.strides[-1]) for matrix in extras.values()),
        epilogue=bodies.canonical(epilogue, {}) if isinstance(epilogue, Graph) else None,
        extra_dtypes=tuple(value.dtype for value in _extras(node).values()),
        scores=_score_tiles(request.cpu),
        values=choose_tile(request.cpu, symbol("n"), sizes[1]),
        guarded=bool(node.attrs.get("guarded")),
    )
    strided: tuple[In | Out, ...] = (*(In(i) for i in (0, 1, 2, *_extras(node))), Out())
    scratch = Scratch(sum(spec.scratch_parts) * F32.itemsize)
    operands: tuple[Operand, ...] = (In(0), In(1), In(2), In(3), *strided[3:], scratch)
    flops = product((*batch, shape[-2], _USUAL_LENGTH)) * (2 * spec.depth + 2 * spec.columns + _SOFTMAX_FLOPS)
    return KernelCall(spec, operands, strided=strided, flops=flops, bytes=traffic(node))


def _score_tiles(target: Target) -> tuple[Tile, ...]:
    """The register tiles of the first product for blocks of 1, 2, ... vectors, up to the widest that registers hold."""
    tiles: list[Tile] = []
    while True:
        tile = choose_tile(target, symbol("n"), (len(tiles) + 1) * target.lanes)
        if tile.vectors != len(tiles) + 1:
            return tuple(tiles)
        tiles.append(tile)


def _is_covered(node: Node) -> bool:
    epilogue = node.attrs.get("epilogue")
    if epilogue is not None and not (isinstance(epilogue, Graph) and bodies.is_scalar(epilogue)):
        return False
    given = [*node.inputs[:3], node.output]
    return has_plannable_types(node) and all(value is not None and value.dtype is F32 for value in given)


def _operand(request: Request, index: int, perm: str) -> Matrices:
    """An operand as [..., tokens, columns]; K too, although its permutation gives [..., columns, tokens]."""
    value = request.node.required_input(index)
    seen = Matrices.of(value, perm_attribute(request.node, perm), request.strides_of(value))
    if perm != "perm_k":
        return seen
    return Matrices(_swapped(seen.shape), _swapped(seen.strides))


def _swapped(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    return (*dims[:-2], dims[-1], dims[-2])


def _extras(node: Node) -> dict[int, Value]:
    """The extra inputs of the epilogue (input 4 and later), by index."""
    return {i: value for i, value in enumerate(node.inputs) if i >= _FIRST_EXTRA and value is not None}


def _numbers(dims: Iterable[Dim]) -> list[int] | None:
    given = list(dims)
    known = [dim for dim in given if isinstance(dim, int)]
    return known if len(known) == len(given) else None
