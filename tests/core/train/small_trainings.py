"""Small trainings: points in the plane classified by quadrant, and a recipe that learns them quickly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from lathe.core.train.data import open_dataset
from lathe.core.train.recipe import recipe
from lathe.core.train.recipe.recipe import Recipe
from lathe.core.train.recipe.training_setup import Resources
from lathe.core.train.run import events, result
from lathe.core.train.run.training_loop import FitRun

RECIPE: Mapping[str, Any] = {
    "data": {"validation": 0.25},
    "model": {"architecture": "mlp", "hidden": [16], "dropout": 0.2},
    "optimizer": {"kind": "adam", "rate": 0.02},
    "schedule": {"kind": "one_cycle"},
    "epochs": 4,
    "batch": 16,
    "checkpoint": {"steps": 4},
}


def asked(**changes: Any) -> Recipe:
    return recipe.from_values({**RECIPE, **changes})


def quadrants(path: Path, rows: int = 120) -> Path:
    """An npz file of points `x` and the number `y` of their quadrant."""
    x = np.random.default_rng(0).uniform(-1, 1, (rows, 2)).astype(np.float32)
    with path.open("wb") as file:
        np.savez(file, x=x, y=2 * (x[:, 0] > 0) + (x[:, 1] > 0))
    return path


def fit(folder: Path, what: Recipe, data: Path, **options: Any) -> FitRun:
    folder.mkdir(exist_ok=True)
    return FitRun(what, open_dataset(data), folder, resources=Resources(threads=1), **options)


def final_state(folder: Path) -> dict[str, Any]:
    """The arrays of the newest checkpoint: after a whole training, its last state."""
    newest = max((folder / "checkpoints").iterdir(), key=lambda path: int(path.name))
    return load_file(newest / "state.safetensors")


def model_bytes(folder: Path) -> bytes:
    return (folder / result.FOLDER / result.MODEL).read_bytes()


def kinds(folder: Path) -> list[str]:
    return [event.kind for event in events.read(folder)]
