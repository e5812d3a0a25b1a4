"""Requests of different lengths share a padded batch, and each gets the result of an unpadded run alone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lathe.server.backends.graph import GraphModel
from lathe.server.batching import padding
from lathe.server.batching.entry import Entry, Outcome
from lathe.server.batching.execution import run, run_padded
from lathe.server.batching.padding import PaddingRule, RequestPadding
from lathe.server.batching.signature import Signature
from lathe.server.errors import BadRequest, Internal
from lathe.server.scheduling.pool import WorkerPool
from lathe.server.serving.servable import Servable, ServableFactory
from lathe.server.settings import Settings
from lathe.server.telemetry.statistics import StatsBook
from lathe.server.types import ModelRef, Tensors, TensorSpec
from tests.server.backends.test_graph_backend import load

WIDTH = 6


def attention() -> bytes:
    """hidden [n, s, 6], mask [n, s] int64 -> states [n, s, 6] (masked self-attention), pooled [n, 6]."""
    generator = np.random.default_rng(0)
    weights = {f"w{name}": generator.standard_normal((WIDTH, WIDTH)).astype(np.float32) for name in "qkv"}
    weights |= {"one": np.array(1, np.float32), "big": np.array(-1e9, np.float32)}
    indices = {"rows": np.array([1, 2]), "last": np.array([2]), "places": np.array([1])}
    nodes = [
        *(helper.make_node("MatMul", ["hidden", f"w{name}"], [name]) for name in "qkv"),
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "kt"], ["scores"]),
        helper.make_node("Cast", ["mask"], ["real"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["one", "real"], ["away"]),
        helper.make_node("Mul", ["away", "big"], ["penalty"]),
        helper.make_node("Unsqueeze", ["penalty", "places"], ["bias"]),
        helper.make_node("Add", ["scores", "bias"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["states"]),
        helper.make_node("Unsqueeze", ["real", "last"], ["weight"]),
        helper.make_node("Mul", ["states", "weight"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "places"], ["pooled"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "attention",
        [
            helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["n", "s", WIDTH]),
            helper.make_tensor_value_info("mask", TensorProto.INT64, ["n", "s"]),
        ],
        [
            helper.make_tensor_value_info("states", TensorProto.FLOAT, ["n", "s", WIDTH]),
            helper.make_tensor_value_info("pooled", TensorProto.FLOAT, ["n", WIDTH]),
        ],
        [numpy_helper.from_array(array, name) for name, array in (weights | indices).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model.SerializeToString()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GraphModel]:
    loaded = load(attention(), tmp_path_factory.mktemp("attention"))
    yield loaded
    loaded.close()


def request_of(length: int, rows: int = 1) -> Tensors:
    generator = np.random.default_rng(length)
    hidden = generator.standard_normal((rows, length, WIDTH)).astype(np.float32)
    return {"hidden": hidden, "mask": np.ones((rows, length), np.int64)}


async def submit(servable: Servable, inputs: Tensors) -> Outcome:
    future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    servable.submit(Entry(inputs, servable.signature.group_of(inputs), future.set_result))
    return await future


RULE = PaddingRule("mask", ("hidden",), ("states",), multiple=8, longest=20, value=7.0)


def test_padded_batches_answer_like_unpadded_runs(model: GraphModel, tmp_path: Path) -> None:
    oracle = onnxruntime.InferenceSession(attention())
    sizes = [3, 8, 5, 1, 7, 12, 17, 20, 23]

    async def scenario() -> None:
        pool = WorkerPool(1)
        servable = ServableFactory(Settings(), pool, StatsBook()).make(ModelRef("m", 1), model)
        servable.rules.padding = RULE
        outcomes = await asyncio.gather(*(submit(servable, request_of(size)) for size in sizes))
        for size, outcome in zip(sizes, outcomes, strict=True):
            assert isinstance(outcome, dict), outcome
            assert outcome["states"].shape == (1, size, WIDTH)
            assert outcome["states"].flags.c_contiguous
            expected = oracle.run(["states", "pooled"], request_of(size))
            np.testing.assert_allclose(outcome["states"], expected[0], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(outcome["pooled"], expected[1], rtol=1e-4, atol=1e-5)
        assert max(servable.stats.batches) == 5  # requests of length up to 8 share a batch
        assert servable.stats.work == 5 * 8 + 16 + 20 + 20 + 23  # padding counts as work
        await servable.batcher.drained()
        await asyncio.to_thread(pool.close)

    asyncio.run(scenario())


def test_inputs_of_unequal_lengths_are_refused(model: GraphModel) -> None:
    signature = Signature(model.inputs, model.outputs, model.batchable)
    inputs = request_of(5) | {"mask": np.ones((1, 4), np.int64)}
    with pytest.raises(BadRequest, match=r"expected the same length along axis 1, got {'mask': 4, 'hidden': 5}"):
        RULE.apply(Entry(inputs, signature.group_of(inputs), lambda outcome: None), signature)


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (PaddingRule("gone"), r"expected one of \['hidden', 'mask'\], got 'gone'"),
        (PaddingRule("mask", axis=2), "'mask': expected numbers, of any length along axis 2, it is INT64"),
        (PaddingRule("mask", outputs=("pooled",)), "'pooled': expected numbers, of any length along axis 1"),
        (PaddingRule("mask", ("hidden",), ("states",)), None),
    ],
)
def test_a_rule_that_does_not_fit_the_model_is_reported(
    model: GraphModel, rule: PaddingRule, problem: str | None
) -> None:
    found = rule.mismatch(Signature(model.inputs, model.outputs, model.batchable))
    assert found == problem or re.match(problem or "$^", found or "")


@pytest.mark.parametrize(
    ("datatype", "value", "fits"),
    [
        ("INT64", -100, True),
        ("INT64", 0.5, False),
        ("INT64", np.nan, False),
        ("INT32", np.inf, False),
        ("UINT8", 256, False),
        ("BOOL", 2, False),
        ("BOOL", 1, True),
        ("FP16", 0.5, True),
        ("FP32", -np.inf, True),
    ],
)
def test_a_value_that_an_input_cannot_hold_is_reported(datatype: str, value: float, fits: bool) -> None:
    specs = [TensorSpec("x", datatype, (-1, -1)), TensorSpec("mask", "INT64", (-1, -1))]
    signature = Signature(specs, [TensorSpec("y", "FP32", (-1, 1))], batchable=True)
    problem = PaddingRule("mask", ("x",), value=value).mismatch(signature)
    assert problem == (None if fits else f"'x': {datatype} cannot hold value {value:g}")


def test_requests_of_the_right_length_are_not_copied(model: GraphModel) -> None:
    signature = Signature(model.inputs, model.outputs, model.batchable)
    inputs = request_of(8)
    entry = Entry(inputs, signature.group_of(inputs), lambda outcome: None)
    RULE.apply(entry, signature)
    assert entry.inputs is inputs and entry.padded is None


def test_a_request_is_padded_when_it_runs(model: GraphModel) -> None:
    """Not on the event loop, which large inputs would block."""
    signature = Signature(model.inputs, model.outputs, model.batchable)
    inputs = request_of(5)
    entry = Entry(inputs, signature.group_of(inputs), lambda outcome: None)
    before = entry.nbytes
    RULE.apply(entry, signature)
    assert entry.inputs is inputs and entry.padded is not None
    filled = entry.padded.fill(inputs)
    assert entry.group == signature.group_of(filled)
    assert entry.nbytes - before == sum(filled[name].nbytes - inputs[name].nbytes for name in inputs) > 0


def test_a_padded_request_larger_than_a_batch_is_split(model: GraphModel) -> None:
    rows = 3 * model.max_batch + 1
    oracle = onnxruntime.InferenceSession(attention())

    async def scenario() -> None:
        pool = WorkerPool(1)
        servable = ServableFactory(Settings(), pool, StatsBook()).make(ModelRef("m", 1), model)
        servable.rules.padding = RULE
        outcome = await submit(servable, request_of(5, rows))
        assert isinstance(outcome, dict), outcome
        expected = oracle.run(["states", "pooled"], request_of(5, rows))
        np.testing.assert_allclose(outcome["states"], expected[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(outcome["pooled"], expected[1], rtol=1e-4, atol=1e-5)
        await servable.batcher.drained()
        await asyncio.to_thread(pool.close)

    asyncio.run(scenario())


def test_padding_without_enough_memory_fails_its_batch(model: GraphModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(padding, "_pad_array", no_memory)
    rule = RequestPadding(RULE, 5, 8)
    ran = run_padded(run, [rule, None], model, [request_of(5), request_of(8)], [1, 1])
    assert [type(outcome) for outcome in ran.outcomes] == [Internal, Internal]
