"""MapSelected in native code: only the rows that a mask selects are computed, in blocks and on several threads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

import lathe
from lathe.core.compiler.compile import compile_to
from lathe.core.compiler.options import make_options
from lathe.core.kernels.control.selected_spec import BLOCK
from tests.core.expert_models import ExpertModel
from tests.core.onnx_writer import OnnxWriter
from tests.onnx_runtime import plain_session

WIDTH, INNER = 24, 40


def tokens(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(shape).standard_normal((*shape, WIDTH)).astype(np.float32)


@pytest.mark.sample(3)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("experts", "chosen", "adds"), [(5, 2, True), (9, 4, True), (4, 1, False)])
def test_experts_agree_with_onnx_runtime(experts: int, chosen: int, adds: bool, threads: int) -> None:
    data = ExpertModel(experts, chosen, WIDTH, INNER, adds).model()
    oracle = plain_session(data)
    with lathe.compile(lathe.load(data), threads=threads, tune="off", new_shapes="wait") as session:
        assert session.description.batching.batchable, session.description.batching.reason
        for sizes in ((1, 1), (1, 3), (2, 16), (3, 50), (2, 5 * BLOCK)):
            x = tokens(*sizes)
            np.testing.assert_allclose(session.run({"x": x})["y"], oracle.run(None, {"x": x})[0], 1e-4, 1e-5)
        explained = session.explain()
        assert explained.count("native map of selected rows") == experts
        assert "FALLBACK" not in explained and "0 on the reference" in explained


def test_all_tokens_choose_one_expert() -> None:
    """One expert has more than a block of rows, and the others have none."""
    data = ExpertModel(4, 1, WIDTH, INNER).model()
    x = np.broadcast_to(tokens(1, 1), (1, 3 * BLOCK + 5, WIDTH)).copy()
    with lathe.compile(lathe.load(data), threads=2, tune="off") as session:
        got = session.run({"x": x})["y"]
    np.testing.assert_allclose(got, plain_session(data).run(None, {"x": x})[0], 1e-4, 1e-5)


class ChoosingModel(OnnxWriter):
    """Each row of x [n, width] is multiplied by the matrix of the class with its greatest score (scores [n, classes]).

    The number of the class passes through the type `by`.
    """

    def __init__(self, classes: int, width: int, by: int = TensorProto.INT64) -> None:
        super().__init__(0)
        index = self.op("Cast", self.op("ArgMax", "scores", axis=1, keepdims=0), to=by)
        matrices = self.op("Gather", self.weight(classes, width, width), self.op("Cast", index, to=TensorProto.INT64))
        self.op("MatMul", self.op("Unsqueeze", "x", self.ints(1)), matrices, name="y")
        self.inputs = {"x": (TensorProto.FLOAT, ("n", width)), "scores": (TensorProto.FLOAT, ("n", classes))}

    def model(self) -> bytes:
        inputs = [helper.make_tensor_value_info(name, *type_) for name, type_ in self.inputs.items()]
        y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
        graph = helper.make_graph(self.nodes, "choosing", inputs, [y], self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
        return bytes(model.SerializeToString())


@pytest.mark.parametrize(
    ("classes", "width", "by", "maps"),
    [
        (130, 36, TensorProto.INT64, 130),
        (130, 36, TensorProto.UINT8, 130),
        (130, 36, TensorProto.INT8, 0),  # classes 128 and 129 become -128 and -127, which count from the end
        (64, 4, TensorProto.INT64, 0),  # to copy 16 numbers takes less time than to read 64 masks
    ],
)
@pytest.mark.sample(4)
def test_gathered_weights(classes: int, width: int, by: int, maps: int) -> None:
    data = ChoosingModel(classes, width, by).model()
    rng = np.random.default_rng(classes)
    scores = rng.standard_normal((400, classes)).astype(np.float32)
    x = rng.standard_normal((400, width)).astype(np.float32)
    with lathe.compile(lathe.load(data), threads=1, tune="off") as session:
        got = session.run({"x": x, "scores": scores})["y"]
        assert session.explain().count("native map of selected rows") == maps
    expected = plain_session(data).run(None, {"x": x, "scores": scores})[0]
    np.testing.assert_allclose(got, expected, 1e-4, 1e-5)


class LanguageModel(OnnxWriter):
    """The sequences x [n, length, width] of each language, a number in `languages` [n], have weights of their own."""

    def __init__(self, languages: int, length: int, width: int) -> None:
        super().__init__(0)
        x = written = self.op("Tanh", "x")
        for number in range(languages):
            mask = self.op("Equal", "languages", self.const(number, "int64"))
            index = self.op("Transpose", self.op("NonZero", mask), perm=[1, 0])
            hidden = self.op("Relu", self.op("MatMul", self.op("GatherND", x, index), self.weight(width, 2 * width)))
            made = self.op("MatMul", hidden, self.weight(2 * width, width))
            written = self.op("ScatterND", written, index, made)
        self.result, self.shape = written, (length, width)

    def model(self) -> bytes:
        info = helper.make_tensor_value_info
        y = self.op("Identity", self.result, name="y")
        inputs = [info("x", TensorProto.FLOAT, ["n", *self.shape]), info("languages", TensorProto.INT64, ["n"])]
        graph = helper.make_graph(self.nodes, "languages", inputs, [info(y, TensorProto.FLOAT, None)], self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
        return bytes(model.SerializeToString())


@pytest.mark.parametrize("length", [1, 100, 300])
def test_blocks_of_long_rows_have_fewer_rows(length: int) -> None:
    """A block has 256 rows of a product, not 256 sequences, whose scratch memory would be 2 GB per thread and more."""
    data = LanguageModel(3, length, WIDTH).model()
    x, languages = tokens(9, length), np.arange(9) % 4
    with lathe.compile(lathe.load(data), threads=2, tune="off") as session:
        got = session.run({"x": x, "languages": languages})["y"]
        assert session.explain().count("native map of selected rows") == 3
        memory = session.memory
    assert memory is not None and memory.peak < 2 * 5 * (BLOCK + length) * 4 * WIDTH + (1 << 16)
    expected = plain_session(data).run(None, {"x": x, "languages": languages})[0]
    np.testing.assert_allclose(got, expected, 1e-4, 1e-5)


def test_a_batch_without_rows_gives_no_rows() -> None:
    data = ExpertModel(4, 2, WIDTH, INNER).model()
    with lathe.compile(lathe.load(data), threads=1, tune="off") as session:
        session.run({"x": tokens(1, 4)})
        assert session.run({"x": tokens(0, 4)})["y"].shape == (0, 4, WIDTH)


def test_nan_in_rows_that_no_expert_selects_has_no_effect_on_others() -> None:
    """A token with NaN makes its own row NaN at most; all other rows stay as they are."""
    data = ExpertModel(4, 2, WIDTH, INNER).model()
    x = tokens(1, 40)
    with lathe.compile(lathe.load(data), threads=1, tune="off") as session:
        before = session.run({"x": x})["y"].copy()
        x[0, 7] = np.nan
        after = session.run({"x": x})["y"]
    others = [row for row in range(40) if row != 7]
    np.testing.assert_allclose(after[0, others], before[0, others], 1e-5, 1e-6)


def test_artifacts_hold_the_kernel(tmp_path: Path) -> None:
    data, x = ExpertModel(6, 2, WIDTH, INNER).model(), tokens(2, 9)
    path = tmp_path / "experts.lathe"
    compile_to(path, lathe.load(data), make_options(cache_dir=tmp_path, tune="off"))
    with lathe.load_compiled(path, cache_dir=tmp_path) as session:
        got = session.run({"x": x})["y"]
    np.testing.assert_allclose(got, plain_session(data).run(None, {"x": x})[0], 1e-4, 1e-5)


def test_tokens_of_several_sequences_share_a_run() -> None:
    """In a packed run an expert computes the tokens of several sequences together."""
    data = ExpertModel(4, 2, WIDTH, INNER).model()
    oracle = plain_session(data)
    given = [{"x": tokens(1, length)} for length in (3, 17, 1, 40)]
    with lathe.compile(lathe.load(data), threads=1, tune="off", packing=64) as session:
        assert session.packing is not None and session.packing.packable, session.packing
        for feeds, outputs in zip(given, session.run_packed(given), strict=True):
            np.testing.assert_allclose(outputs["y"], oracle.run(None, feeds)[0], 1e-4, 1e-5)
