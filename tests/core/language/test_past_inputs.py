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
from tests.core.decoders import DEPTH, HEADS
from tests.core.language.past_decoders import GENAI_SIZE, exported_decoder, group_query_decoder


def decoder(rename: Callable[[str], str] = lambda name: name, **settings: int) -> Graph:
    return lathe.load(exported_decoder(rename, **settings).SerializeToString())


def group_query() -> Graph:
    return lathe.load(group_query_decoder().SerializeToString())


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


@pytest.mark.parametrize("make", [decoder, group_query])
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


def test_sizes_that_only_the_outputs_have() -> None:
    """As in files of ONNX Runtime GenAI, whose past inputs have a name for the size of a head."""
    graph = group_query()
    assert str(graph.inputs[2].type) == "float32[batch,2,past,kv_cache_dim]"
    found = find_past_inputs(graph)
    assert found is not None
    assert (found.kv_heads, found.head_size) == (HEADS // 2, GENAI_SIZE)


def test_unknown_sizes_are_an_error() -> None:
    info, free = helper.make_tensor_value_info, [None] * 4
    names = [f"0.{part}" for part in ("key", "value")]
    nodes = [helper.make_node("Identity", [f"past_key_values.{name}"], [f"present.{name}"]) for name in names]
    inputs = [info(f"past_key_values.{name}", TensorProto.FLOAT, free) for name in names]
    outputs = [info(f"present.{name}", TensorProto.FLOAT, free) for name in names]
    model = helper.make_model(helper.make_graph(nodes, "decoder", inputs, outputs), ir_version=8)
    with pytest.raises(ModelError, match=r"expected \[batch, heads, tokens, size\] with known sizes"):
        find_past_inputs(lathe.load(model.SerializeToString()))
