"""Writes torch_sparse.npz: what PyTorch's sparse and ragged tensors compute, and their gradients.

Run by hand with a Python that has PyTorch, from the project's root: `python -m tests.core.nn.make_torch_sparse`.
Arrays are named CASE/in/NAME, CASE/out and CASE/gradient/NAME. Gradients are those of the sum of the result times
CASE/weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROWS, COLUMNS = 5, 4
INDICES = np.array([[0, 1], [2, 3], [4, 0], [0, 1], [2, 0], [4, 3]])  # (0, 1) occurs twice, rows 1 and 3 are empty
SPLITS, TAKEN = np.array([0, 2, 2, 5, 6]), np.array([2, 0, 2, 1, 3])


def coo(values: Any, indices: Any = INDICES) -> Any:
    return torch.sparse_coo_tensor(torch.tensor(indices.T), values, (ROWS, COLUMNS))


def csr(values: Any) -> Any:
    """Rows 0, 2 and 4 have one, two and two elements."""
    return torch.sparse_csr_tensor(
        torch.tensor([0, 1, 1, 3, 3, 5]), torch.tensor([1, 0, 3, 0, 3]), values, (ROWS, COLUMNS)
    )


def sequences(values: Any) -> list[Any]:
    return list(torch.split(values, np.diff(SPLITS).tolist()))


def reduced(name: str) -> Callable[[Any], Any]:
    return lambda values: torch.segment_reduce(values, name, offsets=torch.tensor(SPLITS), axis=0, unsafe=False)


def softmax(values: Any) -> Any:
    return torch.cat([torch.softmax(each, 0) for each in sequences(values)])


def gathered(values: Any) -> Any:
    parts = sequences(values)
    return torch.cat([parts[each] for each in TAKEN])


def sampled(values: Any, left: Any, right: Any) -> Any:
    return torch.sparse.sampled_addmm(csr(values), left, right, beta=0.5, alpha=2.0).values()


# By name: the function, and the shapes of its arguments.
CASES: dict[str, tuple[Callable[..., Any], dict[str, tuple[int, ...]]]] = {
    "coo to dense": (lambda v: coo(v).to_dense(), {"values": (6,)}),
    "coo mm": (lambda v, d: torch.sparse.mm(coo(v), d), {"values": (6,), "dense": (COLUMNS, 3)}),
    "mm coo": (lambda v, d: torch.sparse.mm(coo(v).t(), d.t()).t(), {"values": (6,), "dense": (3, ROWS)}),
    "coo addmm": (
        lambda v, d, s: torch.sparse.addmm(s, coo(v), d, beta=0.5, alpha=2.0),
        {"values": (6,), "dense": (COLUMNS, 3), "start": (ROWS, 3)},
    ),
    "csr mm": (lambda v, d: csr(v) @ d, {"values": (5,), "dense": (COLUMNS, 3)}),
    "sampled addmm": (sampled, {"values": (5,), "left": (ROWS, 3), "right": (3, COLUMNS)}),
    "ragged sum": (reduced("sum"), {"values": (6, 3)}),
    "ragged mean": (reduced("mean"), {"values": (6, 3)}),
    "ragged max": (reduced("max"), {"values": (6, 3)}),
    "ragged softmax": (softmax, {"values": (6, 3)}),
    "ragged gather": (gathered, {"values": (6, 3)}),
}


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of all cases by name."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    random = np.random.default_rng(7)
    for name, (function, shapes) in CASES.items():
        given = {key: random.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}
        tensors = {key: torch.tensor(each, requires_grad=True) for key, each in given.items()}
        result = function(*tensors.values())
        weights = random.standard_normal(tuple(result.shape)).astype(np.float32)
        found |= {f"{name}/in/{key}": each for key, each in given.items()}
        found |= {f"{name}/out": result.detach().numpy(), f"{name}/weights": weights}
        gradients = torch.autograd.grad(
            (result * torch.tensor(weights)).sum(), list(tensors.values()), allow_unused=True
        )
        pairs = zip(tensors, gradients, strict=True)
        found |= {f"{name}/gradient/{key}": each.to_dense().numpy() for key, each in pairs if each is not None}
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # PyTorch's sparse tensors are in beta
    np.savez_compressed(Path(__file__).parent / "torch_sparse.npz", **arrays())
