"""Initial values of parameters, by PyTorch's formulas, from one random number generator per context.

`with seeded(7): model = LeNet5()` makes the same model each time. The numbers differ from PyTorch's for the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from lathe.core.ir.graph import Array
from lathe.core.nn.parameter import Parameter

_GAINS = {"linear": 1.0, "sigmoid": 1.0, "tanh": 5 / 3, "relu": math.sqrt(2), "selu": 0.75}

_generator: ContextVar[np.random.Generator] = ContextVar("generator")
_are_skipped: ContextVar[bool] = ContextVar("are_skipped", default=False)


def generator() -> np.random.Generator:
    """The random number generator of initial values in this context; with seed 0 if none was set."""
    if _generator.get(None) is None:
        manual_seed(0)
    return _generator.get()


def manual_seed(seed: int) -> None:
    """Set a new generator with this seed for the rest of this context (thread or task)."""
    _generator.set(_new_generator(seed))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Use a new generator with this seed within the context."""
    token = _generator.set(_new_generator(seed))
    try:
        yield
    finally:
        _generator.reset(token)


@contextmanager
def skipped() -> Iterator[None]:
    """Within the context, parameters get no initial values: they are zero, and take no memory, until they are loaded.

    A module that is loaded from a file is made in this way: drawing the values of 100 million parameters takes seconds.
    """
    token = _are_skipped.set(True)
    try:
        yield
    finally:
        _are_skipped.reset(token)


def _new_generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def calculate_gain(nonlinearity: str, slope: float = 0.01) -> float:
    """PyTorch's gain of an activation: the factor for weights before it that keeps the variance of its outputs.

    `slope` is the negative slope of leaky_relu. ValueError for an unknown activation.
    """
    if nonlinearity == "leaky_relu":
        return math.sqrt(2 / (1 + slope**2))
    if nonlinearity not in _GAINS:
        raise ValueError(f"nonlinearity: expected leaky_relu, {', '.join(_GAINS)}, got {nonlinearity!r}")
    return _GAINS[nonlinearity]


def fans(shape: Sequence[int]) -> tuple[int, int]:
    """(Fan-in, fan-out) of weights [outputs, inputs, kernel...]: inputs, and outputs, times the kernel's elements."""
    kernel = math.prod(shape[2:])
    return shape[1] * kernel, shape[0] * kernel


def uniform_(parameter: Parameter, a: float = 0.0, b: float = 1.0) -> Parameter:
    return _set(parameter, lambda shape: generator().uniform(a, b, shape))


def normal_(parameter: Parameter, mean: float = 0.0, std: float = 1.0) -> Parameter:
    return _set(parameter, lambda shape: generator().normal(mean, std, shape))


def trunc_normal_(
    parameter: Parameter, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0
) -> Parameter:
    """Draw the parameter from a normal distribution, and values outside [a, b] again until none is left. Returns it."""

    def draw(shape: tuple[int, ...]) -> Array:
        samples = generator().normal(mean, std, shape)
        while (outside := (samples < a) | (samples > b)).any():
            samples[outside] = generator().normal(mean, std, int(outside.sum()))
        return samples

    return _set(parameter, draw)


def constant_(parameter: Parameter, number: float) -> Parameter:
    return _set(parameter, lambda shape: np.full(shape, number))


def zeros_(parameter: Parameter) -> Parameter:
    return constant_(parameter, 0.0)


def ones_(parameter: Parameter) -> Parameter:
    return constant_(parameter, 1.0)


def kaiming_uniform_(
    parameter: Parameter, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> Parameter:
    """Draw the parameter by the uniform initialization of He et al., 2015, and return it.

    `mode` is "fan_in" or "fan_out", `nonlinearity` an activation of `calculate_gain`, `a` the negative slope of a leaky
    ReLU. ValueError for others.
    """
    bound = math.sqrt(3) * _kaiming_deviation(parameter, a, mode, nonlinearity)
    return uniform_(parameter, -bound, bound)


def kaiming_normal_(
    parameter: Parameter, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> Parameter:
    """Like `kaiming_uniform_`, from a normal distribution with the same variance."""
    return normal_(parameter, 0.0, _kaiming_deviation(parameter, a, mode, nonlinearity))


def xavier_uniform_(parameter: Parameter, gain: float = 1.0) -> Parameter:
    """Draw the parameter by the uniform initialization of Glorot and Bengio, 2010, and return it."""
    bound = gain * math.sqrt(6 / sum(fans(parameter.data.shape)))
    return uniform_(parameter, -bound, bound)


def xavier_normal_(parameter: Parameter, gain: float = 1.0) -> Parameter:
    """Draw the parameter by the normal initialization of Glorot and Bengio, 2010, and return it."""
    return normal_(parameter, 0.0, gain * math.sqrt(2 / sum(fans(parameter.data.shape))))


def unset(*shape: int) -> Parameter:
    """A parameter in float32 that needs an initialization: zeros, which take no memory."""
    parameter = Parameter(np.float32(0))
    parameter.data = np.broadcast_to(parameter.data, shape)
    return parameter


def new_weight(*shape: int) -> Parameter:
    """A new weight of a linear or convolutional layer, as PyTorch draws it: uniform in +-1 / sqrt(fan_in)."""
    return kaiming_uniform_(unset(*shape), a=math.sqrt(5))


def new_uniform(width: int, *shape: int) -> Parameter:
    """A new parameter, uniform in +-1 / sqrt(width): for biases, and for weights of recurrent layers."""
    bound = 1 / math.sqrt(width) if width else 0.0
    return uniform_(unset(*shape), -bound, bound)


def _kaiming_deviation(parameter: Parameter, a: float, mode: str, nonlinearity: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f"mode: expected fan_in or fan_out, got {mode!r}")
    fan = fans(parameter.data.shape)[mode == "fan_out"]
    return calculate_gain(nonlinearity, a) / math.sqrt(fan)


def _set(parameter: Parameter, values: Callable[[tuple[int, ...]], Array]) -> Parameter:
    """Give the parameter the `values` for its shape, or within `skipped` zeros that take no memory; returns it."""
    shape, dtype = parameter.data.shape, parameter.data.dtype
    skip = _are_skipped.get()
    parameter.data = np.broadcast_to(np.zeros((), dtype), shape) if skip else values(shape).astype(dtype)
    return parameter
