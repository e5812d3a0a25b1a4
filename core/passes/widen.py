"""Models whose tensors are float16 or bfloat16: what they compute becomes float32, for which there are kernels.

Each result that was narrow is computed in float32, and read as such by what computes further: rounding in between is
left out, as ONNX Runtime does on CPUs. A conversion back is written where something wants the narrow number itself: an
output of the graph, an operator that only moves or that has no float32 form, and one whose result is no float, such as
a comparison: there numbers are rounded first, as the model says. Explicit conversions to a narrow type still round, and
so does the pass of `core.passes.precision`, which stores as narrow numbers what products multiply.

Tensors that are only moved on their way, such as rows of a table, stay narrow until something computes with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from core.errors import LatheError
from core.ir.graph import Graph, Node, Value
from core.ir.types import DType, TensorType
from core.ops import registry
from core.passes.base import PassResult
from core.passes.edit import Editor

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
_DOMAINS = ("", "lathe")  # others may mean something by an element type


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


def narrow_products(graph: Graph) -> DType | None:
    """The narrow type in which a model computes all its products; None where there are others, or none."""
    found = {_dtype(node.input(0)) for node in _products(graph)}
    dtype = found.pop() if len(found) == 1 else None
    return dtype if dtype in NARROW else None


def _products(graph: Graph) -> Iterator[Node]:
    """What passes make products of, in nested graphs, too."""
    for node in graph.nodes:
        if node.op in _PRODUCTS:
            yield node
        for body in node.subgraphs:
            yield from _products(body)


@dataclass
class _Walk:
    """Rewrites nodes in order. `wide` holds what stands for narrow values."""

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
        elif registry.get(node.op).domain in _DOMAINS:
            self._compute(node)

    def _convert(self, node: Node) -> None:
        """A conversion of something that was computed in float32."""
        source = node.input(0)
        if source in self.wide and node.output.dtype is F32:
            self.editor.replace(node.output, self.wide[source])

    def _compute(self, node: Node) -> None:
        floats = [value for value in node.outputs if _is_narrow(value)]
        as_it_is = partial(self._widened, node)
        inputs = list(map(as_it_is if len(floats) == len(node.outputs) else partial(self._rounded, node), node.inputs))
        outputs = self._emitted(node, inputs)
        if outputs is None:
            return
        self.count += 1
        for old, new in zip(node.outputs, outputs, strict=True):
            if _is_narrow(old):
                narrow = self.editor.emit(node, "Cast", new, attrs={"to": old.dtype.onnx_code})
                self.wide[narrow] = new
                new = narrow
            self.editor.replace(old, new)

    def _emitted(self, node: Node, inputs: Sequence[Value | None]) -> list[Value] | None:
        """The outputs of the node on other inputs; None unless they are what they were, float32 for narrow ones."""
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

    def _widened(self, node: Node, value: Value | None) -> Value | None:
        """A narrow value as float32; anything else as it is."""
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
        """A narrow value as float32, but no more exact than it was."""
        if value is None or not _is_narrow(value) or self.editor.array(value) is not None:
            return self._widened(node, value)
        return self.editor.emit(node, "Cast", value, attrs={"to": F32.onnx_code})


def _is_narrow(value: Value | None) -> bool:
    return value is not None and _dtype(value) in NARROW


def _dtype(value: Value | None) -> DType | None:
    return value.dtype if value is not None and isinstance(value.type, TensorType) else None


def _element(type_: object) -> DType | None:
    return type_.dtype if isinstance(type_, TensorType) else None


def _widened_type(value: Value) -> object:
    return TensorType(F32, value.tensor.shape) if _is_narrow(value) else value.type
