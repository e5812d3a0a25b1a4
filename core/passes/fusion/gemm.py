"""Rewrites matrix products as FusedMatMul where shapes provably fit; fuses transposes of operands and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lathe.core.ir.dim import Dim, symbols
from lathe.core.ir.dims import has_only_sizes
from lathe.core.ir.graph import Attr, Graph, Node, Value
from lathe.core.ir.types import DType
from lathe.core.ops.opdef.type_rules import NUMBER
from lathe.core.passes.rewrite.base import PassResult, input_symbols, shape_of
from lathe.core.passes.rewrite.bodies import Body
from lathe.core.passes.rewrite.editor import Editor
from lathe.core.passes.rewrite.permutation import Perm, compose, perm_attribute, perm_of, without_leading_ones

_PRODUCTS = frozenset({"MatMul", "Gemm", "FusedMatMul"})
_SWAP: Perm = (1, 0)
_SIGN = 128  # uint8 = int8 + 128 moves the range, and its products, without loss


@dataclass(frozen=True)
class FuseMatMul:
    name: str = "gemm"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        for node in editor.nodes():
            if node.op == "Gemm":
                _from_gemm(editor, node)
            elif node.op == "MatMul":
                _from_matmul(editor, node)
            elif node.op == "MatMulInteger":
                _from_integers(editor, node)
        for node in editor.nodes():
            if node.op == "FusedMatMul":
                _absorb(editor, node)
        for node in editor.nodes():
            if node.attrs.get("perm_y") == _SWAP and is_plain_product(node):
                editor.replace(node.output, transposed_product(editor, node))  # the kernel then writes contiguous rows
        return editor.finish()


def _from_gemm(editor: Editor, node: Node) -> None:
    """Rewrites a Gemm of floats as FusedMatMul; `alpha` and `beta` go into constant operands or the epilogue.

    Nothing is done unless shapes provably fit.
    """
    a, b, c = node.inputs[0], node.inputs[1], node.input(2)
    alpha, beta = (float(node.attrs.get(name, 1.0)) for name in ("alpha", "beta"))  # type: ignore[arg-type]
    if a is None or b is None or not a.dtype.is_float or not _has_equal_depths(node, a, b) or not _broadcasts(node):
        return
    perm_a, perm_b = (_SWAP if node.attrs.get(name, 0) else None for name in ("transA", "transB"))
    if alpha != 1.0 and (weight := editor.array(b)) is not None:
        b, alpha = editor.constant(weight * weight.dtype.type(alpha), b.name), 1.0
    if c is not None and beta != 1.0 and (bias := editor.array(c)) is not None:
        c, beta = editor.constant(bias * bias.dtype.type(beta), c.name), 1.0
    if c is not None and (bias := editor.array(c)) is not None and bias.ndim > 1:
        c = editor.constant(without_leading_ones(bias), c.name)
    body = _gemm_body(editor, a.dtype, alpha, beta, c)
    extras = body.arguments[1:] if body is not None else ()
    new = editor.emit(node, "FusedMatMul", a, b, *extras, attrs=_attrs(perm_a, perm_b, body))
    editor.replace(node.output, new)


def _has_equal_depths(node: Node, a: Value, b: Value) -> bool:
    """Whether the extents of a Gemm's operands over which it sums are provably equal, not only in a run."""
    left, right = shape_of(a), shape_of(b)
    if left is None or right is None:
        return False
    return left[0 if node.attrs.get("transA", 0) else 1] == right[1 if node.attrs.get("transB", 0) else 0]


def _broadcasts(node: Node) -> bool:
    """Whether the third input C of a Gemm is absent, or provably broadcasts to the product, not only in a run."""
    bias, product = shape_of(node.input(2)), shape_of(node.output)
    if node.input(2) is None or bias is None or product is None:
        return node.input(2) is None
    return all(dim in (1, extent) for dim, extent in zip(reversed(bias), reversed(product), strict=False))


def _gemm_body(editor: Editor, dtype: DType, alpha: float, beta: float, c: Value | None) -> Body | None:
    """A scalar body (epilogue) that computes sum * alpha + c * beta from a product's sum; None if that is the sum."""
    if alpha == 1.0 and c is None:
        return None
    body = Body(editor.graph.constants, "epilogue")
    result = body.input(None, dtype)
    if alpha != 1.0:
        result = body.apply("Mul", [result, body.number(alpha, dtype)])
    if c is not None:
        term = body.read(c)
        if beta != 1.0:
            term = body.apply("Mul", [term, body.number(beta, dtype)])
        result = body.apply("Add", [result, term])
    body.graph.outputs = [result]
    return body


def _attrs(perm_a: Perm | None, perm_b: Perm | None, body: Body | None) -> dict[str, Attr]:
    attrs: dict[str, Attr] = {"perm_a": perm_a, "perm_b": perm_b, "epilogue": body.graph if body is not None else None}
    return _without_none(attrs)


def _from_matmul(editor: Editor, node: Node) -> None:
    """Rewrites a MatMul as FusedMatMul, if ranks are known and the summed extents are provably equal.

    A vector operand becomes a matrix of one row or column, and the result is reshaped.
    """
    a, b, shape = node.inputs[0], node.inputs[1], shape_of(node.output)
    left, right = shape_of(a), shape_of(b)
    if a is None or b is None or left is None or right is None or shape is None or a.dtype not in NUMBER:
        return
    if left[-1] != right[max(len(right) - 2, 0)]:
        return  # symbols that may be equal only in a run
    if len(left) > 1 and len(right) > 1:
        editor.replace(node.output, editor.emit(node, "FusedMatMul", a, b))
        return
    if not all(symbols(dim) <= input_symbols(editor.graph) for dim in (*left, *right, *shape)):
        return
    a = editor.reshaped(node, a, (1, *left)) if len(left) == 1 else a
    b = editor.reshaped(node, b, (*right, 1)) if len(right) == 1 else b
    editor.replace(node.output, editor.reshaped(node, editor.emit(node, "FusedMatMul", a, b), shape))


def _from_integers(editor: Editor, node: Node) -> None:
    """Rewrites a MatMulInteger of uint8 by constant int8: (a - s) * b = a * b - s * (the column sums of b).

    Operands of other types, a computed B, and a B with a zero point are passed to `_from_computed_integers`. Only a
    single zero point s is covered: a node with more of them stays as it is.
    """
    a, b, zero = node.inputs[0], node.inputs[1], node.input(2)
    weight, left = editor.array(b), shape_of(a)
    if a is None or left is None or b is None:
        return
    if weight is None or node.input(3) is not None or a.dtype is not DType.UINT8 or weight.dtype != np.int8:
        _from_computed_integers(editor, node)
        return
    if min(len(left), weight.ndim) < 2:
        return
    if left[-1] != weight.shape[-2]:
        return
    if zero is not None and shape_of(zero) not in ((), (1,)):
        return
    y = editor.emit(node, "FusedMatMul", a, b)
    if zero is not None:
        columns = editor.constant(weight.sum(-2, dtype=np.int32, keepdims=weight.ndim > 2), "columns")
        wide = editor.emit(node, "Cast", zero, attrs={"to": DType.INT32.onnx_code})
        y = editor.emit(node, "Sub", y, editor.emit(node, "Mul", columns, wide))
    editor.replace(node.output, y)


def _from_computed_integers(editor: Editor, node: Node) -> None:
    """Rewrites a MatMulInteger of int8 or uint8 operands with zero points s (one number) and t (one, or per column).

    sum((a - s) * (b - t)) = sum(a * b) - s * sum(b) - t * sum(a) + depth * s * t, for sums of `depth` terms. The kernel
    multiplies uint8 by int8, so A and B are converted by adding or subtracting 128, and their zero points with them.
    """
    (a, b), (s, t) = node.inputs[:2], (node.input(2), node.input(3))
    left, right = shape_of(a), shape_of(b)
    if a is None or b is None or left is None or right is None or min(len(left), len(right)) < 2:
        return
    columns = shape_of(t) in ((), (1,), (right[-1],)) if t is not None else True
    if left[-1] != right[-2] or not columns or (s is not None and shape_of(s) not in ((), (1,))):
        return

    def shift(value: Value | None, by: int, to: DType) -> Value | None:
        if value is None or value.dtype is to:
            return value
        wide = editor.emit(node, "Add", _int32(editor, node, value), editor.constant(np.array(by, np.int32), "offset"))
        return editor.emit(node, "Cast", wide, attrs={"to": to.onnx_code})

    if a.dtype is DType.INT8:
        s = s if s is not None else editor.constant(np.zeros((), np.int8), "zero")
        a, s = shift(a, _SIGN, DType.UINT8), shift(s, _SIGN, DType.UINT8)
    if b.dtype is DType.UINT8:
        t = t if t is not None else editor.constant(np.zeros((), np.uint8), "zero")
        b, t = shift(b, -_SIGN, DType.INT8), shift(t, -_SIGN, DType.INT8)
    assert a is not None and b is not None
    y = editor.emit(node, "FusedMatMul", a, b)
    if s is not None:  # s * (sum(b) - depth * t)
        sums = editor.emit(node, "ReduceSum", _int32(editor, node, b), attrs={"axes": (-2,), "keepdims": 1})
        if t is not None:
            sums = editor.emit(node, "Sub", sums, _times_depth(editor, node, t, left[-1]))
        y = editor.emit(node, "Sub", y, editor.emit(node, "Mul", sums, _int32(editor, node, s)))
    if t is not None:
        sums = editor.emit(node, "ReduceSum", _int32(editor, node, a), attrs={"axes": (-1,), "keepdims": 1})
        y = editor.emit(node, "Sub", y, editor.emit(node, "Mul", sums, _int32(editor, node, t)))
    editor.replace(node.output, y)


def _int32(editor: Editor, node: Node, value: Value) -> Value:
    return editor.emit(node, "Cast", value, attrs={"to": DType.INT32.onnx_code})


def _times_depth(editor: Editor, node: Node, value: Value, depth: Dim) -> Value:
    attrs: dict[str, Attr] = {"dtype": DType.INT32, "shape": (), "start": depth, "steps": ()}
    return editor.emit(node, "Mul", _int32(editor, node, value), editor.emit(node, "Iota", attrs=attrs))


def _absorb(editor: Editor, node: Node) -> None:
    """Fuses transposes of a FusedMatMul's operands and result into its attributes `perm_a`, `perm_b` and `perm_y`.

    The kernel then reads the operands, and writes the result, as they are stored.
    """
    for index, name in ((0, "perm_a"), (1, "perm_b")):
        _absorb_operand(editor, node, index, name)
    reader = editor.only_reader(node.output)
    perm = perm_of(reader) if reader is not None else None
    whole = compose(perm_attribute(node, "perm_y"), perm) if perm is not None else None
    if reader is not None and perm is not None and _has_known_step(node, whole):
        attrs = _without_none({**node.attrs, "perm_y": whole})
        editor.replace(reader.output, editor.emit(reader, node.op, *node.inputs, attrs=attrs, name=node.name))


def _has_known_step(node: Node, perm: Perm | None) -> bool:
    """Whether the columns of a product are at a known stride when its output is permuted by `perm`: no dynamic size.

    True for None, the identity, and for a product of unknown rank.
    """
    shape = unpermuted_shape(node)
    if perm is None or shape is None:
        return True
    return not any(has_only_sizes(shape[axis]) for axis in perm[perm.index(len(perm) - 1) + 1 :])


def unpermuted_shape(node: Node) -> tuple[Dim, ...] | None:
    """The shape of a FusedMatMul's result before its output permutation `perm_y`; None if the rank is unknown."""
    shape, perm = shape_of(node.output), perm_attribute(node, "perm_y")
    if shape is None or perm is None:
        return shape
    return tuple(shape[perm.index(axis)] for axis in range(len(perm)))


def is_plain_product(node: Node) -> bool:
    """Whether a node is a FusedMatMul of two matrices without inputs for its epilogue."""
    shape = shape_of(node.output)
    return node.op == "FusedMatMul" and len(node.inputs) == 2 and shape is not None and len(shape) == 2


def transposed_product(editor: Editor, node: Node) -> Value:
    """The transpose of a product of two matrices, as a product: (A B)^T = B^T A^T."""
    a, b = node.inputs
    perms = {
        "perm_a": compose(perm_attribute(node, "perm_b"), _SWAP),
        "perm_b": compose(perm_attribute(node, "perm_a"), _SWAP),
    }
    attrs = _without_none({**node.attrs, **perms, "perm_y": None})
    return editor.emit(node, node.op, b, a, attrs=attrs, name=node.name)


def _without_none(attrs: Mapping[str, Attr]) -> dict[str, Attr]:
    return {name: value for name, value in attrs.items() if value is not None}


def _absorb_operand(editor: Editor, node: Node, index: int, name: str) -> None:
    value, perm = node.inputs[index], perm_attribute(node, name)
    if value is None:
        return
    array = editor.array(value)
    if array is not None and perm is not None:
        _set_operand(editor, node, index, editor.constant(np.transpose(array, perm), value.name), name, None)
        return
    outer = perm_of(value.producer) if value.producer is not None else None
    if outer is None or any(reader.op not in _PRODUCTS for reader in editor.readers(value)) or editor.is_output(value):
        return
    source = value.producer.inputs[0] if value.producer is not None else None
    if source is not None:
        _set_operand(editor, node, index, source, name, compose(outer, perm))


def _set_operand(editor: Editor, node: Node, index: int, value: Value, name: str, perm: Perm | None) -> None:
    node.attrs = _without_none({**node.attrs, name: perm})
    inputs = list(node.inputs)
    inputs[index] = value
    editor.set_inputs(node, inputs)
