"""Converts the images of a training step to batch-last: C, D1.., N, so that SIMD vectors lie along the batch.

Weights change in every training step, so packing them would cost time in every step. Batch-last needs no packing: a
single weight multiplies vectors of rows, for any number of channels. The pass starts at convolutions with computed
weights and carries the layout through the nodes between them; transposes remain at the borders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lathe.core.ir.graph import Attr, Graph, Node, Value
from lathe.core.ir.operator_table import OperatorTable
from lathe.core.ops.nn.conv import conv_pads
from lathe.core.ops.opdef import registry
from lathe.core.passes.fusion.gemm import is_plain_product, transposed_product
from lathe.core.passes.rewrite.base import PassResult, has_ranks, is_elementwise, reshape_attrs, shape_of
from lathe.core.passes.rewrite.editor import Editor
from lathe.core.passes.rewrite.permutation import Perm

_IMAGES = frozenset({"Conv", "ConvTranspose", "ConvWeightGradient"})


@dataclass(frozen=True)
class BatchLast:
    name: str = "batch_last"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        if graph.states:  # without states the weights are constant, and kernels with packed weights are faster
            walk = _Walk(editor)
            for node in editor.nodes():
                walk.convert(node)
        return editor.finish()


def last_perm(rank: int) -> Perm:
    """The Transpose permutation of a tensor of this rank from N, C, D1.. to C, D1.., N."""
    return (*range(1, rank), 0)


def first_perm(rank: int) -> Perm:
    """The Transpose permutation of a tensor of this rank from C, D1.., N to N, C, D1..."""
    return (rank - 1, *range(rank - 1))


@dataclass
class _Walk:
    """The state of one walk: `twins` maps a value to the same data batch-last."""

    editor: Editor
    twins: dict[Value, Value] = field(default_factory=dict)

    def convert(self, node: Node) -> None:
        if not has_ranks(node):
            return
        x = node.inputs[0] if node.inputs else None
        if node.op in _IMAGES:
            if x is not None and _can_convert(self.editor, node, x):
                _CONVERTERS[node.op](self, node)
        elif any(value in self.twins for value in node.inputs if value is not None):
            if node.op in _CONVERTERS:
                _CONVERTERS[node.op](self, node)
            elif is_elementwise(node):
                _elementwise(self, node)

    def last(self, value: Value, anchor: Node) -> Value:
        """The value with the same data batch-last: the twin if there is one, otherwise new nodes before `anchor`.

        These are a Transpose; or, for images that a matrix product computes as rows, the product with its operands
        exchanged, which computes the transpose.
        """
        if value not in self.twins:
            matrix = _product_of_images(value)
            moved = self._transpose(anchor, value) if matrix is None else transposed_product(self.editor, matrix)
            attrs = reshape_attrs((*value.shape[1:], value.shape[0]))
            self.twins[value] = moved if matrix is None else self.editor.emit(anchor, "Reshape", moved, attrs=attrs)
        return self.twins[value]

    def _transpose(self, anchor: Node, value: Value) -> Value:
        return self.editor.emit(anchor, "Transpose", value, attrs={"perm": last_perm(len(value.shape))})

    def replace(self, node: Node, result: Value) -> None:
        """Replaces the output of `node` with a Transpose of the batch-last `result`, whose twin is `result`."""
        back = self.editor.emit(node, "Transpose", result, attrs={"perm": first_perm(len(result.shape))})
        self.twins[back] = result
        self.editor.replace(node.output, back)


def _product_of_images(value: Value) -> Node | None:
    """The matrix product (FusedMatMul without extras) of which a Reshape to images computes `value`; None for others.

    Each row of the product must be one image. The transposed product costs no more.
    """
    view = value.producer
    if view is None or view.op != "Reshape" or len(view.inputs) != 1 or view.inputs[0] is None:
        return None
    node = view.inputs[0].producer
    plain = node is not None and is_plain_product(node) and node.attrs.get("perm_y") is None
    return node if plain and len(value.shape) > 2 and value.shape[0] == view.inputs[0].shape[0] else None


def _can_convert(editor: Editor, node: Node, x: Value) -> bool:
    """Whether a convolution has images [N, C, D1..] of known size, and computed weights."""
    shape, channels_first = shape_of(x), node.attrs.get("layout", "NCHW") == "NCHW"
    known = shape is not None and len(shape) >= 3 and x.tensor.is_static
    return channels_first and known and editor.array(node.inputs[1]) is None


Converter = Callable[[_Walk, Node], None]
_CONVERTERS = OperatorTable[Converter]()


@_CONVERTERS.add("Conv")
def _convolution(walk: _Walk, node: Node) -> None:
    """Rewrites a Conv as a batch-last FusedConv, so that later nodes can be fused into its epilogue."""
    x = node.inputs[0]
    pads = conv_pads(registry.Infer(registry.get("Conv"), node, {}))
    if x is None or pads is None:
        return
    attrs = {name: attr for name, attr in node.attrs.items() if name in ("strides", "dilations", "group")}
    attrs["pads"] = (*(before for before, _ in pads), *(after for _, after in pads))
    images = walk.last(x, node)
    walk.replace(node, walk.editor.emit(node, "FusedConv", images, *node.inputs[1:], attrs={**attrs, "layout": "CHWN"}))


@_CONVERTERS.add("ConvTranspose", "MaxPool", "AveragePool")
def _image(walk: _Walk, node: Node) -> None:
    x = node.inputs[0]
    if x is not None and len(node.outputs) == 1:
        attrs: dict[str, Attr] = {**node.attrs, "layout": "CHWN"}
        walk.replace(node, walk.editor.emit(node, node.op, walk.last(x, node), *node.inputs[1:], attrs=attrs))


@_CONVERTERS.add("MaxPoolGradient")
def _images(walk: _Walk, node: Node) -> None:
    inputs = [walk.last(value, node) for value in node.inputs if value is not None]
    walk.replace(node, walk.editor.emit(node, node.op, *inputs, attrs={**node.attrs, "layout": "CHWN"}))


@_CONVERTERS.add("ConvWeightGradient")
def _weight_gradient(walk: _Walk, node: Node) -> None:
    inputs = [walk.last(value, node) for value in node.inputs if value is not None]
    attrs: dict[str, Attr] = {**node.attrs, "layout": "CHWN"}
    walk.editor.replace(node.output, walk.editor.emit(node, node.op, *inputs, attrs=attrs))


@_CONVERTERS.add("ReduceSum", "ReduceMean", "ReduceMax")
def _reduce(walk: _Walk, node: Node) -> None:
    """Rewrites a reduction to read the batch-last twin.

    Without `keepdims` the batch axis must be reduced, as it would be the last of the result.
    """
    x, axes = node.inputs[0], node.attrs.get("axes")
    if x is None or len(node.inputs) != 1 or not isinstance(axes, tuple) or not axes:
        return
    rank = len(x.shape)
    moved = tuple(sorted((int(axis) % rank - 1) % rank for axis in axes))  # type: ignore[arg-type]
    keepdims = node.attrs.get("keepdims", 1)
    if not keepdims and rank - 1 not in moved:
        return  # the batch axis would be the last of the result
    result = walk.editor.emit(node, node.op, walk.last(x, node), attrs={**node.attrs, "axes": moved})
    if keepdims:
        walk.replace(node, result)
    else:
        walk.editor.replace(node.output, result)


@_CONVERTERS.add("Reshape", "Flatten")
def _flatten(walk: _Walk, node: Node) -> None:
    """Rewrites a reshape that keeps the batch axis, such as images to rows of a matrix, as a batch-last reshape."""
    x, y = node.inputs[0], node.output
    if x is None or len(node.inputs) != 1 or len(x.shape) < 2 or len(y.shape) < 2 or x.shape[0] != y.shape[0]:
        return
    attrs = reshape_attrs((*y.shape[1:], y.shape[0]))
    walk.replace(node, walk.editor.emit(node, "Reshape", walk.last(x, node), attrs=attrs))


def _elementwise(walk: _Walk, node: Node) -> None:
    shape = shape_of(node.output)
    if shape is None or len(node.outputs) > 1:
        return
    inputs = [_operand(walk, node, value, len(shape)) for value in node.inputs]
    if all(new is not None or old is None for new, old in zip(inputs, node.inputs, strict=True)):
        walk.replace(node, walk.editor.emit(node, node.op, *inputs, attrs=node.attrs))


def _operand(walk: _Walk, node: Node, value: Value | None, rank: int) -> Value | None:
    """The operand of an elementwise node for its batch-last form: the batch-last twin, or a scalar as it is.

    `rank` is that of the node's output. None if the operand is absent, or has neither this rank nor rank 0.
    """
    shape = shape_of(value)
    if value is None or shape is None or len(shape) not in (0, rank):
        return None
    return value if len(shape) == 0 else walk.last(value, node)
