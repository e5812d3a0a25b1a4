"""A small decoder with a past: the mean of all tokens' vectors and the last token choose the next token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.parser import parse_model

_TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
decoder (int64[batch, new] input_ids, float[batch, 1, past, 4] past_keys)
    => (float[batch, new, 30] logits, float[batch, 1, all, 4] present) {
  vectors = Gather(table, input_ids)
  one = Constant<value_ints = [1]>()
  keys = Unsqueeze(vectors, one)
  present = Concat<axis = 2>(past_keys, keys)
  mean = ReduceMean<axes = [2], keepdims = 1>(present)
  mixed = Add(keys, mean)
  hidden = Squeeze(mixed, one)
  logits = MatMul(hidden, weights)
}
"""


def write_decoder(path: Path) -> Path:
    model, rng = parse_model(_TEXT), np.random.default_rng(0)
    for name, shape in (("table", (50, 4)), ("weights", (4, 30))):
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    onnx.save(model, str(path))
    return path
