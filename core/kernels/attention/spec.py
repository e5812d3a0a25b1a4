"""Attention of float32, bfloat16 or float16: scores, softmax and weighted values of a block of queries in one kernel.

There are two kernels, and `_is_query_per_vector` chooses: a vector of scores belongs to one key and several queries
(AttentionSpec), or to one query and several keys (QueryRowsSpec).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from lathe.core.ir.dim import is_never_negative, product
from lathe.core.ir.dims import has_only_sizes
from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Operand, Out, Request, Scratch
from lathe.core.kernels.shared import body as bodies
from lathe.core.kernels.shared.matrices import Matrices, perm_attribute, to_product_axes
from lathe.core.kernels.shared.nest import Nest, has_plannable_types, traffic
from lathe.core.kernels.shared.panels import Tile, choose_tile, row_pitch

F32, BF16, F16 = DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16
SOFTMAX_FLOPS = 12  # per score
_SCORE_BYTES = 1 << 19  # scores of a block of queries that fit a second-level cache beside keys and values
_BLOCK = 64  # queries that share the transposed keys
_ANY_BLOCK = 32  # queries per block if the number of queries is dynamic
_ADDED_ACROSS = 3  # queries up to which keys are read in place, and sums are added across lanes
_EMPTY = 0.15  # empty lanes per query, above which a vector per query is faster (measured)
_EMPTY_PAIRED = 1.0  # the same if a lane multiplies two numbers at once
_USUAL_KEYS = 1024  # assumed if the number of keys is dynamic


@dataclass(frozen=True)
class AttentionSpec(KernelSpec):
    """Y[b, q, c] = sum over j of softmax over j of (epilogue(sum over d of Q[b, q, d] * K[b, j, d])) * V[b, j, c].

    The operands of `batch` are Q, K, V, the extras and Y. Pairs are strides in elements: of Q along (q, d), K along
    (j, d), each extra along (q, j). V and Y are contiguous along c; `v_step` is the stride between keys, `y_step` that
    between queries. `scores` is the register tile of the first product: its rows are keys, its columns a block of
    queries. `values` is the tile of the second product: its rows are queries. `dtype` is the type of Q, K, V and Y;
    scores are float32. If `guarded`, queries whose weights are NaN get zeros.

    `queries`, `keys`, and the strides of extras between queries are numbers, except in a QueryRowsSpec.
    """

    family: ClassVar[str] = "attention"
    generator: ClassVar[str] = "attention.cpu"
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
        """The element type in words of the first product: bfloat16 if it can read adjacent pairs, otherwise float32.

        Other narrow floats are converted to float32 where they are packed or loaded.
        """
        paired = self.depth % 2 == self.q_steps[0] % 2 == self.k_steps[0] % 2 == 0
        return self.dtype if self.dtype is BF16 and paired and self.q_steps[1] == self.k_steps[1] == 1 else F32

    @property
    def summary(self) -> str:
        return f"attention {self.scores} of {self.keys} keys, {self.values}"

    @property
    def known_keys(self) -> int:
        """The number of keys. TypeError if it is dynamic."""
        return _as_number(self.keys)

    @property
    def known_queries(self) -> int:
        """The number of queries. TypeError if it is dynamic."""
        return _as_number(self.queries)

    @property
    def scratch_parts(self) -> tuple[int, Dim, int, int]:
        """Float32 elements of scratch: packed queries, scores, one number per query of a block, and widened keys.

        TypeError if the number of keys is dynamic.
        """
        columns = self.scores.columns
        widened = self.scores.rows * row_pitch(self.depth, self.scores) if self.widens else 0
        return self.depth * columns, self.known_keys * columns, columns, widened

    @property
    def widens(self) -> bool:
        """Whether keys are converted to float32, a tile at a time."""
        return self.dtype is F16 and self.k_steps[1] == 1


@dataclass(frozen=True)
class QueryRowsSpec(AttentionSpec):
    """Attention where a vector holds scores of one query and several keys. A task is a `block` of queries.

    The rows of the tile `scores` are queries, its columns are keys. The number of keys may be dynamic, at least one:
    then each key is contiguous. The number of queries may be dynamic: then the last block may have fewer.
    """

    family: ClassVar[str] = "query_rows"
    generator: ClassVar[str] = "attention.query_rows_cpu"

    @property
    def summary(self) -> str:
        return f"attention {self.scores} of {self.keys} keys by query, {self.values}"

    @property
    def block(self) -> int:
        """The number of queries per task, so that their scores fit the cache."""
        keys = self.keys if isinstance(self.keys, int) else _USUAL_KEYS
        fit = _SCORE_BYTES // (whole_vectors(keys, self.scores) * F32.itemsize)
        return max(1, min(self.queries if isinstance(self.queries, int) else _ANY_BLOCK, _BLOCK, fit))

    @property
    def adds_across(self) -> bool:
        """Whether all blocks read keys in place, without transposing them."""
        return self.reads_keys_in_place(self.block)

    def reads_keys_in_place(self, queries: int) -> bool:
        """Whether `queries` queries read keys in place, and add up the lanes of a sum for each query and key.

        That is so for at most 3 queries if each key is contiguous. For more queries, transposing the keys first takes
        less time.
        """
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
        """Elements between queries, copied or in place."""
        return self.depth if self.copies else self.q_steps[0]

    @property
    def key_pitch(self) -> Dim:
        """Elements between the scores of one query and those of the next, with space for whole vectors."""
        return whole_vectors(self.keys, self.scores) if isinstance(self.keys, int) else self.keys + self.scores.lanes

    @property
    def scratch_parts(self) -> tuple[int, Dim, int, int]:
        """Float32 elements of scratch: copied queries, scores, a panel of keys, and one number per query."""
        copied = self.block * self.depth if self.copies else 0
        panel = self.depth * self.scores.columns if self.repacks else 0
        return copied, self.block * self.key_pitch, panel, self.block


def _as_number(dim: Dim) -> int:
    if not isinstance(dim, int):
        raise TypeError(f"size: expected a number, got {dim}")
    return dim


def whole_vectors(count: int, tile: Tile) -> int:
    """`count` elements, rounded up to whole vectors."""
    return -(-count // tile.lanes) * tile.lanes


def attention(request: Request) -> KernelCall | None:
    """Selector of FusedAttention of float32, bfloat16 or float16, with V and Y contiguous along the columns.

    Depth, columns and strides within a head must be numbers, but not the strides of extras between queries. The number
    of keys may be dynamic if each key is contiguous; the number of queries may be dynamic in dynamic-shape code. None
    for other nodes, if generated code cannot compute a dimension, if Q, K, V and Y have different types, and if the
    epilogue of the scores has operators that are not elementwise.
    """
    node = request.node
    if not _is_covered(node):
        return None
    q, k, v = (operand_of(request, index, name) for index, name in enumerate(("perm_q", "perm_k", "perm_v")))
    perm_y = perm_attribute(node, "perm_y")
    shape = to_product_axes(node.output.shape, perm_y)
    y = Matrices(shape, to_product_axes(request.strides_of(node.output), perm_y))
    scores = (*shape[:-1], k.shape[-1])
    extras = {i: Matrices(scores, request.walk(value, scores)) for i, value in extras_of(node).items()}
    steps = _whole(step for matrix in (q, k, v, y) for step in matrix.strides[-2:])
    sizes, along = _whole((q.shape[-1], v.shape[-1])), _whole(e.strides[-1] for e in extras.values())
    queries, keys, across = q.shape[-2], k.shape[-1], tuple(e.strides[-2] for e in extras.values())
    if steps is None or sizes is None or along is None or (steps[5], steps[7]) != (1, 1):
        return None
    if 0 in (*sizes, queries, keys) or not (isinstance(queries, int) or has_only_sizes(queries)):
        return None
    if not isinstance(keys, int) and not (steps[2] == 1 and (has_only_sizes(keys) or is_never_negative(keys - 1))):
        return None
    depth, columns = sizes
    batch, epilogue = shape[:-2], node.attrs.get("epilogue")
    key_count = keys if isinstance(keys, int) else _USUAL_KEYS
    query_count = queries if isinstance(queries, int) else _ANY_BLOCK
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
        scores=_score_tile(request, query_count, key_count),
        values=choose_tile(request.cpu, query_count, columns),
        dtype=node.output.dtype,
        guarded=bool(node.attrs.get("guarded")),
    )
    if _is_query_per_vector(spec):
        spec = QueryRowsSpec(**(spec.facts | {"scores": choose_tile(request.cpu, query_count, key_count)}))
    flops = product((*batch, queries, keys)) * (2 * depth + 2 * columns + SOFTMAX_FLOPS)
    scratch = Scratch(sum(spec.scratch_parts) * F32.itemsize)
    operands: tuple[Operand, ...] = (*(In(i) for i in (0, 1, 2, *extras_of(node))), Out(), scratch)
    strided: tuple[In | Out, ...] = ()
    if spec.dtype is F32:
        strided = (*(In(i) for i in (0, 1, 2, *extras_of(node))), Out())
    return KernelCall(spec, operands, strided=strided, flops=flops, bytes=traffic(node))


def _is_query_per_vector(spec: AttentionSpec) -> bool:
    """Whether `QueryRowsSpec` should run: a vector then holds scores of one query and several keys.

    That is so if the number of keys or queries is dynamic, if one query per lane would leave many lanes empty, or if
    such lanes would have to gather the extras.
    """
    if not isinstance(spec.keys, int) or not isinstance(spec.queries, int):
        return True
    empty = -spec.queries % spec.scores.lanes
    most = _EMPTY if spec.element is F32 else _EMPTY_PAIRED
    return empty > spec.queries * most or any(across not in (0, 1) for across, _ in spec.extra_steps)


def _score_tile(request: Request, queries: int, keys: int) -> Tile:
    """The tile for the product of keys and queries, with so few queries that their scores stay in the cache."""
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
    """Input `index` as matrices, with the permutation in attribute `perm`. ValueError if that input is absent."""
    node, value = request.node, request.node.required_input(index)
    return Matrices.of(value, perm_attribute(node, perm), request.strides_of(value))


def extras_of(node: Node) -> dict[int, Value]:
    """The extra inputs of the epilogue (input 3 and later), by index."""
    return {i: value for i, value in enumerate(node.inputs) if i >= 3 and value is not None}


def _whole(dims: Iterable[Dim]) -> list[int] | None:
    """The dimensions as a list of ints; None if one of them has a symbol."""
    given = list(dims)
    known = [dim for dim in given if isinstance(dim, int)]
    return known if len(known) == len(given) else None
