"""Regularised evolution (E. Real et al., 2019), as a sampler of Optuna."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from itertools import product
from math import prod
from typing import Any, TypeAlias

import numpy as np
from optuna import Study
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState

_LEAST = 4  # trials of the smallest population
_MUTATIONS = 16  # per field: mutations of one parent before mutations of mutations are drawn
_ENUMERABLE = 1 << 16  # candidates of the largest space that is searched in order for those left

Params: TypeAlias = dict[str, Any]
Key: TypeAlias = tuple[Any, ...]  # of params: their values in the order of the sorted paths


class EvolutionSampler(BaseSampler):
    """Changes one field of a good trial among the newest; older trials, however good, have no more descendants.

    The population is the newest complete fifth of all trials. Of a random quarter of it, the best one is the parent, as
    in the paper. Until there are that many complete trials, all fields are drawn at random.

    Unlike in the paper no candidate is drawn twice: one that an earlier trial had, whatever became of it, is drawn
    again, and where all neighbours of the parent were tried, a further field changes. Only when a space of at most
    65,536 candidates is exhausted do candidates repeat.
    """

    def __init__(self, space: Mapping[str, BaseDistribution], trials: int, seed: int) -> None:
        self._space = {path: each for path, each in space.items() if not _is_single(each)}
        self._population = max(trials // 5, _LEAST)
        self._random, self._rng = RandomSampler(seed=seed), np.random.default_rng(seed)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return dict(self._space)

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> Params:
        if not search_space:
            return {}
        earlier = [one for one in study.get_trials(deepcopy=False) if one.number != trial.number]
        tried = {self._key(one.params) for one in earlier if one.params.keys() >= search_space.keys()}
        complete = [one for one in earlier if one.state is TrialState.COMPLETE]
        draw = partial(self._random.sample_independent, study, trial)
        if len(complete) < self._population:
            start = {path: draw(path, each) for path, each in self._space.items()}
            if self._key(start) not in tried:
                return start
        else:
            parent = self._parent(complete[-self._population :])
            start = {path: parent.params[path] for path in self._space}
        return self._new_candidate(start, tried, draw)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def _parent(self, population: Sequence[FrozenTrial]) -> FrozenTrial:
        drawn = self._rng.choice(len(population), max(len(population) // 4, 2), replace=False)
        return max((population[int(place)] for place in drawn), key=lambda one: one.value or 0.0)

    def _new_candidate(self, start: Params, tried: Set[Key], draw: Callable[[str, BaseDistribution], Any]) -> Params:
        """`start` with one changed field, or with more if all such candidates seem to be in `tried`."""
        near = _MUTATIONS * len(self._space)
        child = start
        for attempt in range(2 * near):
            child = self._mutation(start if attempt < near else child, draw)
            if self._key(child) not in tried:
                return child
        return self._left_candidate(tried) or child

    def _mutation(self, parent: Params, draw: Callable[[str, BaseDistribution], Any]) -> Params:
        child = dict(parent)
        path = sorted(self._space)[int(self._rng.integers(len(self._space)))]
        while child[path] == parent[path]:
            child[path] = draw(path, self._space[path])
        return child

    def _left_candidate(self, tried: Set[Key]) -> Params | None:
        """A random candidate that is not in `tried`; None if there is none, or if the space is too large to list."""
        size = candidate_count(self._space)
        if size is None or size > _ENUMERABLE:
            return None
        values = product(*(_values(self._space[path]) for path in sorted(self._space)))
        left = [each for each in values if each not in tried]
        return dict(zip(sorted(self._space), left[int(self._rng.integers(len(left)))], strict=True)) if left else None

    def _key(self, params: Mapping[str, Any]) -> Key:
        return tuple(params[path] for path in sorted(self._space))


def candidate_count(space: Mapping[str, BaseDistribution]) -> int | None:
    """The number of different candidates in a space; None if it has fractions, which are without number."""
    varied = [each for each in space.values() if not _is_single(each)]
    return prod(len(_values(each)) for each in varied) if all(map(_is_finite, varied)) else None


def _is_single(distribution: BaseDistribution) -> bool:
    return len(_values(distribution)) == 1 if _is_finite(distribution) else distribution.single()


def _is_finite(distribution: BaseDistribution) -> bool:
    return not isinstance(distribution, FloatDistribution)


def _values(distribution: BaseDistribution) -> Sequence[Any]:
    """The different values of a distribution of choices or of whole numbers."""
    if isinstance(distribution, CategoricalDistribution):
        return tuple(dict.fromkeys(distribution.choices))
    assert isinstance(distribution, IntDistribution), "fractions are without number"
    return range(distribution.low, distribution.high + 1, distribution.step)
