"""Constants with many zeros as sparse initializers of ONNX: the numbers that are not zero, and their places (COO)."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from lathe.core.frontends.tensors import MAX_DENSE_BYTES
from lathe.core.ir.graph import Array

_TYPES = frozenset({np.dtype(np.float32), np.dtype(np.float64)})
_FRAME_BYTES = 128  # more than names, shapes and lengths of the two parts add to a file
_PLACE_BYTES = 8  # int64: ONNX permits no other type


def sparse_initializer(array: Array, name: str) -> onnx.SparseTensorProto | None:
    """The array as an initializer with linear places, [NNZ]; None unless that is certainly smaller than a dense one.

    Float32 gains from 67 % zeros on. Negative zeros count as numbers, so no bit of the array changes. None also for
    arrays of zeros alone, and for those that are too large to be read again (`sparse_array`).
    """
    if array.dtype not in _TYPES or array.nbytes > MAX_DENSE_BYTES:
        return None
    flat = np.ascontiguousarray(array).reshape(-1)
    places = np.flatnonzero(flat.view(f"u{flat.itemsize}"))
    if not len(places) or len(places) * (flat.itemsize + _PLACE_BYTES) + _FRAME_BYTES >= flat.nbytes:
        return None
    values = numpy_helper.from_array(flat[places], name)
    return helper.make_sparse_tensor(values, numpy_helper.from_array(places.astype(np.int64)), list(array.shape))
