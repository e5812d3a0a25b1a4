"""First values of parameters, by PyTorch's formulas, from one stream of random numbers that a seed begins anew.

`with seeded(7): model = LeNet5()` makes the same model each time. The numbers are Lathe's own, not PyTorch's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from core.ir.graph import Array
from core.nn.parameter import Parameter

_GAINS = {"linear": 1.0, "sigmoid": 1.0, "tanh": 5 / 3, "relu": math.sqrt(2), "selu": 0.75}

_generator: ContextVar[np.random.Generator] = ContextVar("generator")


def generator() -> np.random.Generator:
    """The stream that first values are drawn from; seed 0 where none was set."""
    if _generator.get(None) is None:
        manual_seed(0)
    return _generator.get()


def manual_seed(seed: int) -> None:
    """Begin the stream anew, in this thread."""
    _generator.set(_stream(seed))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A stream of its own for what is built inside."""
    token = _generator.set(_stream(seed))
    try:
        yield
    finally:
        _generator.reset(token)


def _stream(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def calculate_gain(nonlinearity: str, slope: float = 0.01) -> float:
    """How much a layer's weights must grow for its activation to keep the size of signals. ValueError for an unknown
    activation."""
    if nonlinearity == "leaky_relu":
        return math.sqrt(2 / (1 + slope**2))
    if nonlinearity not in _GAINS:
        raise ValueError(f"nonlinearity is {nonlinearity!r}, expected leaky_relu, {', '.join(_GAINS)}")
    return _GAINS[nonlinearity]


def fans(shape: Sequence[int]) -> tuple[int, int]:
    """How many inputs each output has, and outputs each input: of weights [outputs, inputs, kernel...]."""
    kernel = math.prod(shape[2:])
    return shape[1] * kernel, shape[0] * kernel


def uniform_(parameter: Parameter, a: float = 0.0, b: float = 1.0) -> Parameter:
    return _set(parameter, generator().uniform(a, b, parameter.data.shape))


def normal_(parameter: Parameter, mean: float = 0.0, std: float = 1.0) -> Parameter:
    return _set(parameter, generator().normal(mean, std, parameter.data.shape))


def trunc_normal_(
    parameter: Parameter, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0
) -> Parameter:
    """Of a normal distribution what lies between `a` and `b`; the rest is drawn again."""
    drawn = generator().normal(mean, std, parameter.data.shape)
    while (outside := (drawn < a) | (drawn > b)).any():
        drawn[outside] = generator().normal(mean, std, int(outside.sum()))
    return _set(parameter, drawn)


def constant_(parameter: Parameter, number: float) -> Parameter:
    return _set(parameter, np.full(parameter.data.shape, number))


def zeros_(parameter: Parameter) -> Parameter:
    return constant_(parameter, 0.0)


def ones_(parameter: Parameter) -> Parameter:
    return constant_(parameter, 1.0)


def kaiming_uniform_(
    parameter: Parameter, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> Parameter:
    """He et al., 2015. `a` is the slope of a leaky ReLU below zero."""
    bound = math.sqrt(3) * _kaiming_deviation(parameter, a, mode, nonlinearity)
    return uniform_(parameter, -bound, bound)


def kaiming_normal_(
    parameter: Parameter, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> Parameter:
    """He et al., 2015."""
    return normal_(parameter, 0.0, _kaiming_deviation(parameter, a, mode, nonlinearity))


def xavier_uniform_(parameter: Parameter, gain: float = 1.0) -> Parameter:
    """Glorot and Bengio, 2010."""
    bound = gain * math.sqrt(6 / sum(fans(parameter.data.shape)))
    return uniform_(parameter, -bound, bound)


def xavier_normal_(parameter: Parameter, gain: float = 1.0) -> Parameter:
    """Glorot and Bengio, 2010."""
    return normal_(parameter, 0.0, gain * math.sqrt(2 / sum(fans(parameter.data.shape))))


def weights(*shape: int) -> Parameter:
    """Weights of a linear or convolutional layer as PyTorch draws them: uniform within 1 / sqrt(fan_in)."""
    return kaiming_uniform_(Parameter(np.empty(shape, np.float32)), a=math.sqrt(5))


def spread(width: int, *shape: int) -> Parameter:
    """Uniform within 1 / sqrt(width): biases, and weights of recurrent layers."""
    bound = 1 / math.sqrt(width) if width else 0.0
    return uniform_(Parameter(np.empty(shape, np.float32)), -bound, bound)


def _kaiming_deviation(parameter: Parameter, a: float, mode: str, nonlinearity: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f"mode is {mode!r}, expected fan_in or fan_out")
    fan = fans(parameter.data.shape)[mode == "fan_out"]
    return calculate_gain(nonlinearity, a) / math.sqrt(fan)


def _set(parameter: Parameter, array: Array) -> Parameter:
    parameter.data = array.astype(parameter.data.dtype)
    return parameter
