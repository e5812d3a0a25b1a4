"""A small model and its batches for Lathe and PyTorch, whose training in each precision is compared."""

from __future__ import annotations

from typing import Any

import numpy as np

ROWS, FEATURES, HIDDEN, CLASSES, STEPS = 64, 48, 96, 8, 20
RATE, MOMENTUM = 0.02, 0.9
SHAPES = {  # of the parameters, by name
    "w0": (FEATURES, HIDDEN),
    "b0": (HIDDEN,),
    "w1": (HIDDEN, HIDDEN),
    "b1": (HIDDEN,),
    "w2": (HIDDEN, CLASSES),
}


def weight(name: str) -> Any:
    """float32, random by the name; scaled so that activations keep their size."""
    rng, shape = np.random.default_rng(sum(map(ord, name))), SHAPES[name]
    return rng.normal(0, 1 / np.sqrt(np.prod(shape[1:])), shape).astype(np.float32)


def batch(seed: int) -> dict[str, Any]:
    """x: float32 [ROWS, FEATURES]; target: int64 [ROWS]."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 1, (ROWS, FEATURES)).astype(np.float32)
    return {"x": x, "target": (x[:, :CLASSES] + 0.1 * x[:, -CLASSES:]).argmax(1)}


SCALING = {"init_scale": 32.0, "growth_interval": 3}


def scaled_start() -> Any:
    """The initial parameters: float32 [4]."""
    return np.random.default_rng(4).normal(0, 1, 4).astype(np.float32)


def scaled_gradients() -> Any:
    """The gradients of 16 updates: float32 [16, 4], three of which have an infinite or NaN element."""
    found = np.random.default_rng(5).normal(0, 1, (16, 4)).astype(np.float32)
    found[[2, 3, 9], [0, 3, 1]] = np.inf, -np.inf, np.nan
    return found
