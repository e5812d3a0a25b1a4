"""Random operators: distributions, seeds, and that no pass takes one draw for another."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import lathe
from lathe.core.errors import FeedError
from lathe.core.passes.pipeline import optimize
from tests.core.one_node import lathe_run

ZEROS = np.zeros((200, 50), np.float32)


def test_normal_and_uniform_numbers() -> None:
    (normal,) = lathe_run("RandomNormalLike", [ZEROS], {"mean": 2.0, "scale": 3.0, "seed": 1.0})
    assert normal.dtype == np.float32
    assert abs(normal.mean() - 2) < 0.1
    assert abs(normal.std() - 3) < 0.1
    (uniform,) = lathe_run("RandomUniform", [], {"shape": [200, 50], "low": -1.0, "high": 3.0, "dtype": 11})
    assert uniform.dtype == np.float64
    assert -1 <= uniform.min() < -0.9
    assert 2.9 < uniform.max() < 3


@pytest.mark.parametrize(
    ("op", "inputs", "attrs"),
    [
        ("RandomNormal", [], {"shape": [8]}),
        ("RandomUniformLike", [ZEROS[0]], {}),
        ("Multinomial", [ZEROS[:4, :3]], {"sample_size": 20}),
    ],
)
def test_a_seed_gives_the_same_numbers_and_none_gives_others(op: str, inputs: list[Any], attrs: dict[str, Any]) -> None:
    seeded = [lathe_run(op, inputs, {**attrs, "seed": 7.0})[0] for _ in range(2)]
    np.testing.assert_array_equal(*seeded)
    free = [lathe_run(op, inputs, attrs)[0] for _ in range(2)]
    assert not np.array_equal(*free)


def test_multinomial_follows_the_probabilities() -> None:
    shares = np.array([[0.1, 0.6, 0.3], [1.0, 0.0, 0.0]])
    with np.errstate(divide="ignore"):
        (drawn,) = lathe_run("Multinomial", [np.log(shares).astype(np.float32)], {"sample_size": 4000, "seed": 3.0})
    assert drawn.dtype == np.int32
    np.testing.assert_allclose(np.bincount(drawn[0], minlength=3) / 4000, shares[0], atol=0.03)
    assert not drawn[1].any()


def test_multinomial_of_an_empty_batch() -> None:
    (drawn,) = lathe_run("Multinomial", [ZEROS[:0, :3]], {"sample_size": 5, "seed": 3.0})
    assert drawn.shape == (0, 5)


def test_dropout_in_training_keeps_the_mean() -> None:
    data = ZEROS + 1
    y, mask = lathe_run("Dropout", [data, np.float32(0.25).reshape(()), np.array(True)], {"seed": 5}, outputs=2)
    assert abs(mask.mean() - 0.75) < 0.02
    np.testing.assert_allclose(y, mask / 0.75, 1e-6)
    with pytest.raises(FeedError, match="ratio is 1"):
        lathe_run("Dropout", [data, np.float32(1).reshape(()), np.array(True)], {})


def test_two_equal_draws_are_not_merged() -> None:
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    agraph (float[64] x) => (float[64] a, float[64] b)
    {
        a = RandomUniformLike(x)
        b = RandomUniformLike(x)
    }
    """
    graph = lathe.load(bytes(onnx.parser.parse_model(text).SerializeToString()))
    a, b = lathe.interpret(optimize(graph)[0], {"x": ZEROS[0].repeat(2)[:64]}).values()
    assert not np.array_equal(a, b)
