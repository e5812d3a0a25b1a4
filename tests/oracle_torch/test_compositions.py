"""PyTorch's gradients of the random programs in tests/core/autodiff.

`python -m tests.oracle_torch.test_compositions` writes them down for the tests that run without PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.core.autodiff import test_compositions as written_down
from tests.core.autodiff.compositions import INPUTS, SHAPE, given, program, run

PROGRAMS = 40

VOCABULARY: dict[str, Callable[[Any, Any], Any]] = {
    "tanh of product": lambda a, b: (a * b).tanh(),
    "sigmoid and sum": lambda a, b: a.sigmoid() + b,
    "sine of matrix product": lambda a, b: (a @ b.T @ a).sin(),
    "softmax of rows": lambda a, b: a.softmax(-1) * b,
    "logsoftmax of columns": lambda a, b: a.log_softmax(0) - b,
    "less its mean": lambda a, b: a - b.mean(1, keepdim=True),
    "turned and divided": lambda a, b: a.reshape(4, 3).T / (b.square() + 1),
    "cut and joined": lambda a, b: torch.cat([a[:2], b[2:]]),
    "gelu": lambda a, b: F.gelu(a) - b * 0.3,
    "chosen": lambda a, b: torch.where(a < b, a * 2, b),
    "bell": lambda a, b: (-a.square()).exp() * b,
    "root": lambda a, b: (a.square() + 1).sqrt() - b.erf(),
    "running sum": lambda a, b: a.cumsum(1).cos() + b,
    "sum of powers": lambda a, b: a.logsumexp(1, keepdim=True) * b,
    "normalized": lambda a, b: F.layer_norm(a, SHAPE[1:]) * b,
    "picked": lambda a, b: a[[2, 0, 2]] * b,
    "padded": lambda a, b: F.pad(a, (0, 0, 1, 0))[:3] * b,
    "convolved": lambda a, b: F.conv1d(a[None], b[:, :3, None]).reshape(SHAPE).tanh(),
}


def gradients(seed: int) -> dict[str, Any]:
    leaves = {name: torch.tensor(array, requires_grad=True) for name, array in given(seed).items()}
    run(program(seed), list(leaves.values()), VOCABULARY).sum().backward()
    zeros = np.zeros(SHAPE)
    return {name: zeros if leaf.grad is None else leaf.grad.numpy() for name, leaf in leaves.items()}


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_what_is_written_down_is_so(seed: int) -> None:
    found = gradients(seed)
    assert len(found) == INPUTS
    for name, expected in written_down.TORCH[seed].items():
        np.testing.assert_allclose(found[name].ravel(), expected, 1e-6, 1e-9)


def write() -> None:
    lines = [
        json.dumps({name: [float(f"{x:.9g}") for x in array.ravel()] for name, array in gradients(seed).items()})
        for seed in range(PROGRAMS)
    ]
    path = Path(written_down.__file__).parent / "torch_gradients.json"
    text = ",\n  ".join(lines)
    path.write_text(f'{{\n "made_by": "torch {torch.__version__}",\n "gradients": [\n  {text}\n ]\n}}\n')


if __name__ == "__main__":
    write()
