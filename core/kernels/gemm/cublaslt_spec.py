"""Matrix products by NVIDIA's library cuBLASLt: a further candidate for the tuner, never the preferred kernel.

The library is column-major, so it computes the transposed product Y^T = B^T A^T: a row-major matrix is the transpose of
a column-major one. It also adds a matrix C and a bias along the columns of Y, and applies Relu or the tanh form of
Gelu. Products with any other epilogue are left to the generated kernel.

Measuring selects one of the library's algorithms, like a tile. The tuner's finding records it, so that compiling from a
record makes no query to the library.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from lathe.core.errors import ArtifactError
from lathe.core.ir.dim import parse_dim, product
from lathe.core.ir.graph import Graph, Node
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Operand, Out, Packed, Request, Scratch
from lathe.core.kernels.shared.attributes import attribute
from lathe.core.kernels.shared.cuda_product import F32, cast_array

if TYPE_CHECKING:
    from lathe.core.kernels.gemm.cuda_spec import GemmSpec

_LEAST = 16  # smallest number of columns and depth
_WORKSPACE = {False: 4 << 20, True: 32 << 20}  # bytes that NVIDIA recommends, before sm_90 and from sm_90 on
_HOPPER = 90
WORKSPACE_ALIGNMENT = 256  # bytes; more than the alignment of kernel operands, so scratch is larger by this
_MAGIC = b"lathe cublaslt\n"
_WAY = re.compile(r"(\d+):([0-9a-f]{128})/(\d+)")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A batch of row-major matrices (column-major if `turned`).

    Rows, or columns, are `pitch` elements apart; the matrices of the batch are `step` elements apart.
    """

    dtype: DType
    turned: bool
    pitch: Dim
    step: Dim


@dataclass(frozen=True, slots=True)
class TunedAlgorithm:
    """An algorithm of the library, in its opaque encoding, for batches of `n`, and the bytes of workspace it needs."""

    n: int
    algorithm: str  # 64 bytes, hexadecimal
    workspace: int


@dataclass(frozen=True)
class LibrarySpec(KernelSpec):
    """Y[b, i, j] = activation(sum over k of A[b, i, k] * B[b, k, j] + C[b, i, j] + bias[j]).

    The operands are A, B, C and the bias if there are any, Y, and the workspace. `ways` are the algorithms that were
    measured as the fastest for batch sizes.
    """

    family: ClassVar[str] = "cublaslt"
    batch: Dim
    rows: Dim
    columns: Dim
    depth: Dim
    a: Matrix
    b: Matrix
    c: Matrix | None
    y: Matrix
    bias: bool
    activation: str  # "", "Relu" or "Gelu"
    tf32: bool
    workspace: int
    ways: tuple[TunedAlgorithm, ...] = ()

    @property
    def summary(self) -> str:
        epilogue = "".join(f" + {name}" for name in ("C" * (self.c is not None), "bias" * self.bias) if name)
        last = f", {self.activation}" if self.activation else ""
        return f"cublaslt {self.a.dtype}{epilogue}{last}{' by tf32' * self.tf32}"

    @property
    def finding(self) -> str:
        """The symbol of the spec without algorithms, then ` n:algorithm/workspace` for each batch size in `ways`."""
        ways = [f"{way.n}:{way.algorithm}/{way.workspace}" for way in self.ways]
        return " ".join([self.offered.symbol, *ways])

    @property
    def offered(self) -> LibrarySpec:
        """The spec as the selector gives it, without algorithms."""
        return replace(self, ways=())

    def settled(self, call: KernelCall, n: int, way: str) -> KernelCall:
        """`call` with a further algorithm for batches of `n`; `way` is the text `algorithm/workspace`.

        A malformed `way` adds none.
        """
        return self._with((*self.ways, *_ways(f"{n}:{way}")), call)

    def recalled(self, call: KernelCall, added: str) -> KernelCall:
        """`call` with the algorithms of a recorded finding; unchanged if that is malformed."""
        return self._with(_ways(added), call)

    def _with(self, ways: tuple[TunedAlgorithm, ...], call: KernelCall) -> KernelCall:
        """`call` with these algorithms in its spec and the workspace that they need; unchanged if there are none."""
        if not ways:
            return call
        needed = Scratch(max(way.workspace for way in ways) + WORKSPACE_ALIGNMENT, shared=True)
        operands = tuple(needed if isinstance(operand, Scratch) else operand for operand in call.operands)
        return replace(call, spec=replace(self, ways=ways), operands=operands)

    def workspace_bytes(self) -> int:
        """The workspace in bytes: the largest of all recorded algorithms, or the recommended size if there is none."""
        return max((way.workspace for way in self.ways), default=self.workspace)

    def to_bytes(self) -> bytes:
        """The spec as bytes for an artifact."""
        matrices = [_facts(matrix) for matrix in (self.a, self.b, self.c, self.y)]
        sizes = [str(dim) for dim in (self.batch, self.rows, self.columns, self.depth)]
        rest = [self.bias, self.activation, self.tf32, self.workspace]
        ways = [[way.n, way.algorithm, way.workspace] for way in self.ways]
        return _MAGIC + json.dumps([sizes, matrices, rest, ways]).encode()

    @staticmethod
    def is_one(data: bytes) -> bool:
        """Whether the bytes begin like those that `to_bytes` writes."""
        return data.startswith(_MAGIC)

    @staticmethod
    def from_bytes(data: bytes) -> LibrarySpec:
        """The spec that `to_bytes` wrote. ArtifactError for malformed bytes."""
        try:
            sizes, matrices, rest, ways = json.loads(data.removeprefix(_MAGIC))
            a, b, c, y = (_matrix(facts) for facts in matrices)
            batch, rows, columns, depth = map(parse_dim, sizes)
            if a is None or b is None or y is None:
                raise ValueError("a matrix is missing")
            found = LibrarySpec(batch, rows, columns, depth, a, b, c, y, *rest)
            return replace(found, ways=tuple(TunedAlgorithm(*way) for way in ways))
        except (ValueError, TypeError, KeyError) as error:
            raise ArtifactError(f"a product of cuBLASLt is malformed: {error}") from error


def _ways(text: str) -> tuple[TunedAlgorithm, ...]:
    """The algorithms in the text of a finding; empty if any part is malformed."""
    found = [_WAY.fullmatch(part) for part in text.split()]
    return tuple(TunedAlgorithm(int(m[1]), m[2], int(m[3])) for m in found if m is not None) if all(found) else ()


def _facts(matrix: Matrix | None) -> list[object] | None:
    return None if matrix is None else [str(matrix.dtype), matrix.turned, str(matrix.pitch), str(matrix.step)]


def _matrix(facts: list[str] | None) -> Matrix | None:
    if facts is None:
        return None
    dtype, turned, pitch, step = facts
    return Matrix(DType.parse(dtype), bool(turned), parse_dim(pitch), parse_dim(step))


# -- what the library covers ----------------------------------------------------------------------------------------


def cublaslt_gemm(call: KernelCall, spec: GemmSpec, request: Request) -> KernelCall | None:
    """The call of the library for the product that `call`, with the GPU kernel's `spec`, computes.

    None if the target has no cuBLASLt, or the library does not cover the types, layouts, epilogue or small sizes.
    """
    if not request.gpu.cublaslt or spec.factors != (spec.element, spec.element):
        return None
    if spec.batch.rank != 1 or spec.rows.rank != 1 or _is_small(spec.columns) or _is_small(spec.depth):
        return None
    (a, b, *extras, y), epilogue = _matrices(spec), _epilogue_of(spec.results.epilogue, spec.results.dtype)
    if a is None or b is None or y is None or y.turned or epilogue is None:
        return None
    indices = [operand.index for operand in call.operands[2:] if isinstance(operand, In)]
    c: Matrix | None = None
    between: dict[str, Operand] = {}
    for place in epilogue.added:
        matrix, bias = extras[place], _bias(request, spec, indices[place], place)
        if bias is not None and "bias" not in between:
            between["bias"] = bias
        elif matrix is not None and not matrix.turned and matrix.dtype is y.dtype and c is None:
            between["C"], c = In(indices[place]), matrix
        else:
            return None
    workspace = _WORKSPACE[request.gpu.arch >= _HOPPER]
    found = LibrarySpec(
        product(spec.batch.extents), product(spec.rows.extents), spec.columns, spec.depth, a, b, c, y,
        "bias" in between, epilogue.activation, request.gpu.tf32 and spec.element is F32, workspace,
    )  # fmt: skip
    added = (between[name] for name in ("C", "bias") if name in between)
    operands = (*call.operands[:2], *added, Out(), Scratch(workspace + WORKSPACE_ALIGNMENT, shared=True))
    return replace(call, spec=found, operands=operands, grid=(found.batch * found.rows,))


def _matrices(spec: GemmSpec) -> list[Matrix | None]:
    """A, B, the extras and Y as matrices; None for an operand that is neither row-major nor column-major."""
    results = spec.results
    across = [spec.a_step, spec.b_steps[1], *results.extra_steps, results.y_step]
    dtypes = [*spec.factors, *results.extra_dtypes, results.dtype]
    widths = [spec.depth, spec.columns, *(spec.columns for _ in results.extra_steps), spec.columns]
    down = [
        width if spec.rows.extents == (1,) else strides[0]
        for width, strides in zip(widths, spec.rows.strides, strict=True)
    ]
    down[1] = spec.b_steps[0]
    facts = zip(dtypes, down, across, (strides[0] for strides in spec.batch.strides), strict=True)
    return [_matrix_of(*each) for each in facts]


def _is_small(size: Dim) -> bool:
    return isinstance(size, int) and size < _LEAST


def _matrix_of(dtype: DType, down: Dim, across: Dim, step: Dim) -> Matrix | None:
    """The operand as a matrix; None unless it is contiguous along rows or columns."""
    if across == 1 and down != 0:
        return Matrix(dtype, False, down, step)
    return Matrix(dtype, True, across, step) if down == 1 and across != 0 else None


def _bias(request: Request, spec: GemmSpec, index: int, place: int) -> Operand | None:
    """The operand for extra number `place` (input `index`) as a bias; None unless it is one row for all rows.

    The library adds a bias of the result's type only, so a constant is converted to it; None for another type that
    is not constant.
    """
    moves = (spec.batch.strides[2 + place][0], spec.rows.strides[2 + place][0], spec.results.extra_steps[place])
    if moves != (0, 0, 1):
        return None
    dtype, wanted = spec.results.extra_dtypes[place], spec.results.dtype
    if dtype is wanted:
        return In(index)
    if request.constant(index) is None:
        return None
    return Packed(index, f"{wanted}", partial(cast_array, element=wanted))


@dataclass(frozen=True, slots=True)
class _Epilogue:
    added: tuple[int, ...]  # indices of the extras that are added
    activation: str


def _epilogue_of(body: Graph | None, dtype: DType) -> _Epilogue | None:
    """The epilogue as the library can run it: added extras, an optional activation, an optional cast to `dtype`.

    None for any other epilogue.
    """
    if body is None:
        return _Epilogue((), "")
    current, added, activation = body.inputs[0], [], ""
    extras = {value: place for place, value in enumerate(body.inputs[1:])}  # also after a conversion
    for at, node in enumerate(body.nodes):
        if node.op == "Cast" and node.input(0) in extras and node.output.dtype is F32:
            extras[node.output] = extras[node.required_input(0)]
            continue
        if current not in node.inputs:
            return None
        if node.op == "Add" and not activation:
            extra = next((value for value in node.inputs if value is not current), None)
            if extra not in extras or extras[extra] in added:
                return None
            added.append(extras[extra])
        elif _is_activation(node) and not activation:
            activation = node.op
        elif node.op != "Cast" or at != len(body.nodes) - 1 or node.output.dtype is not dtype:
            return None
        current = node.output
    whole = body.outputs == [current] and len(added) == len(body.inputs) - 1
    return _Epilogue(tuple(added), activation) if whole else None


def _is_activation(node: Node) -> bool:
    return node.op == "Relu" or (node.op == "Gelu" and attribute(node, "approximate") == "tanh")
