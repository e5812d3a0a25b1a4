"""The recipes in docs/recipes are valid and reach their promised accuracy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from lathe.core.train.recipe import recipe
from lathe.core.train.recipe.training_setup import Resources
from lathe.core.train.run.work_folder import Sources, prepare, run_training

RECIPES = sorted((Path(__file__).parents[3] / "docs" / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipe_is_valid(path: Path) -> None:
    recipe.read(path)


@pytest.mark.slow
def test_digits_recipes_reach_their_accuracy(tmp_path: Path) -> None:
    """Five seeds, each with a different split."""
    digits = load_digits()
    np.savez(tmp_path / "digits.npz", images=digits.images.astype(np.uint8), labels=digits.target)
    base = recipe.read(next(path for path in RECIPES if path.stem == "digits-lenet5"))
    found = []
    for seed in range(5):
        data = base.data.model_copy(update={"seed": seed})
        folder = tmp_path / str(seed)
        prepare(folder, base.model_copy(update={"seed": seed, "data": data}))
        run_training(folder, Sources(tmp_path / "digits.npz"), Resources(threads=1))
        found.append(json.loads((folder / "result" / "metrics.json").read_text())["metrics"]["accuracy"])
    assert np.mean(found) >= 0.99
    assert min(found) >= 0.983
