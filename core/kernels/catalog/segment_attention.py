"""Attention among the tokens of each of many sequences that lie one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from core.ir.dim import product, symbol
from core.ir.graph import Graph, Node, Value
from core.ir.types import Dim, DType
from core.kernels.catalog import body as bodies
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Operand, Out, Request, Scratch, covers
from core.kernels.catalog.matrices import Matrices, perm_attribute, unpermuted
from core.kernels.catalog.nest import Nest, has_plannable_types, is_plannable, traffic
from core.kernels.catalog.panels import Tile, choose_tile
from core.kernels.target import Target

F32 = DType.FLOAT32
_PERMS = ("perm_q", "perm_k", "perm_v")
_FIRST_EXTRA = 4
_SOFTMAX_FLOPS = 12  # for one score
_USUAL_LENGTH = 64  # of a sequence, for costs: lengths are data


@dataclass(frozen=True)
class SegmentAttentionSpec(KernelSpec):
    """As AttentionSpec, with queries and keys from `offsets[s]` to `offsets[s + 1]` of n tokens.

    The loops of `batch` move Q, K, V, the extras and Y. Steps go from token to token; Q, K, V and Y are contiguous
    along a token's columns. Pairs of `extra_steps` are strides along (query, key). `scores` are the register tiles of
    the first product for blocks of 1, 2, ... vectors of queries, its rows are keys; `values` that of the second: rows
    are queries. `guarded`: queries whose weights are no numbers get zeros.
    """

    family: ClassVar[str] = "segment_attention"
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
        """Queries of a full block."""
        return self.scores[-1].columns

    @property
    def scratch_parts(self) -> tuple[Dim, Dim]:
        """Elements of the packed queries, with one number per query, and of the scores of the longest sequence."""
        return (self.depth + 1) * self.block, symbol("n") * self.block


@covers("SegmentAttention")
def segment_attention(request: Request) -> KernelCall | None:
    """None for other types than float32, and where a step between tokens or columns is not a number."""
    node = request.node
    if not _is_covered(node):
        return None
    q, k, v = (_operand(request, index, name) for index, name in enumerate(_PERMS))
    perm_y = perm_attribute(node, "perm_y")
    shape = unpermuted(node.output.shape, perm_y)
    y = Matrices(shape, unpermuted(request.strides_of(node.output), perm_y))
    scores = (*shape[:-1], shape[-2])
    extras = {i: Matrices(scores, request.walk(value, scores)) for i, value in _extras(node).items()}
    steps = _numbers(step for matrix in (q, k, v, y) for step in matrix.strides[-2:])
    sizes = _numbers((q.shape[-1], v.shape[-1]))
    if steps is None or sizes is None or 0 in sizes or steps[1::2] != [1, 1, 1, 1]:
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
    """The tiles for blocks of 1, 2, ... vectors, as many as registers hold."""
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
    """An operand as [..., tokens, columns], K as well."""
    value = request.node.inputs[index]
    if value is None:
        raise ValueError(f"{request.node} has no input {index}")
    seen = Matrices.of(value, perm_attribute(request.node, perm), request.strides_of(value))
    if perm != "perm_k":
        return seen
    return Matrices(_swapped(seen.shape), _swapped(seen.strides))


def _swapped(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    return (*dims[:-2], dims[-1], dims[-2])


def _extras(node: Node) -> dict[int, Value]:
    """The further inputs of the epilogue, by index."""
    return {i: value for i, value in enumerate(node.inputs) if i >= _FIRST_EXTRA and value is not None}


def _numbers(dims: Iterable[Dim]) -> list[int] | None:
    given = list(dims)
    known = [dim for dim in given if isinstance(dim, int)]
    return known if len(known) == len(given) else None
