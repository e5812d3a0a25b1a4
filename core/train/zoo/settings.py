"""What the settings of all architectures share."""

from __future__ import annotations

from typing import Annotated, Literal, Protocol, TypeAlias

from pydantic import Field

from core import nn
from core.errors import ModelError
from core.ir.types import DType
from core.train.section import Section

Width: TypeAlias = Annotated[int, Field(ge=1, le=65536)]
Share: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
ActivationName: TypeAlias = Literal["relu", "gelu", "silu", "tanh"]


class Row(Protocol):
    """The type of one row of an input, without the batch."""

    @property
    def dtype(self) -> DType: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class Settings(Section):
    """Family base: the hyper-parameters of an architecture. `module` makes it for rows of some type."""

    architecture: str

    def module(self, row: Row, outputs: int) -> nn.Module:
        """A module with fresh weights. ModelError for rows it cannot take."""
        raise NotImplementedError(f"{type(self).__name__} makes no module")


def activation(name: ActivationName) -> nn.Module:
    return nn.ACTIVATIONS[name]()


def image(architecture: str, row: Row) -> tuple[int, int, int]:
    """Channels, height and width of rows [C, H, W] or [H, W] of numbers; ModelError for others."""
    if not holds_numbers(row) or len(row.shape) not in (2, 3):
        raise refuse(architecture, "images, numbers [C,H,W] or [H,W]", row)
    channels, height, width = (1, *row.shape) if len(row.shape) == 2 else row.shape
    return channels, height, width


def refuse(architecture: str, expected: str, row: Row) -> ModelError:
    """The error for rows that an architecture cannot take."""
    text = ",".join(map(str, row.shape))
    return ModelError(f"takes {expected}; rows are {row.dtype}[{text}]", where=f"architecture '{architecture}'")


def holds_numbers(row: Row) -> bool:
    return row.dtype.is_float or row.dtype.is_integer


class Entry(nn.Module):
    """Rows of numbers as float32, in the shape that the next layer takes."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return x.to("float32").reshape(x.shape[0], *self.shape)

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.shape))
