"""AdaRound: learns for each weight whether it is rounded down or up, so that the results of the layer change least.

Nagel et al. 2020 (https://arxiv.org/abs/2004.10568), section 3: each weight gets a variable between 0 (down) and 1
(up), a regularizer drives the variables to 0 or 1, and Adam minimises the square error of the layer's results. That
error depends on the data by the second moments of the layer's inputs alone, so no activation is kept. Beyond the paper,
a search changes single choices afterwards, as long as that lowers the error.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

STEPS = 600  # of Adam on all data at once; the paper takes 10,000 of batches. A weight [288, 64] takes 0.15 s
_RATE = 0.03
_LOW, _HIGH = -0.1, 1.1  # the stretched sigmoid: gamma and zeta of the paper, equation 23
_FIRST_POWER, _LAST_POWER = 20.0, 2.0  # beta of equation 24, from the beginning of the annealing to its end
_WITHOUT_REGULARIZER = 0.2  # of the steps
_REGULARIZER = 0.1  # relative to the mean error of one wrong choice
_MOST_SWEEPS = 20
_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8


def learn_rounding(
    weights: NDArray[np.float32],
    gram: NDArray[np.float32],
    scale: NDArray[np.float32],
    zero: NDArray[Any],
    limits: tuple[int, int],
    steps: int = STEPS,
) -> NDArray[np.int32]:
    """The codes q [K, N] of weights [K, N] with the least error of x @ ((q - zero) * scale) that the search finds.

    `gram` [K, K] is the mean of x x^T; `scale` and `zero` broadcast to [K, N]; codes stay within `limits`. Each code is
    one of the two neighbours of its weight. In no column is the error greater than with the nearest codes.
    """
    ratio = weights.astype(np.float64) / scale + zero
    down, up = np.floor(ratio).clip(*limits), np.ceil(ratio).clip(*limits)
    scale = np.broadcast_to(scale, weights.shape).astype(np.float64)
    step = scale * (up - down)  # 0 where there is no choice
    offset = scale * (down - zero) - weights  # the error of rounding down
    moments = gram.astype(np.float64)
    nearest = (np.rint(ratio).clip(*limits) > down).astype(np.float64)
    choices = [nearest, _search(nearest, offset, step, moments)]
    choices.append(_search(_learned(ratio - down, offset, step, moments, steps), offset, step, moments))
    errors = [_errors(offset + step * choice, moments) for choice in choices]
    best = np.choose(np.argmin(errors, axis=0), choices)
    return np.asarray(down + best * (up - down), np.int32)


def _errors(difference: NDArray[np.float64], moments: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean square error of each column's results."""
    return np.asarray((difference * (moments @ difference)).sum(axis=0), np.float64)


def _learned(
    fraction: NDArray[np.float64],
    offset: NDArray[np.float64],
    step: NDArray[np.float64],
    moments: NDArray[np.float64],
    steps: int,
) -> NDArray[np.float64]:
    """The choice for each weight, 0 or 1, after `steps` steps of Adam from the variables that equal `fraction`."""
    unit = np.maximum((step**2 * np.diag(moments)[:, None]).mean(axis=0), np.finfo(np.float32).tiny)
    share = ((fraction - _LOW) / (_HIGH - _LOW)).clip(0.01, 0.99)
    variable = np.log(share / (1 - share)).astype(np.float32)
    gram, start, move = moments.astype(np.float32), offset.astype(np.float32), step.astype(np.float32)
    factor = (2 * step / unit).astype(np.float32)
    mean, square = np.zeros_like(variable), np.zeros_like(variable)
    for number in range(steps):
        sigmoid = 1 / (1 + np.exp(-variable))
        stretched = sigmoid * (_HIGH - _LOW) + _LOW
        soft = stretched.clip(0, 1)
        slope = factor * (gram @ (start + move * soft))
        progress = (number / steps - _WITHOUT_REGULARIZER) / (1 - _WITHOUT_REGULARIZER)
        if progress > 0:
            power = _LAST_POWER + (_FIRST_POWER - _LAST_POWER) * (1 + np.cos(np.pi * progress)) / 2
            side = 2 * soft - 1
            slope = slope - _REGULARIZER * 2 * power * np.sign(side) * np.abs(side) ** (power - 1)
        slope = slope * ((stretched > 0) & (stretched < 1)) * (_HIGH - _LOW) * sigmoid * (1 - sigmoid)
        mean += (1 - _BETA1) * (slope - mean)
        square += (1 - _BETA2) * (slope**2 - square)
        corrected = np.sqrt(square / (1 - _BETA2 ** (number + 1))) + _EPSILON
        variable -= _RATE / (1 - _BETA1 ** (number + 1)) * mean / corrected
    return (variable > 0).astype(np.float64)


def _search(
    choice: NDArray[np.float64], offset: NDArray[np.float64], step: NDArray[np.float64], moments: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The choices after single changes that lower the error, weight by weight, until there are none."""
    choice = choice.copy()
    slope = moments @ (offset + step * choice)
    for _ in range(_MOST_SWEEPS):
        changed = False
        for row in range(len(choice)):
            move = step[row] * (1 - 2 * choice[row])
            lowers = 2 * move * slope[row] + move**2 * moments[row, row] < -1e-12 * move**2
            if lowers.any():
                changed = True
                choice[row] = np.where(lowers, 1 - choice[row], choice[row])
                slope += np.outer(moments[row], np.where(lowers, move, 0))
        if not changed:
            break
    return choice
