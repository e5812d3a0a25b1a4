"""Decoders as ONNX files in the form of ONNX Runtime GenAI, rewritten for a cache in pages.

GroupQueryAttention is the only node of such a graph in which a token reads other tokens. In its place comes the same
over pages, so the graph runs tokens of many sequences together, as sequences of one token each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import onnx
from onnx import TensorProto, helper

from lathe.core.frontends.contrib.group_query import PAGED_DOMAIN
from lathe.core.language.cached_graph import CacheLayout
from lathe.core.language.text_sizes import TextSizes

_ATTENTION, _PRODUCTS = "GroupQueryAttention", ("MatMul", "MatMulNBits")
_ATTRIBUTES = {"num_heads", "kv_num_heads", "scale", "rotary_interleaved", "local_window_size", "do_rotary"}
_NEUTRAL = {"softcap": 0.0, "smooth_softmax": -1, "causal": 1}  # attributes that change nothing with these values
_COUNTS = {"positions": 1, "sequences": 1, "slots": 1, "tables": 2}  # ranks of the inputs of CachedAttention
TOKENS, HIDDEN = "input_ids", "hidden"


class PagedModels(NamedTuple):
    """`step`: tokens int64 [n, 1] to hidden states, with inputs and outputs for the cache. `head`: these to logits."""

    step: onnx.ModelProto
    head: onnx.ModelProto
    hidden: str  # the name of the hidden states in both


def paged_models(model: onnx.ModelProto, sizes: TextSizes, layout: CacheLayout) -> PagedModels | None:
    """The two models of a decoder; None if it has another form.

    Inputs of the cache are `keys.N` and `values.N`, with outputs `next.keys.N` and `next.values.N`. They have the
    shapes of `layout`.
    """
    graph = model.graph
    constants = {tensor.name for tensor in graph.initializer}
    types = {each.name: each.type.tensor_type.elem_type for each in graph.input}
    expected = {name: TensorProto.FLOAT for name in types if name.startswith("past")} | {TOKENS: TensorProto.INT64}
    if any(types.get(name) != type_ for name, type_ in expected.items()):
        return None
    product = next((node for node in graph.node if "logits" in node.output), None)
    if product is None or product.op_type not in _PRODUCTS or not set(product.input[1:]) - {""} <= constants:
        return None
    nodes = []
    for node in graph.node:
        paged = node if node.op_type != _ATTENTION else _paged(node, constants)
        if paged is None:
            return None
        if node is not product:
            nodes.append(paged)
    count = sum(node.domain == PAGED_DOMAIN for node in nodes)
    hidden = product.input[0]
    results = [hidden, *(f"next.{name}" for name in _cache_names(count))]
    kept = _needed(nodes, results)
    read = {name for node in kept for name in node.input}
    if count != sizes.layers or read & ({each.name for each in graph.input} - {TOKENS}):
        return None
    step = _with_graph(model, kept, _inputs(sizes, layout), results)
    head = _with_graph(model, [product], [helper.make_tensor_value_info(hidden, TensorProto.FLOAT, None)], ["logits"])
    return PagedModels(step, head, hidden)


def _paged(node: onnx.NodeProto, constants: set[str]) -> onnx.NodeProto | None:
    """The same attention over pages; None if it has other inputs or attributes than those of `_ATTRIBUTES`."""
    inputs = [*node.input, *[""] * 9][: max(9, len(node.input))]
    attrs = {attr.name: helper.get_attribute_value(attr) for attr in node.attribute}
    others = {name for name, value in attrs.items() if name not in _ATTRIBUTES and value != _NEUTRAL.get(name)}
    angles = inputs[7:9] if attrs.pop("do_rotary", 0) else ["", ""]
    past = inputs[3].removeprefix("past_key_values.").removesuffix(".key")
    known = not any(inputs[9:]) and set(angles) - {""} <= constants and past.isdigit()
    if others or not known or inputs[4] != f"past_key_values.{past}.value" or len(node.output) != 3:
        return None
    caches = [f"keys.{past}", f"values.{past}"]
    return helper.make_node(
        "PagedGroupQueryAttention",
        [*inputs[:3], *caches, *angles, *_COUNTS],
        [node.output[0], *(f"next.{name}" for name in caches)],
        name=node.name,
        domain=PAGED_DOMAIN,
        **{name: value for name, value in attrs.items() if name in _ATTRIBUTES},
    )


def _cache_names(layers: int) -> list[str]:
    return [f"{part}.{layer}" for layer in range(layers) for part in ("keys", "values")]


def _needed(nodes: list[onnx.NodeProto], results: Collection[str]) -> list[onnx.NodeProto]:
    """The nodes that the results need, in their order."""
    wanted, kept = set(results), []
    for node in reversed(nodes):
        if wanted & set(node.output):
            wanted |= set(node.input)
            kept.append(node)
    return kept[::-1]


def _inputs(sizes: TextSizes, layout: CacheLayout) -> list[onnx.ValueInfoProto]:
    info, pages = helper.make_tensor_value_info, layout.table_pages(sizes.context)
    shapes: Mapping[int, list[int | str]] = {1: ["n"], 2: ["n", pages]}
    found = [info(TOKENS, TensorProto.INT64, ["n", 1])]
    found += [info(name, TensorProto.INT64, shapes[rank]) for name, rank in _COUNTS.items()]
    types = layout.types(sizes)
    for name in _cache_names(sizes.layers):
        found.append(info(name, TensorProto.FLOAT, types[name.partition(".")[0]].evaluate({})))
    return found


def _with_graph(
    model: onnx.ModelProto, nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], outputs: list[str]
) -> onnx.ModelProto:
    """The model with another graph, and those of its weights that this graph reads."""
    read = {name for node in nodes for name in node.input}
    made = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    made.opset_import.append(helper.make_opsetid(PAGED_DOMAIN, 1))
    weights = [tensor for tensor in model.graph.initializer if tensor.name in read]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    made.graph.CopyFrom(helper.make_graph(nodes, model.graph.name, inputs, results, weights))
    return made
