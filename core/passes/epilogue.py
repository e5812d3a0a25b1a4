"""What follows a convolution or a matrix product element by element is done while its result is in registers.

Bias, activation, scale, mask and residual alike: a node joins when it is the only reader of the product, keeps its
type, and needs besides at most one tensor of the product's own size: the residual, which may be older than the product.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.ir.graph import Graph, Node, Value
from core.ir.types import DType
from core.passes.base import PassResult, has_ranks, is_elementwise, shape_of
from core.passes.bodies import FUSED, Body
from core.passes.edit import Editor
from core.passes.permutation import trimmed_axes

_FIRST_EXTRA = {"FusedConv": 3, "FusedMatMul": 2}
# Types that an epilogue may convert between: sums of bytes become numbers and bytes again.
_QUANTIZED = frozenset({DType.INT32, DType.FLOAT32, DType.UINT8, DType.INT8})


@dataclass(frozen=True)
class FuseEpilogue:
    """`most_extras`: how many further tensors one epilogue may read."""

    most_extras: int = 4
    name: str = "epilogue"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        for node in editor.nodes():
            product: Node | None = node if node.op in _FIRST_EXTRA else None
            while product is not None:
                product = self._extended(editor, product)
        return editor.finish()

    def _extended(self, editor: Editor, product: Node) -> Node | None:
        """The product with its reader in the epilogue; None when that cannot be."""
        reader = editor.only_reader(product.output)
        if reader is None or not _joins(reader, product):
            return None
        body = _body(editor, product, reader)
        extras = [value for value in body.arguments if value is not None]
        if len(extras) > self.most_extras or not _affordable(product, extras):
            return None
        inputs = [product.input(index) for index in range(_FIRST_EXTRA[product.op])]
        constants = [_least_rank(editor, value) for value in extras]
        attrs = {**product.attrs, "epilogue": body.graph}
        new = editor.emit(reader, product.op, *inputs, *constants, name=product.name, attrs=attrs)
        editor.replace(reader.output, new)
        return new.producer


def _joins(reader: Node, product: Node) -> bool:
    elementwise = reader.op == FUSED or is_elementwise(reader)
    if not elementwise or len(reader.outputs) != 1 or not has_ranks(reader):
        return False
    if reader.output.shape != product.output.shape:
        return False
    return reader.output.dtype is product.output.dtype or {reader.output.dtype, product.output.dtype} <= _QUANTIZED


def _body(editor: Editor, product: Node, reader: Node) -> Body:
    """The product's epilogue, then the reader."""
    body = Body(editor.graph.constants, "epilogue")
    old = product.attrs.get("epilogue")
    element = body.input(None, old.inputs[0].dtype if isinstance(old, Graph) else product.output.dtype)
    extras = [value for value in product.inputs[_FIRST_EXTRA[product.op] :] if value is not None]
    given = [body.input(value, value.dtype) for value in extras]
    body.inner[product.output] = body.inline(old, [element, *given])[0] if isinstance(old, Graph) else element
    for value in reader.inputs:
        for node in _widening(editor, value, reader):
            body.add(node)
    body.add(reader)
    body.graph.outputs = [body.inner[reader.output]]
    return body


def _widening(editor: Editor, value: Value | None, reader: Node) -> list[Node]:
    """The elementwise nodes, in order, that only make `value` for `reader` from the narrowest value of its shape: what
    takes less room in memory is read and widened in the epilogue, too."""
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


def _affordable(product: Node, extras: list[Value]) -> bool:
    """Extras of the product's type, at most one of them of its size, and in its order of elements."""
    dtype, shape = product.output.dtype, product.output.shape
    if any(value.dtype is not dtype and not {value.dtype, dtype} <= _QUANTIZED for value in extras):
        return False
    if product.attrs.get("perm_y") is not None and extras:
        return False
    return sum(value.shape == shape for value in extras) <= 1


def _least_rank(editor: Editor, value: Value) -> Value:
    """A constant without leading axes of extent 1: a bias is a vector."""
    array = editor.array(value)
    if array is None or array.ndim < 2 or array.shape[0] != 1:
        return value
    return editor.constant(trimmed_axes(array), value.name)
