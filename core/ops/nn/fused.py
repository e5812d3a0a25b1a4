"""Fused operators, which only passes emit: several ONNX operators that one kernel runs.

A fused body is a graph of elementwise nodes over rank-0 values: it computes one element. The first input of an epilogue
is the element that the operator computed; the others broadcast to the output. References run the parts one by one, so
that the reference runner can check every optimized graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lathe.core.ir.graph import Array, Graph
from lathe.core.ir.types import Dim, TensorType, ValueType
from lathe.core.ops.nn.narrow_products import as_product_operands, check_epilogue, product_dtype
from lathe.core.ops.nn.rounded_integers import rounded_integers
from lathe.core.ops.nn.softmax import zero_nan
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.ops.opdef.registry import Call, Infer, NodeView, OpDef, Required, get, register
from lathe.core.ops.opdef.scalar import Operand, ScalarOps
from lathe.core.ops.opdef.type_rules import as_computed, broadcast_shapes, shape_text
from lathe.core.ops.tensor.elementwise import Elementwise


def apply_epilogue(c: Call, result: Array, extras: Sequence[Array]) -> Array:
    """`result` after the node's epilogue, whose other inputs are `extras`; `result` itself if it has no epilogue."""
    body = c.attr("epilogue")
    return result if body is None else c.run_graph(body, [result, *extras])[0]


def epilogue_dtype(c: NodeView, computed: Any) -> Any:
    """The element type after the node's epilogue, given the type before it, which stays if there is no epilogue."""
    body = c.attr("epilogue")
    return computed if body is None else body.outputs[0].dtype


def scalar_body(e: ScalarOps, body: Graph, inputs: Sequence[Operand]) -> list[Operand]:
    """The outputs of a fused body as expressions of `inputs`; kernels of all devices generate code with it.

    Nodes that quantize a number together are computed as one (`rounded_integers`).
    """
    integers, replaced = rounded_integers(body)
    env = dict(zip(body.inputs, inputs, strict=True))
    env.update({value: e.const(array.item(), value.dtype) for value, array in body.constants.items()})
    for node in body.nodes:
        if node in replaced:
            continue
        if node in integers:
            found = integers[node]
            env[node.output] = e.quantized(env[found.source], found.zero, node.output.dtype)
            continue
        op = get(node.op)
        env[node.output] = op.scalar(e, NodeView(op, node), *(env[v] for v in node.inputs if v is not None))
    return [env[value] for value in body.outputs]


def check_extras(c: Infer, first: int, shape: Sequence[Dim]) -> None:
    """ModelError if an epilogue's extras, the inputs from `first` on, do not broadcast with a result of this shape."""
    broadcast_shapes(c, [tuple(shape), *(c.shape(index) for index in range(first, len(c.node.inputs)))])


@register
class FusedElementwise(Elementwise):
    """Elementwise nodes as one: `body` maps one element of each input to one of each output.

    All outputs have the broadcast shape of the inputs.
    """

    domain = "lathe"
    inputs = "*x"
    outputs = "*y"
    attrs = {"body": Required("graph")}
    shape_arithmetic = True
    no_gradient = "only passes emit it, after differentiation"

    def known(self, c: Infer) -> Sequence[Array] | None:
        """The values of the outputs if all inputs are known: the body may be part of shape arithmetic."""
        given = [c.value(index) for index in range(len(c.node.inputs))]
        if not given or any(array is None for array in given):
            return None
        body = c.attr("body").clone()
        arrays = {value: array for value, array in zip(body.inputs, given, strict=True) if array is not None}
        shape = np.broadcast_shapes(*(array.shape for array in arrays.values()))
        known = infer_graph(body, arrays)
        found = [np.broadcast_to(known[value], shape) for value in body.outputs if value in known]
        return found if len(found) == len(body.outputs) else None

    def infer(self, c: Infer) -> Sequence[ValueType]:
        shape = broadcast_shapes(c, [c.shape(i) for i in range(len(c.node.inputs))])
        return [TensorType(value.dtype, shape) for value in c.attr("body").outputs]

    def reference(self, c: Call, *inputs: Array) -> tuple[Array, ...]:
        shape = np.broadcast_shapes(*(np.shape(x) for x in inputs))
        return tuple(np.broadcast_to(y, shape) for y in c.run_graph(c.attr("body"), inputs))


@register
class FusedMatMul(OpDef):
    """A matrix product with strided operands and an epilogue.

    Y = transpose(epilogue(transpose(A, perm_a) @ transpose(B, perm_b), *extras), perm_y), where a perm of None is the
    identity. Extras broadcast to the product's shape (before perm_y). Operands have rank 2 or more, as in NumPy's
    matmul. A may be narrower than the product (`lathe.core.ops.nn.narrow_products` lists the pairs of types).
    """

    domain = "lathe"
    inputs = "A, B, *extras"
    outputs = "Y"
    attrs = {"perm_a": None, "perm_b": None, "perm_y": None, "epilogue": None, "exact": 0}
    no_gradient = "only passes emit it, after differentiation"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        a, b = (permuted_shape(c.tensor(i).dims, c.attr(p)) for i, p in ((0, "perm_a"), (1, "perm_b")))
        if len(a) < 2 or len(b) < 2 or a[-1] != b[-2]:
            c.fail(f"cannot multiply {shape_text(a)} by {shape_text(b)}")
        batch = broadcast_shapes(c, [a[:-2], b[:-2]]) or ()
        check_extras(c, 2, (*batch, a[-2], b[-1]))
        shape = permuted_shape((*batch, a[-2], b[-1]), c.attr("perm_y"))
        dtype = product_dtype(c)
        check_epilogue(c, dtype)
        return [TensorType(epilogue_dtype(c, dtype), shape)]

    def reference(self, c: Call, a: Array, b: Array, *extras: Array) -> Array:
        a, b = as_product_operands(a, b)
        left, right = (transposed_view(as_computed(x), c.attr(p)) for x, p in ((a, "perm_a"), (b, "perm_b")))
        product = np.asarray(np.matmul(left, right)).astype(a.dtype, copy=False)
        return transposed_view(apply_epilogue(c, product, extras), c.attr("perm_y"))


@register
class FusedAttention(OpDef):
    """Scaled dot-product attention with strided operands; the scores never leave the cache.

    Y = transpose(softmax(epilogue(Q' @ K', *extras)) @ V', perm_y), where Q', K' and V' are the operands transposed by
    perm_q, perm_k and perm_v (None is the identity), so K' is [..., width, keys]. Extras (scale, masks) broadcast to
    the scores [..., queries, keys]; the softmax is over the keys. Scores of half-precision operands are float32.
    With `guarded`, queries whose weights are NaN, as where every key is masked by -inf, get zeros.
    """

    domain = "lathe"
    inputs = "Q, K, V, *extras"
    outputs = "Y"
    attrs = {"perm_q": None, "perm_k": None, "perm_v": None, "perm_y": None, "epilogue": None, "guarded": 0}
    no_gradient = "only passes emit it, after differentiation"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        return self.attended(c, first_extra=3)

    def attended(self, c: Infer, first_extra: int) -> Sequence[ValueType]:
        """The type of the output, in a list. ModelError if Q, K, V or extras (from `first_extra` on) do not fit."""
        q, k, v = (permuted_shape(c.tensor(i).dims, c.attr(p)) for i, p in enumerate(("perm_q", "perm_k", "perm_v")))
        if min(len(q), len(k), len(v)) < 2 or q[-1] != k[-2] or k[-1] != v[-2]:
            c.fail(f"queries {shape_text(q)}, keys {shape_text(k)} and values {shape_text(v)} do not fit")
        batch = broadcast_shapes(c, [q[:-2], k[:-2], v[:-2]]) or ()
        check_extras(c, first_extra, (*batch, q[-2], k[-1]))
        shape = permuted_shape((*batch, q[-2], v[-1]), c.attr("perm_y"))
        return [TensorType(c.dtype(2), shape)]

    def reference(self, c: Call, q: Array, k: Array, v: Array, *extras: Array) -> Array:
        perms = (c.attr("perm_q"), c.attr("perm_k"), c.attr("perm_v"))
        left, right, values = (transposed_view(as_computed(x), perm) for x, perm in zip((q, k, v), perms, strict=True))
        scores = apply_epilogue(c, np.asarray(np.matmul(left, right)), extras)
        powers = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
        weights = powers / powers.sum(-1, keepdims=True)
        result = np.asarray(np.matmul(as_computed(zero_nan(weights) if c.attr("guarded") else weights), values))
        return transposed_view(result.astype(v.dtype, copy=False), c.attr("perm_y"))


def permuted_shape(shape: Any, perm: Sequence[int] | None) -> Any:
    """A shape in the order of `perm`; None is the identity."""
    return shape if perm is None else tuple(shape[axis] for axis in perm)


def transposed_view(array: Array, perm: Sequence[int] | None) -> Array:
    """A view of an array in the order of `perm`; None is the identity."""
    return array if perm is None else np.transpose(array, perm)
