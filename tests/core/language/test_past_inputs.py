"""Decoders with past as ONNX files: inputs and outputs are recognised, and a loop over them decodes."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from onnx import TensorProto, helper

import lathe
from lathe.core.errors import ModelError
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType
from lathe.core.language.past_inputs import find_past_inputs
from tests.core.decoders import DEPTH, HEADS, Decoder
from tests.core.onnx_writer import OnnxWriter

_NAMES = {"ids": "input_ids", "mask": "attention_mask"}


def decoder(rename: Callable[[str], str] = lambda name: name, **settings: int) -> Graph:
    """A small decoder with the names of exporters, then renamed by `rename`."""
    model = Decoder(rotary=True, **settings).model()  # type: ignore[arg-type]

    def new(name: str) -> str:
        return rename(_NAMES.get(name, re.sub(r"^past\.", "past_key_values.", name)))

    for node in model.graph.node:
        node.input[:], node.output[:] = map(new, node.input), map(new, node.output)
    for value in (*model.graph.input, *model.graph.output):
        value.name = new(value.name)
    return lathe.load(model.SerializeToString())


def group_query_decoder() -> Graph:
    """One layer in the form of ONNX Runtime GenAI: two heads of keys for four heads of queries."""
    w = OnnxWriter(0)
    queries = w.op("Gather", w.weight(50, HEADS * DEPTH), "input_ids")
    keys, values = (w.op("Gather", w.weight(50, HEADS // 2 * DEPTH), "input_ids") for _ in range(2))
    last = w.op("Sub", w.op("ReduceSum", "attention_mask", w.ints(1), keepdims=0), w.const(1, np.int64))
    total = w.op("Gather", w.op("Shape", "attention_mask"), w.const(1, np.int64), axis=0)
    counts = [w.op("Cast", each, to=TensorProto.INT32) for each in (last, total)]
    pasts = ["past_key_values.0.key", "past_key_values.0.value"]
    w.nodes.append(
        helper.make_node(
            "GroupQueryAttention",
            [queries, keys, values, *pasts, *counts],
            ["logits", "present.0.key", "present.0.value"],
            domain="com.microsoft",
            num_heads=HEADS,
            kv_num_heads=HEADS // 2,
        )
    )
    info = helper.make_tensor_value_info
    cache = ["batch", HEADS // 2, "past", DEPTH]
    inputs = [info(name, TensorProto.INT64, ["batch", name]) for name in ("input_ids", "attention_mask")]
    inputs += [info(name, TensorProto.FLOAT, cache) for name in pasts]
    outputs = [info(name, TensorProto.FLOAT, None) for name in ("logits", "present.0.key", "present.0.value")]
    graph = helper.make_graph(w.nodes, "decoder", inputs, outputs, w.constants)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return lathe.load(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def test_inputs_and_outputs_are_recognised() -> None:
    found = find_past_inputs(decoder(shared=2, layers=3))
    assert found is not None
    assert (found.layers, found.kv_heads, found.head_size, found.dtype) == (3, HEADS // 2, DEPTH, DType.FLOAT32)
    assert (found.tokens, found.mask, found.positions, found.logits) == ("input_ids", "attention_mask", None, "logits")
    last = found.caches[-1]
    assert (last.layer, last.part, last.input, last.output) == (
        2,
        "value",
        "past_key_values.2.value",
        "present.2.value",
    )


@pytest.mark.parametrize("make", [decoder, group_query_decoder])
def test_a_loop_over_the_caches_gives_the_logits_of_the_whole_text(make: Callable[[], Graph]) -> None:
    graph, ids = make(), np.array([[3, 17, 8, 41, 5], [9, 2, 33, 0, 7]])
    found = find_past_inputs(graph)
    assert found is not None
    whole = lathe.interpret(graph, {"input_ids": ids, "attention_mask": np.ones_like(ids), **found.empty(2)})
    caches, logits = found.empty(2), []
    for at in range(ids.shape[1]):
        mask = np.ones((2, at + 1), np.int64)
        outputs = lathe.interpret(graph, {"input_ids": ids[:, at : at + 1], "attention_mask": mask, **caches})
        logits.append(outputs[found.logits])
        caches = found.following(outputs)
    np.testing.assert_allclose(np.concatenate(logits, 1), whole["logits"], 1e-4, 1e-5)


def test_a_graph_without_past_has_no_description() -> None:
    assert find_past_inputs(decoder(lambda name: name.replace("past_key_values", "before"))) is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("past_key_values.0.value", "past_key_values.7.value", "input 'past_key_values.0.value' is missing"),
        ("present.1.key", "after.1.key", "output 'present.1.key' is missing"),
        (
            "input_ids",
            "tokens",
            "expected inputs input_ids, attention_mask and position_ids, and an output logits, got",
        ),
    ],
)
def test_decoders_that_lack_something(old: str, new: str, message: str) -> None:
    graph = decoder(lambda name: new if name == old else name)
    with pytest.raises(ModelError, match=re.escape(message)):
        find_past_inputs(graph)


def test_unknown_sizes_are_an_error() -> None:
    model = Decoder(names="none").model()
    with pytest.raises(ModelError, match=r"expected \[batch, heads, tokens, size\] with known sizes"):
        find_past_inputs(lathe.load(model.SerializeToString()))
