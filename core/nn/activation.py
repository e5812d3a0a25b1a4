"""Activations, one element at a time but for Softmax and its kin."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from core.ir.graph import Attr
from core.nn import functional as F
from core.nn.module import Module
from core.nn.tensor import Tensor


class _Activation(Module):
    """Family base: one operator, and its attributes as settings of the layer."""

    op: ClassVar[str]

    def attrs(self) -> dict[str, Attr]:
        return {}

    def forward(self, x: Tensor) -> Tensor:
        return x.op(self.op, **self.attrs())

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={setting}" for name, setting in vars(self).items() if name != "training")


class ReLU(_Activation):
    op = "Relu"


class Tanh(_Activation):
    op = "Tanh"


class Sigmoid(_Activation):
    op = "Sigmoid"


class Softplus(_Activation):
    op = "Softplus"


class Softsign(_Activation):
    op = "Softsign"


class Mish(_Activation):
    op = "Mish"


class Hardswish(_Activation):
    op = "HardSwish"


class Hardsigmoid(_Activation):
    op = "HardSigmoid"

    def attrs(self) -> dict[str, Attr]:
        return {"alpha": 1 / 6}


class SELU(_Activation):
    op = "Selu"


class SiLU(Module):
    """x * sigmoid(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


class GELU(_Activation):
    """`approximate` is "none" (by the error function) or "tanh"."""

    op = "Gelu"

    def __init__(self, approximate: str = "none") -> None:
        self.approximate = approximate

    def attrs(self) -> dict[str, Attr]:
        return {"approximate": self.approximate}


class LeakyReLU(_Activation):
    op = "LeakyRelu"

    def __init__(self, negative_slope: float = 0.01) -> None:
        self.negative_slope = negative_slope

    def attrs(self) -> dict[str, Attr]:
        return {"alpha": self.negative_slope}


class ELU(_Activation):
    op = "Elu"

    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = alpha

    def attrs(self) -> dict[str, Attr]:
        return {"alpha": self.alpha}


class Softmax(_Activation):
    """Shares that add up to 1 along `dim`."""

    op = "Softmax"

    def __init__(self, dim: int = -1) -> None:
        self.dim = dim

    def attrs(self) -> dict[str, Attr]:
        return {"axis": self.dim}


class LogSoftmax(Softmax):
    op = "LogSoftmax"


ACTIVATIONS: dict[str, Callable[[], Module]] = {"relu": ReLU, "gelu": GELU, "silu": SiLU, "tanh": Tanh}
