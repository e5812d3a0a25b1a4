"""Fuses elementwise nodes after a convolution or matrix product into its epilogue, which works on registers.

The nodes are biases, activations, scales, masks and residuals. A node is fused if it is the only reader of the product,
and its result has the product's shape and type, or another of the types of quantized products. The epilogue may read at
most one tensor of the product's own shape: the residual, which may be computed before the product.
"""

from __future__ import annotations

from dataclasses import dataclass

from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import DType
from lathe.core.passes.rewrite.base import PassResult, has_ranks, is_elementwise, shape_of
from lathe.core.passes.rewrite.bodies import FUSED, Body
from lathe.core.passes.rewrite.editor import Editor
from lathe.core.passes.rewrite.permutation import without_leading_ones

_FIRST_EXTRA = {
    "FusedConv": 3,
    "FusedMatMul": 2,
    "DequantizedMatMul": 4,
}  # the index of the first input that the epilogue reads
# Types that an epilogue may convert between: int32 sums of byte products become floats, and bytes again.
_QUANTIZED = frozenset({DType.INT32, DType.FLOAT32, DType.UINT8, DType.INT8})


@dataclass(frozen=True)
class FuseEpilogue:
    """Fuses elementwise nodes into epilogues of products. `most_extras`: the most further tensors of an epilogue."""

    most_extras: int = 4
    name: str = "epilogue"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        for node in editor.nodes():
            product: Node | None = node if node.op in _FIRST_EXTRA else None
            while product is not None:
                product = self._fuse_reader(editor, product)
        return editor.finish()

    def _fuse_reader(self, editor: Editor, product: Node) -> Node | None:
        """Replaces a product and its only reader with a product whose epilogue includes the reader.

        Returns the new product; None, without a change, if the reader cannot be fused.
        """
        reader = editor.only_reader(product.output)
        if reader is None or not _can_fuse(reader, product):
            return None
        body = _body(editor, product, reader)
        extras = [value for value in body.arguments if value is not None]
        if len(extras) > self.most_extras or not _are_readable(product, extras):
            return None
        inputs = [product.input(index) for index in range(_FIRST_EXTRA[product.op])]
        constants = [_trimmed_constant(editor, value) for value in extras]
        attrs = {**product.attrs, "epilogue": body.graph}
        new = editor.emit(reader, product.op, *inputs, *constants, name=product.name, attrs=attrs)
        editor.replace(reader.output, new)
        return new.producer


def _can_fuse(reader: Node, product: Node) -> bool:
    elementwise = reader.op == FUSED or is_elementwise(reader)
    if not elementwise or len(reader.outputs) != 1 or not has_ranks(reader):
        return False
    if reader.output.shape != product.output.shape:
        return False
    return reader.output.dtype is product.output.dtype or {reader.output.dtype, product.output.dtype} <= _QUANTIZED


def _body(editor: Editor, product: Node, reader: Node) -> Body:
    """The body of the new epilogue: the product's epilogue followed by the reader."""
    body = Body(editor.graph.constants, "epilogue")
    old = product.attrs.get("epilogue")
    element = body.input(None, old.inputs[0].dtype if isinstance(old, Graph) else product.output.dtype)
    extras = [value for value in product.inputs[_FIRST_EXTRA[product.op] :] if value is not None]
    inputs = [body.input(value, value.dtype) for value in extras]
    body.inner[product.output] = body.inline(old, [element, *inputs])[0] if isinstance(old, Graph) else element
    for value in reader.inputs:
        for node in _widening_nodes(editor, value, reader):
            body.add(node)
    body.add(reader)
    body.graph.outputs = [body.inner[reader.output]]
    return body


def _widening_nodes(editor: Editor, value: Value | None, reader: Node) -> list[Node]:
    """The elementwise nodes, in order, that compute `value` from a value of its shape with fewer bytes per element.

    The chain of nodes is followed backwards while each value has one reader (`reader`, for `value`), up to its
    narrowest value. Empty if no value in the chain is narrower than `value`. With these nodes in the epilogue, the
    kernel reads the narrower value, such as bytes.
    """
    nodes: list[Node] = []
    best, narrowest = 0, value.dtype.itemsize if value is not None else 0
    while value is not None and (node := value.producer) is not None and editor.only_reader(value) is reader:
        sources = [x for x in node.inputs if x is not None and ((array := editor.array(x)) is None or array.size != 1)]
        if not is_elementwise(node) or len(sources) != 1 or shape_of(sources[0]) != shape_of(value):
            break
        nodes.append(node)
        value, reader = sources[0], node
        if value.dtype.itemsize < narrowest:
            best, narrowest = len(nodes), value.dtype.itemsize
    return nodes[:best][::-1]


def _are_readable(product: Node, extras: list[Value]) -> bool:
    """Whether the epilogue of a product can read these tensors.

    They must have the product's type, or be quantized like it; at most one has the product's shape; and the product
    must not permute its output (`perm_y`).
    """
    dtype, shape = product.output.dtype, product.output.shape
    if any(value.dtype is not dtype and not {value.dtype, dtype} <= _QUANTIZED for value in extras):
        return False
    if product.attrs.get("perm_y") is not None and extras:
        return False
    return sum(value.shape == shape for value in extras) <= 1


def _trimmed_constant(editor: Editor, value: Value) -> Value:
    """A constant without leading axes of extent 1, so that a bias is a vector; any other value as it is."""
    array = editor.array(value)
    if array is None or array.ndim < 2 or array.shape[0] != 1:
        return value
    return editor.constant(without_leading_ones(array), value.name)
