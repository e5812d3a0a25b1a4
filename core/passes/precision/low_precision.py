"""Mixed precision: products read bfloat16 or float16 activations and accumulate in float32; all else is float32.

A value is stored narrow (in 16 bits) where a matrix product or convolution reads it, and where products, pooling,
normalization and attention pass it to each other, which halves the memory traffic between them. Elementwise nodes
convert narrow values to float32 first. Graph inputs and outputs keep their types. All conversions are in the graph: an
epilogue that stores narrow numbers ends in a Cast, one that reads them begins with a Cast. Weights are rounded when
they are packed.

bfloat16 has the range of float32. float16 ends at 65504, but has ten bits of mantissa instead of seven. So with
float16, results of elementwise nodes that no product multiplies stay float32: sums, squares, exponentials and masks. So
does the result of a product whose epilogue adds or multiplies unbounded numbers.

In a training step, which is a graph with state, right operands are computed, and packed again in every run. Weights and
moments stay float32, and so do the loss and the arithmetic on gradients (Micikevicius et al. 2018, "Mixed Precision
Training"). Gradients in float16 need a scaled loss: see `lathe.core.train.training_step.loss_scaling`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from lathe.core.ir.dim import product
from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.nn.conv import has_few_channels
from lathe.core.ops.opdef import registry
from lathe.core.ops.opdef.registry import NodeView
from lathe.core.passes.rewrite.base import PassResult, is_elementwise, shape_of
from lathe.core.passes.rewrite.bodies import FUSED, Body
from lathe.core.passes.rewrite.editor import Editor
from lathe.core.passes.rewrite.permutation import Perm, perm_attribute
from lathe.core.passes.rewrite.polynomial_degree import fits_float16, polynomial_degree

F32 = DType.FLOAT32
NARROW = (DType.BFLOAT16, DType.FLOAT16)
_PAIR = 2  # the number of bfloat16 in one 32-bit word of a product; float16 covers the same products
_FEWEST_ROWS = 32  # the fewest rows for which packing the right operand during the run pays off
_FIRST_EXTRA = {"FusedConv": 3, "FusedMatMul": 2}

# Operators that keep the element type, and compute in float32 for any type. The number says how many of the first
# inputs have the type of the output (None: all).
_PRESERVING: dict[str, int | None] = {
    "Transpose": 1, "Reshape": 1, "Flatten": 1, "Squeeze": 1, "Unsqueeze": 1, "Identity": 1, "Slice": 1, "Split": 1,
    "Expand": 1, "Concat": None, "MaxPool": 1, "AveragePool": 1, "GlobalAveragePool": 1, "GlobalMaxPool": 1,
    "ReduceMean": 1, "ReduceMax": 1, "LayerNormalization": 1, "FusedAttention": 3, "Pad": 1,
}  # fmt: skip
_CONVERTING = "PackImage"  # the operator that converts elements while it copies them, by its attribute `to`


@dataclass(frozen=True)
class ConvertToNarrow:
    """Stores operands of products, and values that products pass to each other, as `dtype`: bfloat16 or float16.

    All other arithmetic stays float32, by the rules that the module describes. `casts_inputs`: a graph input that only
    type-preserving nodes separate from a product is converted before these nodes, which halves their traffic.
    """

    dtype: DType
    casts_inputs: bool = False

    @property
    def name(self) -> str:
        return str(self.dtype)

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        walk = _Walk(editor, _choose(editor, self.dtype, self.casts_inputs), self.dtype)
        for node in editor.nodes():
            walk.convert(node)
        if walk.products:
            editor.notes.append(f"{walk.products} products of {self.dtype}")
        return editor.finish()


# Choice of the values that are stored narrow


def _choose(editor: Editor, dtype: DType, casts_inputs: bool) -> set[Value]:
    """The values to store as `dtype`: the largest set in which each may be narrow if the others are (`_fits`)."""
    chosen = {v for node in editor.nodes() for v in node.outputs if _is_stored(editor, v) and _can_write(editor, node)}
    while True:
        misfits = {value for value in chosen if not _fits(editor, value, chosen, dtype, casts_inputs)}
        if not misfits:
            return chosen
        chosen -= misfits


def _is_stored(editor: Editor, value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.dtype is F32 and not editor.is_output(value)


def _fits(editor: Editor, value: Value, chosen: set[Value], dtype: DType, casts_inputs: bool) -> bool:
    """Whether a value may be narrow, if the other values in `chosen` are narrow.

    For a value that a product multiplies, conversions for its other readers pay off. Any other value must be next to a
    product or a type-preserving node, and no reader may need a conversion of its own.
    """
    producer, readers = value.producer, editor.readers(value)
    if producer is None:
        return False
    casts = casts_inputs and _leads_to_product(editor, value)
    if not all(source in chosen or (casts and _is_input(editor, source)) for source in _same_type_inputs(producer)):
        return False
    if editor.graph.states and any(_is_packed_from(editor, reader, value) for reader in readers):
        return False
    if any(_multiplies(editor, reader, value) for reader in readers):
        return True
    if dtype is DType.FLOAT16 and not _is_bounded(editor, producer, chosen):
        return False
    near = producer.op in _FIRST_EXTRA or any(_preserves(reader) for reader in readers)
    return near and all(_can_read(editor, reader, value, chosen) for reader in readers)


def _is_input(editor: Editor, value: Value | None) -> bool:
    return value in editor.graph.inputs


def _leads_to_product(editor: Editor, value: Value) -> bool:
    """Whether a product multiplies the value, or what type-preserving nodes alone make of it."""
    return any(
        _multiplies(editor, reader, value)
        or (_preserves(reader) and len(reader.outputs) == 1 and _leads_to_product(editor, reader.output))
        for reader in editor.readers(value)
    )


def _preserves(node: Node) -> bool:
    """Whether the node keeps the element type of its inputs; a Pad with a computed value has that value's type."""
    return node.op in _PRESERVING and not (node.op == "Pad" and node.input(2) is not None)


def _is_bounded(editor: Editor, node: Node, chosen: set[Value]) -> bool:
    """Whether a node's result grows at most linearly with its float16 inputs, so that float16 can hold it.

    The epilogue decides for a product. True for a product without an epilogue, and for nodes that are not elementwise,
    such as those that move or pool elements; false for elementwise nodes. `chosen`: the values that are float16.
    """
    body = node.attrs.get("epilogue")
    if node.op not in _FIRST_EXTRA or not isinstance(body, Graph):
        return not is_elementwise(node)
    extras = [value for value in node.inputs[_FIRST_EXTRA[node.op] :] if value is not None]
    degrees = [1.0, *(_degree(editor, value, chosen) for value in extras)]
    return polynomial_degree(body, dict(zip(body.inputs, degrees, strict=True))) <= 1


def _degree(editor: Editor, value: Value, chosen: set[Value]) -> float:
    """The degree of an epilogue's input: 0 for constants that float16 holds, 1 for float16 values, or infinity."""
    array = editor.array(value)
    if array is not None:
        return 0.0 if fits_float16(array) else inf
    return 1.0 if value in chosen or value.dtype is DType.FLOAT16 else inf


def _same_type_inputs(node: Node) -> Sequence[Value | None]:
    """The leading inputs of a node that must have its output's type; empty unless the operator is in `_PRESERVING`."""
    return node.inputs[: _PRESERVING[node.op]] if _preserves(node) else ()


def _can_write(editor: Editor, node: Node) -> bool:
    if node.op == "FusedConv":
        return _has_kernel(editor, node) and not _is_direct(editor, node)
    if node.op == "FusedMatMul":
        return _keeps_last(node, "perm_y")
    return (_preserves(node) and len(node.outputs) == 1) or is_elementwise(node) or node.op == _CONVERTING


def _can_read(editor: Editor, node: Node, value: Value, chosen: set[Value]) -> bool:
    """Whether a node can read a narrow value without an extra Cast node."""
    if node.op in _FIRST_EXTRA:
        factors = node.inputs[: _FIRST_EXTRA[node.op]]
        return all(value is not factor for factor in factors) or _is_depthwise(editor, node)
    if _preserves(node):
        others = node.inputs[len(_same_type_inputs(node)) :]
        return node.outputs[0] in chosen and all(value is not other for other in others)
    return is_elementwise(node) or node.op == _CONVERTING


def _multiplies(editor: Editor, node: Node, value: Value) -> bool:
    """Whether a node is a product with a kernel that reads `value`, its left operand, as a narrow type.

    The right operand is a constant of float32, or in a training step computed and worth packing.
    """
    if node.inputs[:1] != [value] or value in node.inputs[1:] or value.dtype not in (F32, *NARROW):
        return False
    weight = editor.array(node.input(1))
    if weight is None:
        return bool(editor.graph.states) and _is_worth_packing(node)
    if weight.dtype != F32.numpy:
        return False
    if node.op == "FusedConv":
        return _has_kernel(editor, node) and weight.shape[1] % _PAIR == 0 and not _is_direct(editor, node)
    return node.op == "FusedMatMul" and weight.ndim >= 2 and _has_pairs(value) and _keeps_last(node, "perm_a")


def _is_worth_packing(node: Node) -> bool:
    """Whether packing a FusedMatMul's computed right operand in every run pays off: enough rows, and even depth."""
    a, b = node.input(0), node.input(1)
    if node.op != "FusedMatMul" or a is None or b is None or b.dtype is not F32:
        return False
    shape, right = shape_of(a), shape_of(b)
    if shape is None or right is None or len(shape) < 2 or not a.tensor.is_static or not b.tensor.is_static:
        return False
    *batch, rows, depth = shape if (perm := perm_attribute(node, "perm_a")) is None else [shape[axis] for axis in perm]
    together = rows if len(right) > 2 else product([*batch, rows])
    return isinstance(together, int) and together >= _FEWEST_ROWS and isinstance(depth, int) and depth % _PAIR == 0


def _is_packed_from(editor: Editor, node: Node, value: Value) -> bool:
    """Whether a node is a product with `value` as its computed right operand, which is packed from float32."""
    return node.op in _FIRST_EXTRA and value in node.inputs[1:2] and editor.array(value) is None


def _has_pairs(value: Value) -> bool:
    shape = shape_of(value)
    return bool(shape) and shape is not None and isinstance(shape[-1], int) and shape[-1] % _PAIR == 0


def _has_kernel(editor: Editor, node: Node) -> bool:
    """Whether a kernel covers a FusedConv: it has channels-last images and constant weights."""
    return node.attrs.get("layout") == "NHWC" and editor.array(node.input(1)) is not None


def _is_direct(editor: Editor, node: Node) -> bool:
    """Whether a convolution uses the kernel for few channels, which covers float32 only."""
    weight = editor.array(node.input(1))
    return weight is not None and has_few_channels(NodeView(registry.get(node.op), node), weight.shape)


def _is_depthwise(editor: Editor, node: Node) -> bool:
    """Whether a convolution is depthwise: its kernel computes in float32 and reads either type."""
    weight, groups = editor.array(node.input(1)), node.attrs.get("group", 1)
    return node.op == "FusedConv" and weight is not None and groups != 1 and weight.shape[:2] == (groups, 1)


def _keeps_last(node: Node, name: str) -> bool:
    perm = perm_attribute(node, name)
    return perm is None or perm[-1] == len(perm) - 1


# The rewrite


@dataclass
class _Walk:
    """Rewrites nodes in order, so that the values in `chosen` are of type `dtype`.

    `narrow` collects the values of type `dtype`, `casts` the emitted conversions, and `transposed` the emitted
    transposes of left operands.
    """

    editor: Editor
    chosen: set[Value]
    dtype: DType
    narrow: set[Value] = field(default_factory=set)
    casts: dict[tuple[Value, DType], Value] = field(default_factory=dict)
    transposed: dict[tuple[Value, Perm], Value] = field(default_factory=dict)
    products: int = 0  # the number of products that read `dtype`

    def convert(self, node: Node) -> None:
        narrow_outputs = [value for value in node.outputs if value in self.chosen]
        narrow_inputs = [value for value in node.inputs if value in self.narrow]
        if node.op in _FIRST_EXTRA:
            self._product(node, bool(narrow_outputs))
        elif is_elementwise(node) and (narrow_outputs or narrow_inputs):
            self._elementwise(node)
        elif _preserves(node) and narrow_outputs:
            same = _same_type_inputs(node)
            inputs = [self._as(node, each, self.dtype) if each in same else each for each in node.inputs]
            self._replace(node, self.editor.emit(node, node.op, *inputs, attrs=node.attrs))
        elif node.op == _CONVERTING and (narrow_outputs or narrow_inputs):
            to = self.dtype if narrow_outputs else F32
            self._replace(node, self.editor.emit(node, node.op, *node.inputs, attrs={**node.attrs, "to": to.onnx_code}))
        elif narrow_inputs:
            self.editor.set_inputs(node, [self._as(node, value, F32) for value in node.inputs])

    def _product(self, node: Node, narrow: bool) -> None:
        left, first = node.inputs[0], _FIRST_EXTRA[node.op]
        factors, extras = node.inputs[:first], [value for value in node.inputs[first:] if value is not None]
        factors += [None] * (first - len(factors))
        wants = left is not None and _multiplies(self.editor, node, left)
        if not (wants or narrow or any(value in self.narrow for value in node.inputs)):
            return
        body = self._body(node, extras, narrow)
        self.products += wants
        if not (left in self.narrow and _is_depthwise(self.editor, node)):
            first_as = self.dtype if wants else F32
            factors = [self._as(node, left, first_as), *(self._as(node, f, F32) for f in factors[1:])]
        attrs = {**node.attrs, **({} if body is None else {"epilogue": body})}
        if wants and not _keeps_last(node, "perm_a"):
            factors[0] = self._contiguous(node, factors[0])
            del attrs["perm_a"]
        new = self.editor.emit(node, node.op, *factors, *extras, attrs=attrs)
        self._replace(node, new)

    def _contiguous(self, node: Node, left: Value | None) -> Value | None:
        """The left operand of a product, transposed in memory as `perm_a` says, by one node for all products.

        The two numbers of a 32-bit word then are neighbours along the depth.
        """
        perm = perm_attribute(node, "perm_a")
        if left is None or perm is None:
            return left
        if (left, perm) not in self.transposed:
            self.transposed[left, perm] = self.editor.emit(node, "Transpose", left, attrs={"perm": perm})
        return self.transposed[left, perm]

    def _body(self, node: Node, extras: Sequence[Value], narrow: bool) -> Graph | None:
        """A product's epilogue with conversions of narrow `extras` to float32, and to `dtype` at the end if `narrow`.

        None if there is no epilogue and the result is not narrow.
        """
        old = node.attrs.get("epilogue")
        if old is None and not narrow:
            return None
        body = Body(self.editor.graph.constants, "epilogue")
        element = body.input(None, old.inputs[0].dtype if isinstance(old, Graph) else F32)
        inputs = [self._read(body, body.input(value, value.dtype)) for value in extras]
        result = body.inline(old, [element, *inputs])[0] if isinstance(old, Graph) else element
        body.graph.outputs = [_cast(body, result, self.dtype) if narrow else result]
        return body.graph

    def _elementwise(self, node: Node) -> None:
        body = Body(self.editor.graph.constants, "body")
        for value in dict.fromkeys(node.inputs):
            if value is not None and value in self.narrow:
                body.inner[value] = self._read(body, body.input(value, self.dtype))
        body.add(node)
        body.graph.outputs = [
            _cast(body, body.inner[value], self.dtype) if value in self.chosen else body.inner[value]
            for value in node.outputs
        ]
        outputs = self.editor.emit_many(node, FUSED, body.arguments, len(node.outputs), {"body": body.graph})
        for old, new in zip(node.outputs, outputs, strict=True):
            self._replace_value(old, new)

    def _read(self, body: Body, value: Value) -> Value:
        return _cast(body, value, F32) if value.dtype is self.dtype else value

    def _as(self, anchor: Node, value: Value | None, dtype: DType) -> Value | None:
        """The value as `dtype`, float32 or the narrow type: a Cast of it, emitted once for all readers, if needed.

        To float32 only the values in `narrow` are cast; all others stay as they are, as does None.
        """
        if value is None or value.dtype is dtype or (value not in self.narrow and dtype is F32):
            return value
        if (value, dtype) not in self.casts:
            self.casts[value, dtype] = self.editor.emit(anchor, "Cast", value, attrs={"to": dtype.onnx_code})
        return self.casts[value, dtype]

    def _replace(self, node: Node, new: Value) -> None:
        self._replace_value(node.output, new)

    def _replace_value(self, old: Value, new: Value) -> None:
        if old in self.chosen:
            self.narrow.add(new)
        self.editor.replace(old, new)


def _cast(body: Body, value: Value, dtype: DType) -> Value:
    return body.apply("Cast", [value], {"to": dtype.onnx_code})


__all__ = ["ConvertToNarrow"]
