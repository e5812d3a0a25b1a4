"""The models of microsecond runs agree with ONNX Runtime, and all their nodes have kernels."""

from __future__ import annotations

import pytest

import lathe
from tests.exporters.agreement import agrees
from tests.exporters.make_small import BATCHES, GRAPHS, Feeds, feeds_of, graphs, token
from tests.onnx_runtime import plain_session

MODELS = dict(graphs())


def check(model: bytes, feeds: Feeds) -> None:
    agrees(model, feeds, plain_session(model).run(None, dict(feeds)))


@pytest.mark.parametrize("name", GRAPHS)
def test_single_operators(name: str) -> None:
    model = MODELS[f"op_{name}"]
    for batch in BATCHES:
        if (feeds := feeds_of(model, batch)) is not None:
            check(model, feeds)


def test_a_token_after_others() -> None:
    model, feeds = token()
    check(model, feeds)
    with lathe.compile(model, threads=1, tune="off") as session:
        assert " 0 on the reference" in session.explain()
