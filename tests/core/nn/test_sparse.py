"""Sparse and ragged tensors: values against dense NumPy formulas, eager and compiled; gradients against differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import lathe
from lathe import Coo, Csr, Ragged, nn
from lathe.core.errors import FeedError
from lathe.core.ir.graph import Array

F = nn.functional
SPLITS = np.array([0, 2, 2, 5, 6])
IDS = np.repeat(np.arange(4), np.diff(SPLITS))


def floats(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def matrix() -> Array:
    dense = floats(4, 6)
    dense[np.random.default_rng(3).random(dense.shape) < 0.6] = 0
    dense[2] = 0
    return dense


def agree(function: Callable[..., Any], types: Mapping[str, str], feeds: Mapping[str, Array], expected: Array) -> None:
    """The function equals `expected`, eagerly and compiled; its gradients equal central differences."""
    np.testing.assert_allclose(function(*map(nn.tensor, feeds.values())).numpy(), expected, rtol=1e-5, atol=1e-6)
    graph = nn.trace(function, types, ["y"])
    np.testing.assert_allclose(lathe.compile(graph).run(feeds)["y"], expected, rtol=1e-5, atol=1e-6)
    weights = np.random.default_rng(9).standard_normal(expected.shape)

    def loss(*given: Any) -> Any:
        return (function(*given) * nn.tensor(weights.astype(np.float32))).sum()

    wanted = [name for name, type_ in types.items() if type_.startswith("float")]
    made = lathe.gradients(nn.trace(loss, types, ["loss"]), of="loss", with_respect_to=wanted)
    found = lathe.interpret(made, feeds)
    for name in wanted:
        slope = found[f"{name}.gradient"]
        for place in np.ndindex(feeds[name].shape):
            ends = []
            for step in (1e-2, -1e-2):
                moved = {key: array.copy() for key, array in feeds.items()}
                moved[name][place] += step
                y = function(*map(nn.tensor, moved.values())).numpy()
                ends.append(float((y.astype(np.float64) * weights).sum()))
            assert abs((ends[0] - ends[1]) / 2e-2 - slope[place]) < 2e-3, (name, place)


@pytest.mark.parametrize("kind", [Coo, Csr])
@pytest.mark.parametrize("side", ["left", "right"])
def test_products_with_dense_matrices(kind: Any, side: str) -> None:
    dense, sparse = matrix(), kind.from_dense(matrix())
    other = floats(6, 3) if side == "left" else floats(3, 4)

    def function(*given: Any) -> Any:
        made = kind(*given[:-1], dense.shape)
        return made @ given[-1] if side == "left" else given[-1] @ made

    types = kind.types("a", "float32", *[4] * (kind is Csr)) | {"b": f"float32[{other.shape[0]},{other.shape[1]}]"}
    expected = dense @ other if side == "left" else other @ dense
    agree(function, types, sparse.feeds("a") | {"b": other}, expected)
    np.testing.assert_array_equal(sparse.to_dense().numpy(), dense)
    np.testing.assert_allclose((floats(3, 4) @ sparse).numpy(), floats(3, 4) @ dense, rtol=1e-5, atol=1e-6)


def test_duplicates_add_up_and_onnx_keeps_the_matrix() -> None:
    twice = Coo(np.array([[1, 2], [0, 1], [1, 2]]), np.array([1, 2, 3], np.float32), (2, 3))
    np.testing.assert_array_equal(twice.to_dense().numpy(), [[0, 2, 0], [0, 0, 4]])
    proto = twice.to_onnx("w")
    assert proto.values.name == "w" and list(proto.dims) == [2, 3]
    np.testing.assert_array_equal(Coo.from_onnx(proto).to_dense().numpy(), twice.to_dense().numpy())


def _softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(0, initial=-np.inf))
    return np.asarray(powers / powers.sum(0))


@pytest.mark.parametrize("name", ["sum", "mean", "softmax"])
def test_reductions_of_sequences(name: str) -> None:
    x = floats(6, 3)
    rows = np.split(x, SPLITS[1:-1])
    formula: dict[str, Callable[[], Array]] = {
        "sum": lambda: np.stack([row.sum(0) for row in rows]),
        "mean": lambda: np.stack([row.sum(0) / max(len(row), 1) for row in rows]),
        "softmax": lambda: np.concatenate([_softmax(row) for row in rows]),
    }

    def function(values: Any, splits: Any) -> Any:
        found = getattr(Ragged(values, splits), name)()
        return found.values if name == "softmax" else found

    ragged = Ragged.from_rows(rows)
    agree(function, Ragged.types("x", "float32", 4, 3), ragged.feeds("x"), formula[name]())
    for made, row in zip(ragged.to_rows(), rows, strict=True):
        np.testing.assert_array_equal(made, row)


def test_the_largest_number_of_segments_in_any_order() -> None:
    x, order = floats(6, 3), np.array([3, 0, 5, 1, 4, 2])
    ids = np.array([0, 0, 1, 1, 2, 2])[order]

    def function(values: Any) -> Any:
        return F.segment_max(values, nn.tensor(ids), 3)

    expected = np.stack([x[ids == segment].max(0) for segment in range(3)])
    agree(function, {"x": "float32[6,3]"}, {"x": x}, expected)
    assert (Ragged(x, SPLITS).max().numpy()[1] == -np.inf).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Coo(np.array([[0, 3]]), np.ones(1, np.float32), (2, 3)), "inside shape"),
        (lambda: Coo(np.array([0, 1]), np.ones(1, np.float32), (2, 3)), r"int64\[nnz, 2\]"),
        (
            lambda: Csr(np.array([0, 1]), np.array([0]), np.ones(1, np.float32), (2, 3)),
            r"row_splits: .*int64\[3\]",
        ),
        (lambda: Ragged(floats(3, 2), np.array([0, 2, 1])), "ascending numbers from 0 to 3"),
        (lambda: Coo.from_dense(floats(3)), "expected a matrix"),
        (lambda: Ragged.from_rows([]), "at least one array"),
    ],
)
def test_wrong_components_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(FeedError, match=message):
        make()
