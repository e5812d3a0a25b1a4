"""Regularised evolution (E. Real et al., 2019), as a sampler of Optuna."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState

_LEAST = 4  # trials of the smallest population


class EvolutionSampler(BaseSampler):
    """Changes one field of a good trial among the newest; older trials, however good, have no more descendants.

    The population is the newest complete fifth of all trials. Of a random quarter of it, the best one is the parent, as
    in the paper. Until there are that many complete trials, all fields are drawn at random.
    """

    def __init__(self, space: Mapping[str, BaseDistribution], trials: int, seed: int) -> None:
        self._space = {path: each for path, each in space.items() if not each.single()}
        self._population = max(trials // 5, _LEAST)
        self._random, self._rng = RandomSampler(seed=seed), np.random.default_rng(seed)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return dict(self._space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if len(complete) < self._population or not search_space:
            return {}
        child = dict(self._parent(complete[-self._population :]).params)
        path = sorted(search_space)[int(self._rng.integers(len(search_space)))]
        before = child[path]
        while child[path] == before:
            child[path] = self._random.sample_independent(study, trial, path, search_space[path])
        return {path: child[path] for path in search_space}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def _parent(self, population: Sequence[FrozenTrial]) -> FrozenTrial:
        drawn = self._rng.choice(len(population), max(len(population) // 4, 2), replace=False)
        return max((population[int(place)] for place in drawn), key=lambda one: one.value or 0.0)
