"""Attention of float32 or narrower floats: scores, softmax and weighted values of a block of queries in one kernel.

There are two, and `_goes_by_query` chooses: a vector of scores belongs to one key, or to one query.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from core.ir.dim import is_never_negative, product
from core.ir.dims import is_sized
from core.ir.graph import Graph, Node, Value
from core.ir.types import Dim, DType
from core.kernels.catalog import body as bodies
from core.kernels.catalog.base import In, KernelCall, KernelSpec, Operand, Out, Request, Scratch, covers
from core.kernels.catalog.matrices import Matrices, perm_attribute, unpermuted
from core.kernels.catalog.nest import Nest, has_plannable_types, traffic
from core.kernels.catalog.panels import Tile, choose_tile, row_pitch

F32, BF16, F16 = DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16
SOFTMAX_FLOPS = 12  # for one score
_SCORE_BYTES = 1 << 19  # of one block of queries: what a second-level cache holds besides keys and values
_BLOCK = 64  # queries that share the transposed keys
_ANY_BLOCK = 32  # queries of a block where only a run shows how many there are
_ADDED_ACROSS = 3  # queries
_EMPTY = 0.15  # lanes without a query for each query: with more, rows of scores are faster (measured)
_EMPTY_PAIRED = 1.0  # the same where a lane multiplies two numbers at once
_USUAL_KEYS = 1024  # where only a run shows how many there are


@dataclass(frozen=True)
class AttentionSpec(KernelSpec):
    """Y[b, q, c] = sum over j of softmax over j of (epilogue(sum over d of Q[b, q, d] * K[b, j, d])) * V[b, j, c].

    The loops of `batch` move Q, K, V, the extras and Y. Pairs are strides in elements: of Q along (q, d), K along
    (j, d), each extra along (q, j). V and Y are contiguous along c; `v_step` goes from key to key, `y_step` from query
    to query. `scores` is the register tile of the first product: its rows are keys, its columns a block of queries;
    `values` that of the second: rows are queries. `dtype` is the type of Q, K, V and Y; scores are float32.
    `guarded`: queries whose weights are no numbers get zeros.

    `queries`, `keys`, and the steps of extras from query to query, are numbers, but for a QueryRowsSpec.
    """

    family: ClassVar[str] = "attention"
    batch: Nest
    queries: Dim
    keys: Dim
    depth: int
    columns: int
    q_steps: tuple[int, int]
    k_steps: tuple[int, int]
    v_step: int
    y_step: int
    extra_steps: tuple[tuple[Dim, int], ...]
    epilogue: Graph | None
    extra_dtypes: tuple[DType, ...]
    scores: Tile
    values: Tile
    dtype: DType = F32
    guarded: bool = False

    @property
    def element(self) -> DType:
        """What words of queries and keys hold in the first product: bfloat16 where pairs are neighbours. Float16 is
        made float32 where it is packed."""
        paired = self.depth % 2 == self.q_steps[0] % 2 == self.k_steps[0] % 2 == 0
        return self.dtype if self.dtype is BF16 and paired and self.q_steps[1] == self.k_steps[1] == 1 else F32

    @property
    def summary(self) -> str:
        return f"attention {self.scores} of {self.keys} keys, {self.values}"

    @property
    def known_keys(self) -> int:
        """The number of keys; TypeError where only a run shows it."""
        return _known(self.keys)

    @property
    def known_queries(self) -> int:
        """The number of queries; TypeError where only a run shows it."""
        return _known(self.queries)

    @property
    def scratch_parts(self) -> tuple[int, Dim, int, int]:
        """Elements of the packed queries, of the scores, of one number per query of a block, and of keys that must be
        widened."""
        columns = self.scores.columns
        widened = self.scores.rows * row_pitch(self.depth, self.scores) if self.widens else 0
        return self.depth * columns, self.known_keys * columns, columns, widened

    @property
    def widens(self) -> bool:
        """Whether keys become float32 a tile at a time."""
        return self.dtype is F16 and self.k_steps[1] == 1


@dataclass(frozen=True)
class QueryRowsSpec(AttentionSpec):
    """The same where a vector holds scores of one query, not of one key. A task is a `block` of queries. The rows of
    the tile `scores` are queries, its columns keys. Where only a run shows how many keys there are, at least one, each
    of them is contiguous. Where only a run shows how many queries there are, the last block has fewer."""

    family: ClassVar[str] = "query_rows"

    @property
    def summary(self) -> str:
        return f"attention {self.scores} of {self.keys} keys by query, {self.values}"

    @property
    def block(self) -> int:
        keys = self.keys if isinstance(self.keys, int) else _USUAL_KEYS
        fit = _SCORE_BYTES // (whole_vectors(keys, self.scores) * F32.itemsize)
        return max(1, min(self.queries if isinstance(self.queries, int) else _ANY_BLOCK, _BLOCK, fit))

    @property
    def adds_across(self) -> bool:
        """Whether keys are read as they lie for all blocks of queries."""
        return self.adds_few(self.block)

    def adds_few(self, queries: int) -> bool:
        """Whether keys are read as they lie for so many queries, and the lanes of a sum added up for each query and
        key. A query more costs more than with keys that have been transposed."""
        return self.k_steps[1] == 1 and queries <= _ADDED_ACROSS

    @property
    def repacks(self) -> bool:
        """Whether keys are transposed, a panel at a time."""
        return not self.adds_across and self.k_steps[0] != 1

    @property
    def copies(self) -> bool:
        """Whether queries are copied first, as contiguous float32."""
        return self.dtype is not F32 or self.q_steps[1] != 1

    @property
    def query_pitch(self) -> int:
        """Elements from one query to the next, copied or not."""
        return self.depth if self.copies else self.q_steps[0]

    @property
    def key_pitch(self) -> Dim:
        """Elements from the scores of one query to those of the next: whole vectors at least."""
        return whole_vectors(self.keys, self.scores) if isinstance(self.keys, int) else self.keys + self.scores.lanes

    @property
    def scratch_parts(self) -> tuple[int, Dim, int, int]:
        """Elements of the copied queries, of the scores, of a panel of keys, and of one number per query."""
        copied = self.block * self.depth if self.copies else 0
        panel = self.depth * self.scores.columns if self.repacks else 0
        return copied, self.block * self.key_pitch, panel, self.block


def _known(dim: Dim) -> int:
    if not isinstance(dim, int):
        raise TypeError(f"the kernel is for known sizes, not {dim}")
    return dim


def whole_vectors(count: int, tile: Tile) -> int:
    """So many elements, padded to vectors."""
    return -(-count // tile.lanes) * tile.lanes


@covers("FusedAttention")
def attention(request: Request) -> KernelCall | None:
    """None for other element types, and where a length or a step between rows depends on the batch; but there may be
    any number of contiguous keys, and in code for any sizes any number of queries."""
    node = request.node
    if not _is_covered(node):
        return None
    q, k, v = (operand_of(request, index, name) for index, name in enumerate(("perm_q", "perm_k", "perm_v")))
    perm_y = perm_attribute(node, "perm_y")
    shape = unpermuted(node.output.shape, perm_y)
    y = Matrices(shape, unpermuted(request.strides_of(node.output), perm_y))
    scores = (*shape[:-1], k.shape[-1])
    extras = {i: Matrices(scores, request.walk(value, scores)) for i, value in extras_of(node).items()}
    steps = _whole(step for matrix in (q, k, v, y) for step in matrix.strides[-2:])
    sizes, along = _whole((q.shape[-1], v.shape[-1])), _whole(e.strides[-1] for e in extras.values())
    queries, keys, across = q.shape[-2], k.shape[-1], tuple(e.strides[-2] for e in extras.values())
    if steps is None or sizes is None or along is None or (steps[5], steps[7]) != (1, 1):
        return None
    if 0 in (*sizes, queries, keys) or not (isinstance(queries, int) or is_sized(queries)):
        return None
    if not isinstance(keys, int) and not (steps[2] == 1 and (is_sized(keys) or is_never_negative(keys - 1))):
        return None
    depth, columns = sizes
    batch, epilogue = shape[:-2], node.attrs.get("epilogue")
    usual = keys if isinstance(keys, int) else _USUAL_KEYS
    usual_queries = queries if isinstance(queries, int) else _ANY_BLOCK
    spec = AttentionSpec(
        batch=Nest(batch, tuple(matrix.along(batch) for matrix in (q, k, v, *extras.values(), y))).collapsed(),
        queries=queries,
        keys=keys,
        depth=depth,
        columns=columns,
        q_steps=(steps[0], steps[1]),
        k_steps=(steps[3], steps[2]),
        v_step=steps[4],
        y_step=steps[6],
        extra_steps=tuple(zip(across, along, strict=True)),
        epilogue=bodies.canonical(epilogue, {}) if isinstance(epilogue, Graph) else None,
        extra_dtypes=tuple(value.dtype for value in extras_of(node).values()),
        scores=_score_tile(request, usual_queries, usual),
        values=choose_tile(request.cpu, usual_queries, columns),
        dtype=node.output.dtype,
        guarded=bool(node.attrs.get("guarded")),
    )
    if _goes_by_query(spec):
        spec = QueryRowsSpec(**(spec.facts | {"scores": choose_tile(request.cpu, usual_queries, usual)}))
    flops = product((*batch, queries, keys)) * (2 * depth + 2 * columns + SOFTMAX_FLOPS)
    scratch = Scratch(sum(spec.scratch_parts) * F32.itemsize)
    operands: tuple[Operand, ...] = (*(In(i) for i in (0, 1, 2, *extras_of(node))), Out(), scratch)
    strided: tuple[In | Out, ...] = ()
    if spec.dtype is F32:
        strided = (*(In(i) for i in (0, 1, 2, *extras_of(node))), Out())
    return KernelCall(spec, operands, strided=strided, flops=flops, bytes=traffic(node))


def _goes_by_query(spec: AttentionSpec) -> bool:
    """Whether a query to each lane would leave many lanes empty, or have to gather what the epilogue reads; and where
    only a run shows how many keys or queries there are."""
    if not isinstance(spec.keys, int) or not isinstance(spec.queries, int):
        return True
    empty = -spec.queries % spec.scores.lanes
    most = _EMPTY if spec.element is F32 else _EMPTY_PAIRED
    return empty > spec.queries * most or any(across not in (0, 1) for across, _ in spec.extra_steps)


def _score_tile(request: Request, queries: int, keys: int) -> Tile:
    """As for any product, but so few queries at a time that their scores stay in the cache."""
    tile = choose_tile(request.cpu, keys, queries)
    row = keys * tile.lanes * F32.itemsize
    if tile.vectors * row <= _SCORE_BYTES:
        return tile
    return choose_tile(request.cpu, keys, max(_SCORE_BYTES // row, 1) * tile.lanes)


def _is_covered(node: Node) -> bool:
    epilogue = node.attrs.get("epilogue")
    if epilogue is not None and not (isinstance(epilogue, Graph) and bodies.is_scalar(epilogue)):
        return False
    given, dtype = [*node.inputs[:3], node.output], node.output.dtype
    if dtype not in (F32, BF16, F16) or not has_plannable_types(node):
        return False
    return all(value is not None and value.dtype is dtype for value in given)


def operand_of(request: Request, index: int, perm: str) -> Matrices:
    node, value = request.node, request.node.inputs[index]
    if value is None:
        raise ValueError(f"{node} has no input {index}")
    return Matrices.of(value, perm_attribute(node, perm), request.strides_of(value))


def extras_of(node: Node) -> dict[int, Value]:
    """The further inputs of the epilogue, by index."""
    return {i: value for i, value in enumerate(node.inputs) if i >= 3 and value is not None}


def _whole(dims: Iterable[Dim]) -> list[int] | None:
    """The numbers, if none of them depends on the batch."""
    given = list(dims)
    known = [dim for dim in given if isinstance(dim, int)]
    return known if len(known) == len(given) else None
