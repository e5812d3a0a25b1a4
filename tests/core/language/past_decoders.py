"""Small decoders with past as ONNX files: in the exporters' form, and in that of ONNX Runtime GenAI."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from onnx import ModelProto, TensorProto, helper

from tests.core.decoders import HEADS, Decoder
from tests.core.onnx_writer import OnnxWriter

GENAI_SIZE = 16  # of a head in `group_query_decoder`: ONNX Runtime rotates heads of a multiple of 16 elements only
_NAMES = {"ids": "input_ids", "mask": "attention_mask"}


def exported_decoder(rename: Callable[[str], str] = lambda name: name, **settings: int) -> ModelProto:
    """A decoder with the names of exporters, then renamed by `rename`."""
    model = Decoder(rotary=True, **settings).model()  # type: ignore[arg-type]

    def new(name: str) -> str:
        return rename(_NAMES.get(name, re.sub(r"^past\.", "past_key_values.", name)))

    for node in model.graph.node:
        node.input[:], node.output[:] = map(new, node.input), map(new, node.output)
    for value in (*model.graph.input, *model.graph.output):
        value.name = new(value.name)
    return model


def group_query_decoder(**attributes: float) -> ModelProto:
    """One layer in the form of ONNX Runtime GenAI: two heads of keys for four heads of queries.

    As in its files, the past inputs have a name for the size of a head, which the outputs have. `attributes` are those
    of attention; with `do_rotary` queries and keys are rotated.
    """
    w = OnnxWriter(0)
    queries = w.op("Gather", w.weight(50, HEADS * GENAI_SIZE), "input_ids")
    keys, values = (w.op("Gather", w.weight(50, HEADS // 2 * GENAI_SIZE), "input_ids") for _ in range(2))
    last = w.op("Sub", w.op("ReduceSum", "attention_mask", w.ints(1), keepdims=0), w.const(1, np.int64))
    total = w.op("Gather", w.op("Shape", "attention_mask"), w.const(1, np.int64), axis=0)
    counts = [w.op("Cast", each, to=TensorProto.INT32) for each in (last, total)]
    turns = np.outer(np.arange(64), 50.0 ** -np.arange(0, 1, 2 / GENAI_SIZE))
    angles = [w.const(f(turns).astype(np.float32)) for f in (np.cos, np.sin)] if attributes.get("do_rotary") else []
    pasts = ["past_key_values.0.key", "past_key_values.0.value"]
    w.nodes.append(
        helper.make_node(
            "GroupQueryAttention",
            [queries, keys, values, *pasts, *counts, *angles],
            ["seen", "present.0.key", "present.0.value"],
            domain="com.microsoft",
            num_heads=HEADS,
            kv_num_heads=HEADS // 2,
            **attributes,
        )
    )
    w.op("MatMul", "seen", w.weight(HEADS * GENAI_SIZE, 50), name="logits")
    info = helper.make_tensor_value_info
    cache = ["batch", HEADS // 2, "past", "kv_cache_dim"]
    inputs = [info(name, TensorProto.INT64, ["batch", name]) for name in ("input_ids", "attention_mask")]
    inputs += [info(name, TensorProto.FLOAT, cache) for name in pasts]
    outputs = [info(name, TensorProto.FLOAT, None) for name in ("logits", "present.0.key", "present.0.value")]
    graph = helper.make_graph(w.nodes, "decoder", inputs, outputs, w.constants)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)
