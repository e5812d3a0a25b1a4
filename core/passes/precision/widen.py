"""Rewrites models with float16 or bfloat16 tensors so that they compute in float32, for which there are kernels.

Each narrow result is computed in float32, and later nodes read the float32 value. So intermediate rounding is left out,
as in ONNX Runtime on CPUs. A Cast back is emitted for readers of the narrow number itself: outputs of the graph,
operators that only move elements or have no float32 form, and operators whose result is not a float, such as
comparisons, which must see the rounded number. Explicit Casts to a narrow type still round. Afterwards
`lathe.core.passes.precision.low_precision` may store the operands of products in a narrow type again.

Tensors that are only moved, such as gathered rows of a table, stay narrow until a node computes with them. So do inputs
of operators that read narrow numbers themselves (`reads_narrow`): a cache is not to be converted whole for each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from lathe.core.errors import LatheError
from lathe.core.ir.graph import Graph, Node, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.opdef import registry
from lathe.core.passes.rewrite.base import PassResult
from lathe.core.passes.rewrite.editor import Editor

F32 = DType.FLOAT32
NARROW = frozenset({DType.FLOAT16, DType.BFLOAT16})
_PRODUCTS = frozenset(
    {"MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "DeformConv", "Attention", "RNN", "GRU", "LSTM"}
    | {"LinearClassifier", "LinearRegressor"}
)
_OF_SHAPE = frozenset({"Shape", "Size"})  # the elements do not matter
_MOVING = frozenset(
    {"Concat", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Reshape", "Slice", "Split"}
    | {"Squeeze", "Tile", "Transpose", "Unsqueeze"}
)
_DOMAINS = ("", "lathe")  # in other domains, an operator's meaning may depend on the element type


@dataclass(frozen=True)
class Widen:
    name: str = "widen"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        walk = _Walk(editor)
        for node in editor.nodes():
            walk.visit(node)
        if walk.count:
            editor.notes.append(f"{walk.count} operators of float16 and bfloat16 compute in float32")
        return editor.finish()


def product_dtype(graph: Graph) -> DType | None:
    """The narrow type of the first inputs of all products of a model (`_PRODUCTS`), also in bodies.

    None if these types differ or are not narrow, or there is no product.
    """
    found = {_dtype(node.input(0)) for node in _products(graph)}
    dtype = found.pop() if len(found) == 1 else None
    return dtype if dtype in NARROW else None


def _products(graph: Graph) -> Iterator[Node]:
    """Yield all nodes of a graph and its nested graphs with an operator in `_PRODUCTS`."""
    for node in graph.nodes:
        if node.op in _PRODUCTS:
            yield node
        for body in node.subgraphs:
            yield from _products(body)


@dataclass
class _Walk:
    """Rewrites nodes in order. `wide` maps narrow values to their float32 counterparts."""

    editor: Editor
    wide: dict[Value, Value] = field(default_factory=dict)
    count: int = 0

    def visit(self, node: Node) -> None:
        narrow = [value for value in node.inputs if _is_narrow(value)]
        if not (narrow or any(map(_is_narrow, node.outputs))) or node.subgraphs:
            return
        if node.op == "Cast":
            self._convert(node)
        elif node.op in _OF_SHAPE:
            self.editor.set_inputs(node, [self.wide.get(value, value) for value in node.inputs if value is not None])
        elif node.op in _MOVING and not any(value in self.wide for value in narrow):
            return
        elif (op := registry.get(node.op)).domain in _DOMAINS and not op.reads_narrow:
            self._compute(node)

    def _convert(self, node: Node) -> None:
        """Replaces a Cast to float32 of a narrow value with its float32 counterpart."""
        source = node.input(0)
        if source in self.wide and node.output.dtype is F32:
            self.editor.replace(node.output, self.wide[source])

    def _compute(self, node: Node) -> None:
        floats = [value for value in node.outputs if _is_narrow(value)]
        convert = self._as_float32 if len(floats) == len(node.outputs) else self._rounded
        inputs = list(map(partial(convert, node), node.inputs))
        outputs = self._emit_in_float32(node, inputs)
        if outputs is None:
            return
        self.count += 1
        for old, new in zip(node.outputs, outputs, strict=True):
            if _is_narrow(old):
                narrow = self.editor.emit(node, "Cast", new, attrs={"to": old.dtype.onnx_code})
                self.wide[narrow] = new
                new = narrow
            self.editor.replace(old, new)

    def _emit_in_float32(self, node: Node, inputs: Sequence[Value | None]) -> list[Value] | None:
        """Emits the node on float32 inputs; returns its outputs.

        None, without a new node, if inference fails or an output would change its type, except from narrow to float32.
        """
        trial = Node(node.op, list(inputs), [], dict(node.attrs), node.name)
        trial.outputs = [Value(value.name, value.type, trial) for value in node.outputs]
        op = registry.get(node.op)
        try:
            types = op.infer(registry.Infer(op, trial, self.editor.graph.constants))
        except LatheError:
            return None
        wanted = [_widened_type(value) for value in node.outputs]
        if len(types) < len(wanted) or any(_element(a) is not _element(b) for a, b in zip(types, wanted, strict=False)):
            return None
        return self.editor.emit_many(node, node.op, inputs, len(node.outputs), node.attrs)

    def _as_float32(self, node: Node, value: Value | None) -> Value | None:
        """The float32 value from which a narrow value was rounded, otherwise a Cast of it; any other value as it is."""
        if value is None or not _is_narrow(value):
            return value
        if value not in self.wide:
            array = self.editor.array(value)
            if array is not None:
                self.wide[value] = self.editor.constant(array.astype(F32.numpy), value.name)
            else:
                self.wide[value] = self.editor.emit(node, "Cast", value, attrs={"to": F32.onnx_code})
        return self.wide[value]

    def _rounded(self, node: Node, value: Value | None) -> Value | None:
        """A new Cast of a narrow value, which is rounded to its type, to float32; any other value as it is."""
        if value is None or not _is_narrow(value) or self.editor.array(value) is not None:
            return self._as_float32(node, value)
        return self.editor.emit(node, "Cast", value, attrs={"to": F32.onnx_code})


def _is_narrow(value: Value | None) -> bool:
    return value is not None and _dtype(value) in NARROW


def _dtype(value: Value | None) -> DType | None:
    return value.dtype if value is not None and isinstance(value.type, TensorType) else None


def _element(type_: object) -> DType | None:
    return type_.dtype if isinstance(type_, TensorType) else None


def _widened_type(value: Value) -> object:
    return TensorType(F32, value.tensor.shape) if _is_narrow(value) else value.type
