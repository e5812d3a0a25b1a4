"""Matrix products: MatMul and FusedMatMul of float32 or words, batched, with strided operands and an epilogue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from lathe.core.ir.dim import product
from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.ir.types import Dim, DType
from lathe.core.kernels.call import In, KernelCall, KernelSpec, Operand, Out, Packed, Request, Scratch
from lathe.core.kernels.shared import body as bodies
from lathe.core.kernels.shared.matrices import Matrices, perm_attribute, to_product_axes
from lathe.core.kernels.shared.nest import Nest, has_plannable_types, row_major, traffic
from lathe.core.kernels.shared.panels import (
    Tile,
    choose_tile,
    fits_l2,
    is_deferred,
    is_staged,
    pack_panels,
    packed_size,
    row_pitch,
    stage_bytes,
)
from lathe.core.kernels.shared.runtime_numbers import RuntimeNumbers
from lathe.core.kernels.shared.words import (
    NARROW,
    WORD_BYTES,
    count_in_words,
    element_of,
    elements_per_word,
    pack_words,
)
from lathe.core.kernels.target import Target

F32, F16 = DType.FLOAT32, DType.FLOAT16
_DEEP = 32  # from this depth on, code differs only in the length of its loop


@dataclass(frozen=True)
class GemmSpec(KernelSpec):
    """Y[b, i, j] = epilogue(sum over k of A[b, i, k] * B[b, k, j], extras[b, i, j]).

    The loops of `nest` are the batch axes and then the rows i; its operands are A, B (which does not move along i), the
    extras and Y. Strides count elements. `packed`: B lies in panels (`lathe.core.kernels.shared.panels`), and the batch
    strides of B are those of packed matrices. `element` is the type in the words of A
    (`lathe.core.kernels.shared.words`): the depth, and the strides of A and of a packed B, count words.

    With a `depth` of 0 the code reads the depth, and possibly the stride of A along i, at run time
    (`lathe.core.kernels.shared.runtime_numbers`). Then `in_blocks` holds the choice that otherwise depends on the
    depth (see `for_each_panel`).
    """

    family: ClassVar[str] = "gemm"
    generator: ClassVar[str] = "gemm.cpu"
    nest: Nest
    depth: int
    columns: int
    a_step: int  # stride of A along k
    b_steps: tuple[int, int]  # strides of B along k and j, when it is not packed
    extra_steps: tuple[int, ...]  # stride of each extra along j
    y_step: int  # stride of Y along j
    packed: bool
    epilogue: Graph | None
    extra_dtypes: tuple[DType, ...]
    dtype: DType  # of Y
    tile: Tile
    element: DType = F32
    in_blocks: bool = False

    def general(self, target: Target, place: int) -> tuple[KernelSpec, tuple[int, ...]] | None:
        """The spec of code that reads the depth, and the stride of A along its rows, at run time; and both numbers.

        None unless B is packed, one loop walks the rows, A is contiguous along the depth and not float16, the stride is
        a number, and the depth is at least `_DEEP`. `place`, the index of the operand with the numbers, is not used:
        that operand is always the last one.
        """
        step = self.nest.strides[0][-1]
        plain = self.packed and self.nest.rank == 1 and not self.widened_words and self.a_step == 1
        if not plain or self.depth < _DEEP or not isinstance(step, int):
            return None
        numbers = RuntimeNumbers()
        numbers.take(self.depth)
        nest = replace(self.nest, strides=((numbers.take(step),), *self.nest.strides[1:]))
        spec = replace(self, nest=nest, depth=0, b_steps=(0, 1), in_blocks=fits_l2(target, self.depth, self.columns))
        return spec, tuple(numbers.values)

    @property
    def depth_dim(self) -> Dim:
        """The depth: a number, or the symbol of the first run-time number if `depth` is 0."""
        return self.depth or RuntimeNumbers().take(0)

    @property
    def summary(self) -> str:
        kind = "" if self.element is F32 else f"{self.element} "
        b = "packed" if self.packed else "packed on the fly" if self.repacks else "as it is"
        return f"gemm {kind}{self.tile}, B {b}"

    @property
    def rows(self) -> Dim:
        return self.nest.extents[-1]

    @property
    def deferred(self) -> bool:
        """Whether the epilogue runs after all sums of a block are stored (`panels.is_deferred`).

        Not for few columns: reading them back would wait for the masked store.
        """
        return self.columns > self.tile.lanes // 2 and is_deferred(self.epilogue, self.dtype, self.y_step)

    @property
    def staged(self) -> bool:
        """Whether the sums of a tile go through scratch before the epilogue (`panels.is_staged`)."""
        return is_staged(self.epilogue, self.dtype, self.y_step)

    @property
    def repacks(self) -> bool:
        """Whether every task first gathers its panel of B: the rows of B are not contiguous, or not words yet."""
        return not self.packed and (self.element is not F32 or (self.b_steps[1] != 1 and self.columns > 1))

    @property
    def widened_words(self) -> int:
        """Words of scratch for a tile's rows of A, converted to float32; 0 unless A is float16."""
        return self.tile.rows * row_pitch(self.depth, self.tile) if self.element is F16 else 0

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        """Scratch operands: a gathered panel of B, widened rows of A, and staged sums, as far as they are needed."""
        gathered = self.depth * self.tile.columns * WORD_BYTES if self.repacks else 0
        needed = (gathered, self.widened_words * WORD_BYTES, stage_bytes(self.tile) if self.staged else 0)
        return tuple(Scratch(nbytes) for nbytes in needed if nbytes)


def gemm(request: Request) -> KernelCall | None:
    """Selector of MatMul and FusedMatMul whose depth and width (columns) are numbers; A and B have rank 2 or more.

    The types of A x B are float32, bfloat16 or float16 x float32, or uint8 x int8; bytes need a constant B. None for
    other nodes, if generated code cannot compute a dimension, if a stride along the depth or the columns is not a
    number, if the epilogue has operators that are not elementwise, and if an A of a narrower type than float32 is not
    contiguous along the depth, or does not fill words along it (2 elements of bfloat16, 4 bytes).
    """
    node = request.node
    element = _element(request)
    if element is None:
        return None
    a, b, shape = _in_words(operand_of(request, 0), element), operand_of(request, 1), product_shape(node)
    if a is None:
        return None
    y_strides = to_product_axes(request.strides_of(node.output), perm_attribute(node, "perm_y"))
    steps = (a.strides[-1], *b.strides[-2:], y_strides[-1], a.shape[-1], b.shape[-1])
    known = [step for step in steps if isinstance(step, int)]
    if len(known) < len(steps):
        return None
    a_step, k_step, j_step, y_step, depth, columns = known
    tile = choose_tile(request.cpu, a.shape[-2] if len(b.shape) > 2 else product(shape[:-1]), columns, request.rank)
    packed = request.constant(1) is not None
    if packed:
        size = packed_size(depth, columns, tile)
        b = Matrices(b.shape, (*(s * size for s in row_major(b.shape[:-2])), *b.strides[-2:]))
    extras = {i: request.walk(value, shape) for i, value in extras_of(node).items()}
    batch = shape[:-2]
    walks = (
        (*a.along(batch), a.strides[-2]),
        (*b.along(batch), 0),
        *(strides[:-1] for strides in extras.values()),
        y_strides[:-1],
    )
    epilogue = node.attrs.get("epilogue")
    spec = GemmSpec(
        nest=rows_last(Nest(shape[:-1], walks).collapsed()),
        depth=depth,
        columns=columns,
        a_step=a_step,
        b_steps=(columns, 1) if packed else (k_step, j_step),
        extra_steps=tuple(int(strides[-1] != 0) for strides in extras.values()),
        y_step=y_step,
        packed=packed,
        epilogue=bodies.canonical(epilogue, {}) if isinstance(epilogue, Graph) else None,
        extra_dtypes=tuple(value.dtype for value in extras_of(node).values()),
        dtype=node.output.dtype,
        tile=tile,
        element=element,
    )
    replaceable = [
        i for i, strides in extras.items() if strides == y_strides and not spec.deferred and can_be_replaced(node, i)
    ]
    flops = product(shape) * (depth * elements_per_word(element) * 2)
    strided: tuple[In | Out, ...] = ()
    if element in (F32, F16) and _are_contiguous(extras):
        strided = (In(0), In(1), *(In(i) for i in extras), Out(0))
    return KernelCall(spec, _operands(spec, node), tuple(replaceable), strided, flops=flops, bytes=traffic(node))


def _are_contiguous(extras: Mapping[int, tuple[Dim, ...]]) -> bool:
    """Whether each extra is contiguous along the columns, or has one value for all of them."""
    return all(strides[-1] in (0, 1) for strides in extras.values())


def _operands(spec: GemmSpec, node: Node) -> tuple[Operand, ...]:
    """The operands A, B (packed at compile time if the spec says so), the extras, Y, and scratch."""
    b: Operand = In(1)
    if spec.packed:
        perm, tile = perm_attribute(node, "perm_b"), spec.tile
        key = f"panels{tile.columns}x{tile.lanes}{perm or ''}{spec.element}"
        pack = partial(_pack, perm=perm, tile=tile, element=spec.element)
        b = Packed(1, key, pack, _packed_bytes(node.inputs[1], spec))
    return (In(0), b, *(In(i) for i in extras_of(node)), Out(0), *spec.scratch)


def _packed_bytes(weights: Value | None, spec: GemmSpec) -> int | None:
    """The size in bytes of B when packed into panels; None unless its elements are float32 and its size is a number."""
    if weights is None or spec.element is not F32 or not isinstance(weights.tensor.size, int):
        return None
    matrices = weights.tensor.size // (spec.depth * spec.columns)
    return matrices * packed_size(spec.depth, spec.columns, spec.tile) * WORD_BYTES


def _pack(array: Array, perm: tuple[int, ...] | None, tile: Tile, element: DType) -> Array:
    return pack_panels(pack_words(array if perm is None else np.transpose(array, perm), element), tile)


def _element(request: Request) -> DType | None:
    """The element type in words of A; None for types and epilogues that the kernel does not cover.

    Bytes need a constant B, because it is packed at compile time.
    """
    node, (a, b) = request.node, request.node.inputs[:2]
    if a is None or b is None or not has_plannable_types(node) or min(len(a.shape), len(b.shape)) < 2:
        return None
    epilogue = node.attrs.get("epilogue")
    if epilogue is not None and not (isinstance(epilogue, Graph) and bodies.is_scalar(epilogue)):
        return None
    element = element_of(a.dtype, b.dtype)
    is_supported = request.constant(1) is not None or (element in NARROW and b.dtype is F32)
    return element if element is F32 or is_supported else None


def _in_words(a: Matrices, element: DType) -> Matrices | None:
    """The left operand counted in words; None if elements along the depth do not form whole words."""
    if element is F32:
        return a
    shape = (*a.shape[:-1], count_in_words(a.shape[-1], element))
    strides = (*(count_in_words(stride, element) for stride in a.strides[:-1]), a.strides[-1])
    if None in (*shape, *strides) or a.strides[-1] != 1:
        return None
    return Matrices(*(tuple(dim for dim in dims if dim is not None) for dims in (shape, strides)))


def operand_of(request: Request, index: int) -> Matrices:
    """Input 0 (A) or 1 (B) as matrices. ValueError if that input is absent."""
    node, value = request.node, request.node.required_input(index)
    return Matrices.of(value, perm_attribute(node, ("perm_a", "perm_b")[index]), request.strides_of(value))


def extras_of(node: Node) -> dict[int, Value]:
    """The extra inputs of the epilogue (input 2 and later), by index."""
    return {i: value for i, value in enumerate(node.inputs) if i >= 2 and value is not None}


def product_shape(node: Node) -> tuple[Dim, ...]:
    """The shape [..., rows, columns] of the node's product, before `perm_y` permutes it to the output's shape."""
    return to_product_axes(node.output.shape, perm_attribute(node, "perm_y"))


def rows_last(nest: Nest) -> Nest:
    """The nest if operand 1 (B) does not move along its last loop, otherwise with a last loop of one row added."""
    if nest.strides[1][-1] == 0:
        return nest
    return Nest((*nest.extents, 1), tuple((*strides, 0) for strides in nest.strides))


def can_be_replaced(node: Node, index: int) -> bool:
    """Whether the output's elements are as large as those of input `index`, whose memory the output may then reuse."""
    value = node.inputs[index]
    return value is not None and value.dtype.itemsize == node.output.dtype.itemsize
