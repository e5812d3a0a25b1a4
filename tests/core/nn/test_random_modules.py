"""Random models, eager, compiled and trained, agree with the references; `python -m` checks more seeds."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import lathe
from lathe import nn
from lathe.core.train import step
from lathe.core.train.training_step import losses, optimizers
from tests.core.nn.random_modules import CLASSES, model
from tests.core.train.test_step import reference

RATE = 0.1


def close(found: Any, expected: Any, what: str, noise: float = 1e-6) -> None:
    """Within a few thousandths of the largest element, since reductions add up in another order, and `noise`."""
    scale = float(np.abs(expected).max(initial=0))
    np.testing.assert_allclose(found, expected, 2e-3, 2e-3 * scale + noise, err_msg=what)


def check(seed: int) -> None:
    module, row = model(seed)
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(2, 20))
    feeds = {"x": rng.normal(0, 1, (rows, *row)).astype(np.float32), "target": rng.integers(0, CLASSES, rows)}
    graph = nn.trace(module, {"x": f"float32[n,{','.join(map(str, row))}]"}, ["logits"])
    eager = module.eval()(feeds["x"]).numpy()
    close(lathe.compile(graph, threads=1).run({"x": feeds["x"]})["logits"], eager, "logits")
    optimizer = optimizers.SGD(RATE)
    learner = step(graph, losses.CrossEntropy(), optimizer, threads=1)
    before = learner.state()
    learner.run(feeds)
    found = learner.state()
    moves = {name: (after - before[name]) / RATE for name, after in reference(graph, optimizer, [feeds]).items()}
    largest = max(float(np.abs(move).max(initial=0)) for move in moves.values())
    for name, expected in moves.items():  # the gradient of a value that a normalization removes is only rounding errors
        close((found[name] - before[name]) / RATE, expected, f"gradient of {name}", noise=1e-6 + 2e-4 * largest)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_random_modules(seed: int) -> None:
    check(seed)


if __name__ == "__main__":
    for number in range(*map(int, sys.argv[1:])):
        try:
            check(number)
        except Exception as error:
            print(number, type(error).__name__, str(error)[:1500], model(number)[0], flush=True)
