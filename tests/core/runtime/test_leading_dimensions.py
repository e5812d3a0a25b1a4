"""Inputs whose leading dimensions have different names or none: one batch if they are equal.

Otherwise the model's own semantics apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import lathe
from lathe.core.compiler.compile import compile_to
from lathe.core.compiler.options import make_options
from lathe.core.errors import FeedError, SessionClosed
from lathe.core.ir.graph import attr_symbols
from lathe.core.passes.pipeline import Options, required_passes, run_passes
from tests.core import small_models
from tests.core.passes.test_assumptions import DECODER, GATHERS, NUMBERS, TWO_KINDS, graph
from tests.onnx_runtime import plain_session
from tests.random_numbers import RNG


def model(nodes: Sequence[onnx.NodeProto], *shapes: Sequence[Any], outputs: Sequence[str] = ("y",)) -> bytes:
    """Inputs a, b, ... of these shapes."""
    inputs = [
        helper.make_tensor_value_info("abc"[index], TensorProto.FLOAT, shape) for index, shape in enumerate(shapes)
    ]
    declared = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "model", inputs, declared)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return made.SerializeToString()


def added(*shapes: Sequence[Any]) -> bytes:
    return model(
        [helper.make_node("Add", ["a", "b"], ["s"]), helper.make_node("Relu", ["s"], ["y"])], *shapes
    )  # fmt: skip


def feeds(*rows: int, width: int = 16) -> dict[str, Any]:
    return {"abc"[i]: RNG.normal(size=(n, width)).astype(np.float32) for i, n in enumerate(rows)}


def check(session: lathe.Session, data: bytes, given: dict[str, Any]) -> None:
    theirs = plain_session(data)
    names = [output.name for output in theirs.get_outputs()]
    for name, expected in zip(names, theirs.run(None, given), strict=True):
        np.testing.assert_allclose(session.run(given)[name], expected, 1e-5, 1e-6)


@pytest.mark.parametrize(
    "shapes",
    [([None, 16], [None, 16]), (["unk__6", 16], ["unk__7", 16]), (["n", "w"], ["k", "w"]), (["n", 16], ["n", 16])],
    ids=["no names", "names of their own", "another dimension", "one name"],
)
def test_equal_leading_dimensions_are_one_batch(shapes: Sequence[Sequence[Any]]) -> None:
    data = added(*shapes)
    with lathe.compile(data, threads=1, tune="off", new_shapes="wait") as session:
        assert session.batching.batchable, session.batching.reason
        for rows in (1, 3, 8):
            check(session, data, feeds(rows, rows))


@pytest.mark.parametrize("kept", [True, False], ids=["from an artifact", "in memory"])
def test_unequal_leading_dimensions_run_by_the_models_semantics(kept: bool, tmp_path: Path) -> None:
    data = added([None, 16], [None, 16])
    if kept:
        (tmp_path / "model.onnx").write_bytes(data)
        compile_to(tmp_path / "model.lathe", lathe.load(data), make_options(tune="off"))
        session = lathe.load_compiled(tmp_path / "model.lathe")
    else:
        session = lathe.compile(lathe.load(data), tune="off")
    with session:
        for rows in ((4, 1), (1, 4), (3, 3), (1, 5)):  # one row is repeated
            check(session, data, feeds(*rows))
        assert "as the model declares them" in session.explain()
        with pytest.raises(FeedError, match="broadcast"):
            session.run(feeds(2, 3))
        assert session.settle(10)
    with pytest.raises(SessionClosed):
        session.run(feeds(4, 1))


def test_independent_towers_may_have_different_batches() -> None:
    data = model(
        [helper.make_node("Relu", ["a"], ["y"]), helper.make_node("Neg", ["b"], ["z"])],
        ["n", 16], ["k", 16], outputs=("y", "z"),
    )  # fmt: skip
    with lathe.compile(data, tune="off") as session:
        assert session.batching.batchable
        check(session, data, feeds(3, 3))
        check(session, data, feeds(2, 5))
        session.profile(feeds(2, 5), runs=1)


def test_inputs_whose_rows_meet_are_not_batched() -> None:
    """Every row of one input meets every row of the other, so equal numbers of rows are no batch."""
    nodes = [helper.make_node("Transpose", ["b"], ["t"]), helper.make_node("MatMul", ["a", "t"], ["y"])]
    data = model(nodes, ["n", 16], ["k", 16])
    with lathe.compile(data, tune="off", new_shapes="wait") as session:
        assert not session.batching.batchable
        assert "n" in str(session.inputs["a"])
        assert "k" in str(session.inputs["b"])
        check(session, data, feeds(2, 3))


def test_missing_inputs_are_named() -> None:
    with lathe.compile(added([None, 16], [None, 16]), tune="off") as session:
        with pytest.raises(FeedError, match="'b' is missing"):
            session.run({"a": np.zeros((2, 16), np.float32)})
        with pytest.raises(FeedError, match="shape"):
            session.run({"a": np.zeros((2, 16), np.float32), "b": np.zeros((2, 15), np.float32)})


def test_a_mask_that_is_longer_than_its_tokens() -> None:
    """Exported decoders declare a separate length of the mask.

    If it equals past and new tokens, requests form a batch; of a longer mask only the first elements count.
    """
    declared = graph(DECODER.format(numbers=NUMBERS, gather=GATHERS["torchscript"]))
    with lathe.compile(declared, tune="off", new_shapes="wait") as session:
        assert session.batching.batchable
        for batch, new, past, total in ((3, 2, 4, 6), (1, 1, 4, 9), (1, 3, 0, 3), (1, 2, 4, 8), (2, 1, 5, 6)):
            given = {
                "ids": RNG.integers(0, 9, (batch, new)),
                "past": RNG.normal(size=(batch, past, 4)).astype(np.float32),
                "mask": RNG.random((batch, total)) < 0.5,
            }
            assert session.fits({name: array.shape for name, array in given.items()}) == (total == new + past)
            (expected,) = lathe.interpret(declared, given).values()
            np.testing.assert_allclose(session.run(given)["y"], expected, 1e-6)


def test_masks_of_texts_beside_images() -> None:
    """Requests do not share a run, but each mask has a row for each row of ids, so no node needs the reference."""
    declared = graph(TWO_KINDS.format(numbers=NUMBERS, seen=GATHERS["dynamo"], mask="bool[masks,m]"))
    with lathe.compile(declared, threads=1, tune="off", new_shapes="wait") as session:
        assert not session.batching.batchable
        for texts, masks, images in ((3, 3, 2), (1, 1, 4), (2, 3, 5)):  # masks without a text are not read
            given = {
                "ids": RNG.integers(0, 9, (texts, 4)),
                "mask": RNG.random((masks, 4)) < 0.5,
                "images": RNG.normal(size=(images, 4)).astype(np.float32),
            }
            (expected,) = lathe.interpret(declared, given).values()
            np.testing.assert_allclose(session.run(given)["y"], expected, 1e-5, 1e-5)
            assert "FALLBACK" not in session.explain() or texts < masks


def test_symbols_in_attributes_are_those_of_the_declared_inputs() -> None:
    """After a pass, the shape that an Expand had computed from its input is an attribute with the input's symbol."""
    body = (
        "rows = Shape<start = 0, end = 1>(b) shape = Concat<axis = 0>(rows, width)"
        " ones = Expand(one, shape) y = Concat<axis = 1>(ones, b)"
    )
    constants = "float[1,1] one = {1}, int64[1] width = {1}"
    written = lathe.load(small_models.model("float[n,s] a, float[k,4] b => float[k,5] y", body, constants))
    simple, _ = run_passes(written, required_passes(Options()))
    assert any(node.op == "Expand" and attr_symbols(node) for node in simple.nodes)
    with lathe.compile(simple, threads=1, tune="off") as session:
        for left, right in ((1, 2), (2, 1), (3, 3), (2, 4)):
            feeds = {"a": RNG.random((left, 7), np.float32), "b": RNG.random((right, 4), np.float32)}
            (expected,) = lathe.interpret(written, feeds).values()
            np.testing.assert_array_equal(session.run(feeds)["y"], expected)
