"""Models whose inputs name their leading dimensions differently: requests batch if all inputs have equally many rows.

Any other request runs by itself, as the model's shapes say."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from lathe.core.compiler.child_stages import main as child
from lathe.server.backends.graph import GraphBackend
from lathe.server.repository.builder import warm_up
from tests.core.runtime.test_leading_dimensions import added, feeds
from tests.onnx_runtime import plain_session
from tests.server.batching.test_optional_inputs import Gated
from tests.server.running import Running, serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the compiled model and of the cache for further code."""
    folder = tmp_path_factory.mktemp("added")
    (folder / "model.onnx").write_bytes(added([None, 16], [None, 16]))
    assert child(["parse", str(folder / "model.onnx"), str(folder / "ir")]) == 0
    options = ["--threads", "1", "--max-batch", "8", "--cache", str(folder / "cache"), "--tune", "off"]
    assert child(["compile", str(folder / "ir"), str(folder / "artifact"), *options]) == 0
    return folder


@pytest.fixture(scope="module", params=["direct", "asgi"])
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[Running]:
    model = GraphBackend(folder / "cache").load(folder / "artifact", 1)
    warm_up(model)
    with serving({"added": Gated(model._session)}, request.param) as running:
        yield running


def ask(client: triton.InferenceServerClient, given: dict[str, Any]) -> Any:
    inputs = [
        triton.InferInput(name, list(array.shape), "FP32").set_data_from_numpy(array) for name, array in given.items()
    ]
    return client.infer("added", inputs).as_numpy("y")


def test_both_kinds_of_requests_are_answered(server: Running) -> None:
    theirs = plain_session(added([None, 16], [None, 16]))
    cases = [feeds(*rows) for rows in ((1, 1), (4, 1), (2, 2), (1, 3), (1, 1), (8, 1), (3, 3))] * 3

    def answer(given: dict[str, Any]) -> Any:
        with triton.InferenceServerClient(server.address) as client:
            return ask(client, given)

    with ThreadPoolExecutor(6) as pool:
        for given, got in zip(cases, pool.map(answer, cases), strict=True):
            np.testing.assert_allclose(got, theirs.run(None, given)[0], 1e-5, 1e-6)


def test_the_model_is_batched(server: Running) -> None:
    with triton.InferenceServerClient(server.address) as client:
        assert client.get_model_config("added")["max_batch_size"] == 8
        with pytest.raises(InferenceServerException, match="broadcast"):
            ask(client, feeds(2, 3))
