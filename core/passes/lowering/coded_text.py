"""Text that is only compared with constants becomes integers where it enters the graph.

Encoders of categories compare each text with their keys. Text has no kernels, so each encoder, and each node that moves
text to one, would run on its reference. This pass numbers all keys of the graph. One node, `TextCodes`, turns a text
into the number of its key. All nodes after it move and compare integers, for which there are kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lathe.core.ir.graph import Array, Attr, Graph, Node, Value
from lathe.core.ir.types import DType, TensorType
from lathe.core.ops.ml.labels import LabelEncoder
from lathe.core.ops.opdef import registry
from lathe.core.passes.rewrite.base import PassResult
from lathe.core.passes.rewrite.editor import Editor

_MOST_TEXTS = 1 << 16  # of a vocabulary: with more, encoders of their numbers get no table (`classic_ml.py`)

# Which inputs of a node are text that it only moves; the others, such as indices, stay as they are.
_MOVED: Mapping[str, slice] = {
    "Concat": slice(None),
    "Where": slice(1, 3),
    **dict.fromkeys(
        (
            "ArrayFeatureExtractor", "Compress", "Expand", "Flatten", "Gather", "GatherElements", "GatherND",
            "Identity", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
        ),
        slice(0, 1),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class EncodeText:
    """Rewrites LabelEncoder, OneHotEncoder and CategoryMapper of text, and Equal of a text and constants.

    A LabelEncoder whose values are text stays. The texts of all rewritten nodes form one vocabulary.
    """

    name: str = "coded_text"

    def run(self, graph: Graph) -> PassResult:
        editor = Editor(graph)
        lookups = {node: keys for node in editor.nodes() if (keys := _keys(editor, node)) is not None}
        vocabulary = tuple(dict.fromkeys(text for keys in lookups.values() for text in keys))
        if not 0 < len(vocabulary) <= _MOST_TEXTS:
            return PassResult(0)
        rewriting = _Rewriting(editor, vocabulary, _moving_nodes(editor, lookups))
        for node in editor.nodes():
            rewriting.rewrite(node, lookups.get(node))
        return editor.finish()


def _keys(editor: Editor, node: Node) -> tuple[str, ...] | None:
    """The texts with which a lookup compares its input; None for a node that is not rewritten."""
    x = node.input(0)
    if x is None or not _is_text(x):
        return None
    op = registry.get(node.op)
    view = registry.NodeView(op, node)
    if isinstance(op, LabelEncoder):
        keys, values, _ = op.table(view)
        return tuple(keys.ravel().tolist()) if values.dtype.kind in "iuf" else None
    if node.op in ("OneHotEncoder", "CategoryMapper"):
        return tuple(view.attr("cats_strings"))
    if node.op == "Equal":
        constants = [array for value in node.inputs if (array := editor.array(value)) is not None]
        return tuple(constants[0].ravel().tolist()) if len(constants) == 1 else None
    return None


def _is_text(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.dtype is DType.STRING


def _moving_nodes(editor: Editor, lookups: Mapping[Node, tuple[str, ...]]) -> set[Node]:
    """The nodes that only move text on its way to a lookup."""
    moving: set[Node] = set()
    pending = [value.producer for node in lookups for value in node.inputs if value is not None]
    while pending:
        node = pending.pop()
        if node is None or node in moving or node.op not in _MOVED or not _is_text(node.output):
            continue
        moving.add(node)
        pending += [value.producer for value in node.inputs[_MOVED[node.op]] if value is not None]
    return moving


@dataclass
class _Rewriting:
    editor: Editor
    vocabulary: tuple[str, ...]
    moving: set[Node]
    _codes: dict[str, int] = field(init=False)
    _coded: dict[Value, Value] = field(default_factory=dict)  # the codes of each text

    def __post_init__(self) -> None:
        self._codes = {text: code for code, text in enumerate(self.vocabulary)}

    def rewrite(self, node: Node, keys: tuple[str, ...] | None) -> None:
        """Emit a node that moves codes beside one that moves text, or replace the lookup whose keys are `keys`."""
        if node in self.moving:
            chosen = _MOVED[node.op]
            inputs = list(node.inputs)
            inputs[chosen] = [self._code(node, value) for value in node.inputs[chosen]]
            moved = self.editor.emit_many(node, node.op, inputs, len(node.outputs), node.attrs)
            self._coded.update(zip(node.outputs, moved, strict=True))
        elif keys is not None:
            inputs = [self._code(node, value) for value in node.inputs]
            numbers = tuple(self._codes[key] for key in keys)
            op, attrs = _lookup_of_codes(node, numbers)
            self.editor.replace(node.output, self.editor.emit(node, op, *inputs, attrs=attrs))

    def _code(self, anchor: Node, text: Value | None) -> Value | None:
        """The codes of a text that `anchor` reads: those of the node that moves it, of a constant, or of TextCodes."""
        if text is None:
            return None
        if text not in self._coded:
            array = self.editor.array(text)
            self._coded[text] = (
                self.editor.emit(anchor, "TextCodes", text, attrs={"vocabulary": self.vocabulary}, name=text.name)
                if array is None
                else self.editor.constant(self._code_array(array))
            )
        return self._coded[text]

    def _code_array(self, texts: Array) -> Array:
        return np.array([self._codes.get(text, -1) for text in texts.ravel().tolist()], np.int64).reshape(texts.shape)


def _lookup_of_codes(node: Node, numbers: tuple[int, ...]) -> tuple[str, dict[str, Attr]]:
    """The operator and the attributes of a lookup whose keys are `numbers` instead of texts."""
    attrs = dict(node.attrs)
    if node.op == "LabelEncoder":
        attrs = {name: attr for name, attr in attrs.items() if not name.startswith("keys_")}
        return node.op, {**attrs, "keys_int64s": numbers}
    if node.op == "OneHotEncoder":
        attrs = {name: attr for name, attr in attrs.items() if name != "cats_strings"}
        return node.op, {**attrs, "cats_int64s": numbers}
    if node.op == "CategoryMapper":
        default = attrs.get("default_int64", -1)
        values = attrs["cats_int64s"]
        return "LabelEncoder", {"keys_int64s": numbers, "values_int64s": values, "default_int64": default}
    return node.op, attrs
