"""Models to fine-tune. The class names of a model are stored in the metadata of its ONNX file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from lathe.core.errors import ModelError
from lathe.core.frontends.onnx import load
from lathe.core.ir.graph import Graph
from lathe.core.ir.text import Weights, parse_graph, print_graph
from lathe.core.ir.verify import verify
from lathe.core.ops.opdef.inference import infer_graph
from lathe.core.train.text.language import KEY, Language, parse_language

_TEXT, _WEIGHTS = "graph.lir", "weights.bin"
_KEY = "classes"  # among the model's metadata: a JSON list of names


@dataclass(frozen=True)
class Parent:
    """A model to fine-tune, its class names if they are known, and what a language model needs besides its weights."""

    model: Graph
    classes: tuple[str, ...] | None = None
    language: Language | None = None


def graph_files(graph: Graph) -> dict[str, bytes]:
    """The content of the files that hold a graph, by name. Unlike ONNX they keep which constants are not trained."""
    weights = Weights()
    text = print_graph(graph, weights)
    return {_TEXT: text.encode(), _WEIGHTS: weights.tobytes()}


def read_parent(path: Path) -> Parent:
    """A model from an ONNX file with its class names, or from a folder with `graph_files`, which has none.

    ModelError if the content is not valid, OSError if a file cannot be read.
    """
    if path.is_dir():
        graph = parse_graph(_read_text(path / _TEXT), (path / _WEIGHTS).read_bytes())
        infer_graph(graph)
        verify(graph, "reading a graph")
        return Parent(graph)
    data = path.read_bytes()
    return Parent(load(data), classes_of(data), language_of(data))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"is not UTF-8: {error}", where=path.name) from error


def with_classes(model: bytes, classes: Sequence[str] | None) -> bytes:
    """The ONNX model with class names as its only metadata; unchanged for None. DecodeError for invalid bytes."""
    if classes is None:
        return model
    proto = onnx.load_model_from_string(model)
    onnx.helper.set_model_props(proto, {_KEY: json.dumps(list(classes))})
    return bytes(proto.SerializeToString())


def with_language(model: bytes, language: Language | None) -> bytes:
    """The ONNX model with a language as its only metadata; unchanged for None. DecodeError for invalid bytes."""
    if language is None:
        return model
    proto = onnx.load_model_from_string(model)
    onnx.helper.set_model_props(proto, {KEY: language.dump()})
    return bytes(proto.SerializeToString())


def language_of(model: bytes) -> Language | None:
    """The language in an ONNX model's metadata; None without any. ModelError if it or the file is invalid."""
    try:
        props = {entry.key: entry.value for entry in onnx.load_model_from_string(model).metadata_props}
    except DecodeError as error:
        raise ModelError(f"has metadata that cannot be read: {error}", where="model") from None
    return parse_language(props[KEY]) if KEY in props else None


def classes_of(model: bytes) -> tuple[str, ...] | None:
    """The class names in an ONNX model's metadata; None without any. ModelError if they or the file are invalid."""
    try:
        props = {entry.key: entry.value for entry in onnx.load_model_from_string(model).metadata_props}
        names = json.loads(props[_KEY]) if _KEY in props else None
    except (DecodeError, ValueError) as error:
        raise ModelError(f"has metadata that cannot be read: {error}", where="model") from None
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"metadata '{_KEY}': expected a list of names", where="model")
    return tuple(names)
