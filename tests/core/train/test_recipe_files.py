"""The recipes in docs/recipes: they read, and what they promise holds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from core.train import recipe
from core.train.assembly import Means
from core.train.work import Sources, prepare, work

RECIPES = sorted((Path(__file__).parents[3] / "docs" / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_reads(path: Path) -> None:
    recipe.read(path)


@pytest.mark.slow
def test_digits_are_told_apart(tmp_path: Path) -> None:
    """Five seeds, each with a split of its own."""
    digits = load_digits()
    np.savez(tmp_path / "digits.npz", images=digits.images.astype(np.uint8), labels=digits.target)
    base = recipe.read(next(path for path in RECIPES if path.stem == "digits-lenet5"))
    found = []
    for seed in range(5):
        data = base.data.model_copy(update={"seed": seed})
        folder = tmp_path / str(seed)
        prepare(folder, base.model_copy(update={"seed": seed, "data": data}))
        work(folder, Sources(tmp_path / "digits.npz"), Means(threads=1))
        found.append(json.loads((folder / "result" / "metrics.json").read_text())["metrics"]["accuracy"])
    assert np.mean(found) >= 0.99
    assert min(found) >= 0.983
