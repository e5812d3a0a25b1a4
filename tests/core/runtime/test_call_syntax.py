"""A session called like a function, with one array or with arrays by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lathe
from lathe import nn
from lathe.core.errors import FeedError

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def compiled(forward: Any, *inputs: str, outputs: tuple[str, ...] = ("y",)) -> lathe.Session:
    graph = nn.trace(forward, dict.fromkeys(inputs, "float32[n,3]"), outputs)
    return lathe.compile(graph, threads=1, tune="off")


def test_one_output_is_an_array_and_several_are_a_mapping() -> None:
    with compiled(lambda x: x + x, "x") as session:
        np.testing.assert_array_equal(session(X), session.run({"x": X})["y"])
        np.testing.assert_array_equal(session(x=X), X + X)
    with compiled(lambda self, b: (self + b, self - b), "self", "b", outputs=("sum", "difference")) as session:
        results = session(self=X, b=X)
        assert list(results) == ["sum", "difference"]
        np.testing.assert_array_equal(results["sum"], X + X)


@pytest.mark.parametrize(
    ("arrays", "named", "complaint"),
    [
        ((X, X), {}, "expected one array, got 2 without a name"),
        ((X,), {"x": X}, "expected one array, got 1 without a name and x"),
        (({"x": X},), {}, "expected an array, got a mapping, which `run` takes"),
        ((), {}, "'x'"),
        ((), {"z": X}, "'z'"),
        ((X.astype(np.float64),), {}, "float64"),
    ],
)
def test_an_array_that_does_not_fit_the_input_is_refused(
    arrays: tuple[Any, ...], named: dict[str, Any], complaint: str
) -> None:
    with compiled(lambda x: x + x, "x") as session, pytest.raises(FeedError) as refused:
        session(*arrays, **named)
    assert complaint in str(refused.value)


def test_an_unnamed_array_for_several_inputs_names_them() -> None:
    complaint = r"expected arrays by name: a=\.\.\., b=\.\.\., got 1 without a name"
    with compiled(lambda a, b: a + b, "a", "b") as session, pytest.raises(FeedError, match=complaint):
        session(X)
