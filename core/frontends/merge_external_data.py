"""Joins all external data of a model to the content of one file, without copying it in memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx

from lathe.core.frontends.external import ExternalFiles, is_external
from lathe.core.frontends.proto import all_messages
from lathe.core.frontends.tensors import check_shape, element_type
from lathe.core.ir.graph import Array

_ALIGNMENT = 64


class MergedModel(NamedTuple):
    """A serialized model, and the content of the one file with its external data, in pieces.

    The pieces of `weights` are views of the mapped files that hold the data now, with padding between them.
    """

    model: bytes
    weights: list[Array]  # uint8


def merge_external_data(model: onnx.ModelProto, path: Path, location: str) -> MergedModel | None:
    """Let all external tensors of `model`, a file at `path`, refer to one file called `location`; changes `model`.

    The caller writes that file. None if the model has no external data. ModelError for data outside the model's folder
    or outside its file (see external.py).
    """
    tensors = [each for each in all_messages(model) if isinstance(each, onnx.TensorProto) and is_external(each)]
    if not tensors:
        return None
    files, chunks, at = ExternalFiles.beside(path), list[Array](), 0
    for tensor in tensors:
        data = _data(tensor, files)
        padding = np.zeros(-len(data) % _ALIGNMENT, np.uint8)
        _set_location(tensor, location, at, len(data))
        chunks += [data, padding]
        at += len(data) + len(padding)
    return MergedModel(model.SerializeToString(), chunks)


def _data(tensor: onnx.TensorProto, files: ExternalFiles) -> Array:
    where = f"tensor '{tensor.name}'"
    dtype, shape = element_type(tensor.data_type, where), check_shape(tensor.dims, where)
    return files.read(tensor, (math.prod(shape) * dtype.bits + 7) // 8, where)


def _set_location(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
