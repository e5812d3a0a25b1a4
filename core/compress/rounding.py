"""The modes that choose between the two neighbours of a number on a grid of integers."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

DirectRounding = Literal["nearest", "stochastic", "floor", "ceil"]  # needs no data
Rounding = Literal[DirectRounding, "adaround"]
DIRECT_ROUNDINGS: tuple[DirectRounding, ...] = get_args(DirectRounding)
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)


def rounded(
    ratio: NDArray[Any], rounding: Rounding, seed: int, zero: Any, limits: tuple[int, int]
) -> NDArray[np.int32]:
    """Real numbers in units of the scale as integers plus the zero point, within `limits`.

    `stochastic` takes the upper neighbour with the probability of its nearness, so that the mean error is 0 (Gupta et
    al. 2015); `seed` determines the choices. `adaround` needs data (`learned_rounding.py`): here it is `nearest`.
    """
    if rounding == "floor":
        whole = np.floor(ratio)
    elif rounding == "ceil":
        whole = np.ceil(ratio)
    elif rounding == "stochastic":
        whole = np.floor(ratio + np.random.default_rng(seed).random(ratio.shape))
    else:
        whole = np.rint(ratio)
    return np.asarray((whole + zero).clip(*limits), np.int32)
