"""The untrained models of a search's candidates: what they would serve, and whether two of them are the same."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from lathe.core.errors import LatheError
from lathe.core.frontends.export import export
from lathe.core.ir.graph import Graph
from lathe.core.train.data import Dataset
from lathe.core.train.recipe.data_selection import dataset_for
from lathe.core.train.recipe.recipe import Recipe
from lathe.core.train.recipe.sweep_space import Sweep, Values
from lathe.core.train.recipe.training_setup import untrained_model


@dataclass(frozen=True)
class Candidate:
    """The untrained model of a trial. Equal digests: the trainings would be equal, whatever the values of fields."""

    model: Graph
    digest: str


@dataclass
class Candidates:
    """Builds the candidates of a search on its data."""

    sweep: Sweep
    path: Path  # of the data
    _datasets: dict[str, Dataset] = field(default_factory=dict)

    def build(self, values: Values) -> Candidate | None:
        """The candidate with these values of fields; None if it cannot be built: its training says why."""
        try:
            recipe = self.sweep.trial(values)
            model = untrained_model(recipe, self._dataset(recipe))
        except LatheError:
            return None
        # Fields that have no effect, such as the channels of a stage that is not built, change neither text nor model.
        others = recipe.model_dump_json(exclude={"model"}).encode()
        return Candidate(model, hashlib.sha256(others + export(model)).hexdigest())

    def _dataset(self, recipe: Recipe) -> Dataset:
        key = recipe.data.model_dump_json()
        if key not in self._datasets:
            self._datasets[key] = dataset_for(recipe.data, self.path)
        return self._datasets[key]
