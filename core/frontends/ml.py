"""Adapters for older forms of ai.onnx.ml operators. Importing this module adds them to the table in `opsets`."""

from __future__ import annotations

from lathe.core.errors import ModelError
from lathe.core.frontends.opsets import OnnxNode, adapts_below
from lathe.core.frontends.scope import Emitter
from lathe.core.ir.types import DType, TensorType


@adapts_below(2, "LabelEncoder")
def _classes_to_table(e: Emitter, node: OnnxNode) -> None:
    """LabelEncoder before opset 2 has one list of strings, `classes_strings`: makes it two lists, keys and values.

    For int64 inputs the keys are the indices, otherwise the strings. ModelError if the list is missing or empty.
    """
    words = node.attrs.pop("classes_strings", None)
    if not isinstance(words, tuple) or not words:
        raise ModelError("has no classes_strings", where=node.where)
    type_ = node.required(0).type
    returns_strings = isinstance(type_, TensorType) and type_.dtype is DType.INT64
    keys, values = ("int64s", "strings") if returns_strings else ("strings", "int64s")
    indices = tuple(range(len(words)))
    node.attrs[f"keys_{keys}"] = indices if returns_strings else words
    node.attrs[f"values_{values}"] = words if returns_strings else indices
