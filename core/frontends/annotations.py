"""Annotations in ONNX files: metadata of nodes, which other programs ignore.

`lathe.device` names the device that must run a node, such as `cuda:1`. `lathe.after` is a JSON list of names of values:
the node runs after the nodes that compute them. `lathe.rows` is `int8` at an Identity if products with weights of few
bits that read its result may round its rows to int8.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import onnx

from lathe.core.errors import ModelError
from lathe.core.ir.graph import Node

_DEVICE, _AFTER, ROWS = "lathe.device", "lathe.after", "lathe.rows"
INT8 = "int8"


def device_of(proto: onnx.NodeProto) -> str:
    """The device annotation of a node; "" if it has none."""
    return _metadata(proto).get(_DEVICE, "")


def names_after(proto: onnx.NodeProto, where: str) -> list[str]:
    """The names of the values after which a node runs. ModelError if its metadata is no JSON list of names."""
    text = _metadata(proto).get(_AFTER)
    if text is None:
        return []
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ModelError(f"metadata '{_AFTER}': expected a JSON list of names of values, got {text!r}", where=where)
    return names


def has_roundable_rows(proto: onnx.NodeProto, where: str) -> bool:
    """Whether a node is an Identity of rows that may be rounded. ModelError if its metadata names another type."""
    text = _metadata(proto).get(ROWS)
    if text not in (None, INT8):
        raise ModelError(f"metadata '{ROWS}': expected {INT8}, got {text!r}", where=where)
    return text is not None and proto.op_type == "Identity" and not proto.domain


def annotate(proto: onnx.NodeProto, node: Node) -> None:
    """Write the annotations of a node into its metadata."""
    found = dict(_entries(node))
    proto.metadata_props.extend(onnx.StringStringEntryProto(key=key, value=found[key]) for key in found)


def _entries(node: Node) -> Iterator[tuple[str, str]]:
    if node.device:
        yield _DEVICE, node.device
    if node.after:
        yield _AFTER, json.dumps([value.name for value in node.after])
    if ROWS in node.attrs:
        yield ROWS, INT8


def _metadata(proto: onnx.NodeProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in proto.metadata_props}
