"""Brings all external data of a model into one file, without reading it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx

from core.frontends.external import ExternalFiles, is_external
from core.frontends.proto import messages
from core.frontends.tensors import checked_shape, element_type
from core.ir.graph import Array

_ALIGNMENT = 64


class Folded(NamedTuple):
    """A model, and the content of the file that its tensors lie in: views of the files they lie in now."""

    model: bytes
    weights: list[Array]  # uint8


def fold(model: onnx.ModelProto, path: Path, location: str) -> Folded | None:
    """The model, which lies at `path`, with its external data in a file called `location`; None when it has none.

    ModelError for data that lies outside its folder or its file; see external.py. Changes `model`.
    """
    tensors = [each for each in messages(model) if isinstance(each, onnx.TensorProto) and is_external(each)]
    if not tensors:
        return None
    files, pieces, at = ExternalFiles.beside(path), list[Array](), 0
    for tensor in tensors:
        data = _data(tensor, files)
        padding = np.zeros(-len(data) % _ALIGNMENT, np.uint8)
        _refer(tensor, location, at, len(data))
        pieces += [data, padding]
        at += len(data) + len(padding)
    return Folded(model.SerializeToString(), pieces)


def _data(tensor: onnx.TensorProto, files: ExternalFiles) -> Array:
    where = f"tensor '{tensor.name}'"
    dtype, shape = element_type(tensor.data_type, where), checked_shape(tensor.dims, where)
    return files.read(tensor, (math.prod(shape) * dtype.bits + 7) // 8, where)


def _refer(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
