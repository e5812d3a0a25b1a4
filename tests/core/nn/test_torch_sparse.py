"""Sparse and ragged tensors against PyTorch's results and gradients (torch_sparse.npz, by make_torch_sparse.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lathe
from lathe import Coo, Csr, Ragged, nn
from lathe.core.errors import FeedError

F = nn.functional
with np.load(Path(__file__).parent / "torch_sparse.npz") as _file:
    TORCH = dict(_file)

SHAPE = (5, 4)
# The matrices and sequences of make_torch_sparse.py.
INDICES = np.array([[0, 1], [2, 3], [4, 0], [0, 1], [2, 0], [4, 3]])
ROW_SPLITS, COLUMN_INDICES = np.array([0, 1, 1, 3, 3, 5]), np.array([1, 0, 3, 0, 3])
SPLITS, TAKEN = np.array([0, 2, 2, 5, 6]), np.array([2, 0, 2, 1, 3])


def coo(values: Any) -> Coo:
    return Coo(INDICES, values, SHAPE)


def csr(values: Any) -> Csr:
    return Csr(ROW_SPLITS, COLUMN_INDICES, values, SHAPE)


def sampled(values: Any, left: Any, right: Any) -> Any:
    return F.sparse_sampled_addmm(csr(values).to_coo(), left, right, beta=0.5, alpha=2.0).values


CASES: dict[str, Callable[..., Any]] = {
    "coo to dense": lambda v: coo(v).to_dense(),
    "coo mm": lambda v, d: F.sparse_mm(coo(v), d),
    "mm coo": lambda v, d: F.sparse_mm(d, coo(v)),
    "coo addmm": lambda v, d, s: F.sparse_addmm(s, coo(v), d, beta=0.5, alpha=2.0),
    "csr mm": lambda v, d: csr(v) @ d,
    "sampled addmm": sampled,
    "ragged sum": lambda v: Ragged(v, SPLITS).sum(),
    "ragged mean": lambda v: Ragged(v, SPLITS).mean(),
    "ragged max": lambda v: Ragged(v, SPLITS).max(),
    "ragged softmax": lambda v: Ragged(v, SPLITS).softmax().values,
    "ragged gather": lambda v: Ragged(v, SPLITS).gather(TAKEN).values,
}


def test_every_result_is_used() -> None:
    assert {name.partition("/")[0] for name in TORCH} == CASES.keys()


def shape_of(array: np.ndarray[Any, Any]) -> str:
    return f"float32[{','.join(map(str, array.shape))}]"


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_pytorch(name: str) -> None:
    start = f"{name}/in/"
    feeds = {key.removeprefix(start): array for key, array in TORCH.items() if key.startswith(start)}
    types = {key: shape_of(array) for key, array in feeds.items()}
    expected = np.nan_to_num(TORCH[f"{name}/out"], neginf=-np.inf)  # PyTorch's mean of no rows is NaN, ours is 0
    made = CASES[name](*map(nn.tensor, feeds.values())).numpy()
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-6)
    compiled = lathe.compile(nn.trace(CASES[name], types, ["y"])).run(feeds)["y"]
    np.testing.assert_allclose(compiled, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_pytorch_and_differences(name: str) -> None:
    start, weights = f"{name}/in/", TORCH[f"{name}/weights"]
    feeds = {key.removeprefix(start): array for key, array in TORCH.items() if key.startswith(start)}
    types = {key: shape_of(array) for key, array in feeds.items()}

    def loss(*given: Any) -> Any:
        # An empty sequence has -inf as its largest number; its weight must not make NaN of it.
        return (CASES[name](*given).clamp(min=-1e6) * nn.tensor(weights)).sum()

    graph = nn.trace(loss, types, ["loss"])
    gradients = lathe.interpret(lathe.gradients(graph, of="loss", with_respect_to=list(types)), feeds)
    direction = {key: np.random.default_rng(3).standard_normal(array.shape) for key, array in feeds.items()}
    slope = 0.0
    for key in types:
        np.testing.assert_allclose(gradients[f"{key}.gradient"], TORCH[f"{name}/gradient/{key}"], rtol=1e-4, atol=1e-5)
        slope += float((gradients[f"{key}.gradient"] * direction[key]).sum())
    ends = []
    for step in (1e-3, -1e-3):
        moved = {key: (array + step * direction[key]).astype(np.float32) for key, array in feeds.items()}
        y = CASES[name](*map(nn.tensor, moved.values())).numpy().astype(np.float64)
        ends.append(float((np.where(np.isfinite(y), y, 0) * weights).sum()))
    assert (ends[0] - ends[1]) / 2e-3 == pytest.approx(slope, rel=2e-2, abs=2e-2)


def test_sequences_are_gathered_by_indices_of_a_run() -> None:
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    rows = np.split(x, SPLITS[1:-1])
    types = Ragged.types("x", "float32", 4, 2) | {"taken": "int64[k]"}

    def function(values: Any, splits: Any, taken: Any) -> Any:
        found = Ragged(values, splits).gather(taken)
        return found.values, found.row_splits

    with lathe.compile(nn.trace(function, types, ["values", "splits"])) as session:
        for taken in ([2, 0, 2, 1], [1], [-1, 3, 0], [1, 1]):
            wanted = [rows[each] for each in taken]
            found = session.run(Ragged(x, SPLITS).feeds("x") | {"taken": np.array(taken)})
            np.testing.assert_array_equal(found["values"], np.concatenate(wanted))
            np.testing.assert_array_equal(found["splits"], np.cumsum([0, *map(len, wanted)]))
    with pytest.raises(FeedError):
        Ragged(x, SPLITS).gather(np.array([4]))


def test_a_product_needs_one_sparse_matrix() -> None:
    dense = np.ones((4, 4), np.float32)
    with pytest.raises(FeedError, match="expected a Coo or Csr and a dense matrix, got ndarray and ndarray"):
        F.sparse_mm(dense, dense)
    with pytest.raises(FeedError, match="got Coo and Coo"):
        F.sparse_mm(coo(np.ones(6, np.float32)), coo(np.ones(6, np.float32)))
