"""Sequences and optionals against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import lathe
from lathe.core.errors import FeedError, ModelError
from lathe.core.frontends.export import export
from lathe.core.ir.text import parse_graph, print_graph
from tests.core.ops.small_models import agree, model, same

N = helper.make_node
A, B, C = np.float32([1, 2, 3]), np.float32([4, 5]), np.float32([6, 7, 8])


def at(index: int) -> Any:
    return np.array(index, np.int64)


@pytest.mark.parametrize("index", [0, 2, -1, -3])
def test_an_element_by_its_position(index: int) -> None:
    nodes = [N("SequenceConstruct", ["a", "b", "c"], ["s"]), N("SequenceAt", ["s", "i"], ["y"])]
    agree(nodes, {"a": A, "b": B, "c": C, "i": at(index)}, "y")


@pytest.mark.parametrize("index", [0, 2, -1, 3, None])
def test_insert_erase_and_length(index: int | None) -> None:
    place = [] if index is None else ["i"]
    nodes = [
        N("SequenceInsert", ["s", "b", *place], ["more"]),
        N("SequenceErase", ["more", *place], ["less"]),
        N("SequenceLength", ["more"], ["n"]),
    ]
    feeds = {"s": [A, B, C], "b": np.float32([9])} | ({} if index is None else {"i": at(index)})
    agree(nodes, feeds, "more", "less", "n")


def test_an_empty_sequence_takes_elements_of_its_type() -> None:
    nodes = [N("SequenceEmpty", [], ["e"], dtype=TensorProto.INT64), N("SequenceInsert", ["e", "x"], ["y"])]
    agree(nodes, {"x": np.int64([[1, 2]])}, "y")


@pytest.mark.parametrize("attrs", [{}, {"keepdims": 0}, {"axis": 1}, {"axis": -1, "keepdims": 0}])
def test_split_into_single_slices(attrs: dict[str, int]) -> None:
    agree([N("SplitToSequence", ["x"], ["y"], **attrs)], {"x": np.arange(12, dtype=np.float32).reshape(3, 4)}, "y")


@pytest.mark.parametrize("split", [at(2), at(3), at(9), np.int64([1, 3]), np.int64([2, 2]), np.int64([4])])
def test_split_into_parts_and_join_them(split: Any) -> None:
    nodes = [
        N("SplitToSequence", ["x", "k"], ["s"], axis=1),
        N("ConcatFromSequence", ["s"], ["y"], axis=1),
    ]
    agree(nodes, {"x": np.arange(12, dtype=np.float32).reshape(3, 4), "k": split}, "s", "y")


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_stack_a_sequence(axis: int) -> None:
    agree([N("ConcatFromSequence", ["s"], ["y"], axis=axis, new_axis=1)], {"s": [A, C]}, "y")


def test_a_sequence_copies_elements_that_later_steps_overwrite() -> None:
    """The elements are in memory that later compiled steps reuse."""
    chain = [N("Exp" if i % 2 else "Tanh", [f"h{i}"], [f"h{i + 1}"]) for i in range(4)]
    nodes = [
        N("Sin", ["x"], ["h0"]),
        N("SequenceConstruct", ["h0"], ["s"]),
        N("ConcatFromSequence", ["s"], ["first"], axis=0),
        *chain,
        N("SequenceInsert", ["s", "h4"], ["y"]),
    ]
    agree(nodes, {"x": np.linspace(-2, 2, 64, dtype=np.float32)}, "y", "first")


def map_model(feeds: dict[str, Any]) -> bytes:
    """y[i] = s[i] * k + t[i]"""
    body = helper.make_graph(
        [N("Mul", ["a", "k_in"], ["h"]), N("Add", ["h", "b"], ["out"]), N("Shape", ["a"], ["extent"])],
        "body",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("a", "k_in", "b")],
        [onnx.ValueInfoProto(name="out"), onnx.ValueInfoProto(name="extent")],
    )
    return model([N("SequenceMap", ["s", "k", "t"], ["y", "shapes"], body=body)], feeds, ["y", "shapes"])


def test_sequence_map_goes_through_sequences_together() -> None:
    feeds = {"s": [A, B], "k": np.float32(2), "t": [10 * A, 10 * B]}
    data = map_model(feeds)
    for result in (lathe.interpret(lathe.load(data), feeds), lathe.compile(data, threads=1).run(feeds)):
        same(result["y"], [12 * A, 12 * B])
        same(result["shapes"], [np.int64([3]), np.int64([2])])


def test_sequence_map_needs_equally_many() -> None:
    data = map_model({"s": [A], "k": np.float32(2), "t": [A]})
    with pytest.raises(FeedError, match=r"sequences have \[1, 2\] elements"):
        lathe.interpret(lathe.load(data), {"s": [A, B], "k": np.float32(2), "t": [A]})


@pytest.mark.parametrize(("feed", "present"), [(A, True), (None, False)], ids=["present", "absent"])
def test_an_optional_input(feed: Any, present: bool) -> None:
    type_ = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [3]))
    graph = helper.make_graph(
        [N("OptionalHasElement", ["x"], ["y"])],
        "g",
        [onnx.ValueInfoProto(name="x", type=type_)],
        [onnx.ValueInfoProto(name="y")],
    )
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString()
    for result in (lathe.interpret(lathe.load(data), {"x": feed}), lathe.compile(data).run({"x": feed})):
        assert result["y"] == np.array(present)


def optional_model() -> bytes:
    empty = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [2, 3]))
    nodes = [
        N("SequenceConstruct", ["x"], ["s"]),
        N("Optional", ["s"], ["o"]),
        N("OptionalGetElement", ["o"], ["t"]),
        N("SequenceAt", ["t", "i"], ["y"]),
        N("Optional", [], ["e"], type=empty),
        N("OptionalHasElement", ["e"], ["z"]),
    ]
    return model(nodes, {"x": A, "i": at(0)}, ["y", "z"])


def test_optionals_inside_a_graph() -> None:
    data = optional_model()
    for result in (
        lathe.interpret(lathe.load(data), {"x": A, "i": at(0)}),
        lathe.compile(data).run({"x": A, "i": at(0)}),
    ):
        same(result["y"], A)
        same(result["z"], np.array(False))


def test_types_of_sequences_survive_text_and_export() -> None:
    graph = lathe.load(optional_model())
    assert str(parse_graph(print_graph(graph))) == str(graph)
    assert str(lathe.load(export(graph))) == str(graph)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([N("SequenceAt", ["x", "i"], ["y"])], "expected a sequence"),
        ([N("SequenceConstruct", ["x", "i"], ["y"])], "float32.* on one path and int64"),
        ([N("SequenceConstruct", ["x"], ["s"]), N("SequenceAt", ["s", "x"], ["y"])], "expected int32 or int64"),
        ([N("Optional", [], ["y"])], "neither an input nor the attribute"),
    ],
)
def test_invalid_sequences_are_refused_at_load(nodes: list[onnx.NodeProto], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        lathe.load(model(nodes, {"x": A, "i": at(0)}, ["y"]))


@pytest.mark.parametrize("index", [3, -4])
def test_a_position_outside_is_refused(index: int) -> None:
    data = model([N("SequenceAt", ["s", "i"], ["y"])], {"s": [A, B, C], "i": at(index)}, ["y"])
    with pytest.raises(FeedError, match=f"position is {index}, expected -3 to 2"):
        lathe.interpret(lathe.load(data), {"s": [A, B, C], "i": at(index)})
