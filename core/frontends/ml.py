"""Older forms of operators of ai.onnx.ml; importing this module adds them to the table of adapters."""

from __future__ import annotations

from core.errors import ModelError
from core.frontends.opsets import OnnxNode, before
from core.frontends.scope import Emitter
from core.ir.types import DType, TensorType


@before(2, "LabelEncoder")
def _classes_to_table(e: Emitter, node: OnnxNode) -> None:
    """One list of strings served both ways: strings to their places, and places to strings."""
    words = node.attrs.pop("classes_strings", None)
    if not isinstance(words, tuple) or not words:
        raise ModelError("has no classes_strings", where=node.where)
    type_ = node.required(0).type
    gives_words = isinstance(type_, TensorType) and type_.dtype is DType.INT64
    keys, values = ("int64s", "strings") if gives_words else ("strings", "int64s")
    places = tuple(range(len(words)))
    node.attrs[f"keys_{keys}"] = places if gives_words else words
    node.attrs[f"values_{values}"] = words if gives_words else places
