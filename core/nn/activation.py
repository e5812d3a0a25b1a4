"""Activation functions: elementwise, apart from Softmax and LogSoftmax.

`inplace` is accepted for compatibility with PyTorch and has no effect: the compiler reuses memory where it can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np

from lathe.core.ir.graph import Attr
from lathe.core.nn import functional as F
from lathe.core.nn.module import Module
from lathe.core.nn.parameter import Parameter
from lathe.core.nn.tensor import Tensor


class _Activation(Module):
    """The base class of activations that apply one ONNX operator, `op`, with the attributes that `attrs` returns."""

    op: ClassVar[str]

    def attrs(self) -> dict[str, Attr]:
        return {}

    def forward(self, x: Tensor) -> Tensor:
        return x.op(self.op, **self.attrs())

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={setting}" for name, setting in vars(self).items() if name != "training")


class _InPlace(_Activation):
    """The base class of activations with PyTorch's argument `inplace`, which is ignored."""

    def __init__(self, inplace: bool = False) -> None:
        pass


class ReLU(_InPlace):
    op = "Relu"


class ReLU6(_InPlace):
    """min(max(x, 0), 6), element by element."""

    op = "Clip"

    def attrs(self) -> dict[str, Attr]:
        return {"min": 0.0, "max": 6.0}


class Tanh(_Activation):
    op = "Tanh"


class Sigmoid(_Activation):
    op = "Sigmoid"


class Softplus(_Activation):
    op = "Softplus"


class Softsign(_Activation):
    op = "Softsign"


class Mish(_InPlace):
    op = "Mish"


class Hardswish(_InPlace):
    op = "HardSwish"


class Hardsigmoid(_InPlace):
    op = "HardSigmoid"

    def attrs(self) -> dict[str, Attr]:
        return {"alpha": 1 / 6}


class SELU(_InPlace):
    op = "Selu"


class SiLU(_InPlace):
    """x * sigmoid(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


class GELU(_Activation):
    """GELU. `approximate` is "none" (exact, by the error function) or "tanh"."""

    op = "Gelu"

    def __init__(self, approximate: str = "none") -> None:
        self.approximate = approximate

    def attrs(self) -> dict[str, Attr]:
        return {"approximate": self.approximate}


class LeakyReLU(_Activation):
    op = "LeakyRelu"

    def __init__(self, negative_slope: float = 0.01, inplace: bool = False) -> None:
        self.negative_slope = negative_slope

    def attrs(self) -> dict[str, Attr]:
        return {"alpha": self.negative_slope}


class ELU(_Activation):
    op = "Elu"

    def __init__(self, alpha: float = 1.0, inplace: bool = False) -> None:
        self.alpha = alpha

    def attrs(self) -> dict[str, Attr]:
        return {"alpha": self.alpha}


class PReLU(Module):
    """x where it is positive, otherwise x times a trainable slope: a single one, or one per channel (axis 1)."""

    def __init__(self, num_parameters: int = 1, init: float = 0.25) -> None:
        self.num_parameters = num_parameters
        self.weight = Parameter(np.full(num_parameters, init, np.float32))

    def forward(self, x: Tensor) -> Tensor:
        fits = self.num_parameters == 1 or (x.ndim > 1 and x.shape[1] == self.num_parameters)
        self.expect(fits, f"[N, {self.num_parameters}, ...]", x)
        return x.op("PRelu", self.weight.reshape(self.num_parameters, *[1] * max(x.ndim - 2, 0)))

    def extra_repr(self) -> str:
        return f"num_parameters={self.num_parameters}"


class Softmax(_Activation):
    """Softmax along `dim`."""

    op = "Softmax"

    def __init__(self, dim: int = -1) -> None:
        self.dim = dim

    def attrs(self) -> dict[str, Attr]:
        return {"axis": self.dim}


class LogSoftmax(Softmax):
    op = "LogSoftmax"


ACTIVATIONS: dict[str, Callable[[], Module]] = {"relu": ReLU, "gelu": GELU, "silu": SiLU, "tanh": Tanh}
