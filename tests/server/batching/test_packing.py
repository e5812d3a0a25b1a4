"""Requests of different lengths share a batch without padding, and each gets the result of a run alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from lathe.core.compiler.child_stages import main as child
from lathe.server.backends.base import as_packing
from lathe.server.backends.graph import GraphBackend, GraphModel
from lathe.server.batching.entry import Entry, Outcome
from lathe.server.batching.execution import run_packed
from lathe.server.errors import BadRequest
from lathe.server.repository.builder import warm_up
from lathe.server.scheduling.pool import WorkerPool
from lathe.server.serving.servable import Servable, ServableFactory
from lathe.server.settings import Settings
from lathe.server.telemetry.statistics import StatsBook
from lathe.server.types import ModelRef, Tensors
from tests.core.encoders import Encoder
from tests.server.backends.test_graph_backend import dense

ENCODER = Encoder(pools=("mean",))


def load(model: bytes, folder: Path) -> GraphModel:
    (folder / "model.onnx").write_bytes(model)
    assert child(["parse", str(folder / "model.onnx"), str(folder / "ir")]) == 0
    options = ["--threads", "1", "--max-batch", "8", "--packing", "100", "--cache", str(folder / "cache")]
    assert child(["compile", str(folder / "ir"), str(folder / "artifact"), *options]) == 0
    return GraphBackend(folder / "cache").load(folder / "artifact", 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GraphModel]:
    loaded = load(ENCODER.model().SerializeToString(), tmp_path_factory.mktemp("encoder"))
    warm_up(loaded)
    yield loaded
    loaded.close()


async def submit(servable: Servable, inputs: Tensors) -> Outcome:
    future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    servable.submit(Entry(inputs, servable.signature.group_of(inputs), future.set_result))
    return await future


def assert_agree(found: Outcome, inputs: Tensors) -> None:
    assert isinstance(found, dict), found
    oracle = onnxruntime.InferenceSession(ENCODER.model().SerializeToString())
    for output, expected in zip(oracle.get_outputs(), oracle.run(None, inputs), strict=True):
        assert found[output.name].shape == expected.shape
        np.testing.assert_allclose(found[output.name], expected, rtol=1e-4, atol=1e-5)


def test_requests_of_all_lengths_share_batches(model: GraphModel) -> None:
    requests = [ENCODER.feeds(rows, length) for length in (1, 3, 7, 17, 33, 128) for rows in (1, 2)]

    async def scenario() -> None:
        pool = WorkerPool(1)
        servable = ServableFactory(Settings(), pool, StatsBook()).make(ModelRef("m", 1), model)
        for inputs, outcome in zip(
            requests, await asyncio.gather(*(submit(servable, inputs) for inputs in requests)), strict=True
        ):
            assert_agree(outcome, inputs)
        stats = servable.stats
        assert stats.execution_count < len(requests) / 2 and max(stats.batches) == 8
        assert stats.packed_tokens == sum(inputs["ids"].size for inputs in requests)
        await servable.batcher.drained()
        await asyncio.to_thread(pool.close)

    asyncio.run(scenario())


def test_a_request_with_an_error_fails_alone(model: GraphModel) -> None:
    good, bad, uneven = (ENCODER.feeds(1, length) for length in (4, 5, 6))
    bad["ids"] = bad["ids"] * 0 + 1000
    uneven["mask"] = uneven["mask"][:, :3]
    ran = run_packed(model, [good, bad, uneven], [1, 1, 1])
    assert_agree(ran.outcomes[0], good)
    assert [type(outcome) for outcome in ran.outcomes[1:]] == [BadRequest, BadRequest]
    assert ran.executions == 4


def test_a_model_that_cannot_be_packed_says_why_and_is_still_served(tmp_path: Path) -> None:
    model = load(dense(), tmp_path)
    try:
        assert as_packing(model) is None
        assert "expected one dynamic dimension besides the batch" in model.packing_reason
        assert model.execute({"x": np.zeros((2, 4), np.float32)})["y"].shape[0] == 2
    finally:
        model.close()
