"""The base class of the settings of architectures, and what their modules share."""

from __future__ import annotations

from typing import Annotated, Literal, Protocol, TypeAlias

from pydantic import Field

from lathe import nn
from lathe.core.errors import ModelError
from lathe.core.ir.types import DType
from lathe.core.section import Section

Width: TypeAlias = Annotated[int, Field(ge=1, le=65536)]
Probability: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
ActivationName: TypeAlias = Literal["relu", "gelu", "silu", "tanh"]
AFTER_LAYERS = "Activation after each layer but the last: `relu`, `gelu`, `silu` or `tanh`."  # meaning of a setting


class Row(Protocol):
    """The type of one row of an input: dtype, and shape without the batch dimension."""

    @property
    def dtype(self) -> DType: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class Settings(Section):
    """The hyper-parameters of an architecture. `module` builds its module for rows of a given type."""

    architecture: str

    def module(self, row: Row, outputs: int) -> nn.Module:
        """A module with new weights that maps rows to float32 [N, outputs]. ModelError for rows that it cannot take."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `module`")


def activation(name: ActivationName) -> nn.Module:
    return nn.ACTIVATIONS[name]()


def image_shape(architecture: str, row: Row) -> tuple[int, int, int]:
    """Channels, height and width of rows [C, H, W] or [H, W] of numbers. ModelError for other rows."""
    if not holds_numbers(row) or len(row.shape) not in (2, 3):
        raise row_error(architecture, "images, numbers [C,H,W] or [H,W]", row)
    channels, height, width = (1, *row.shape) if len(row.shape) == 2 else row.shape
    return channels, height, width


def row_error(architecture: str, expected: str, row: Row) -> ModelError:
    """The error for rows that an architecture cannot take."""
    text = ",".join(map(str, row.shape))
    return ModelError(f"expected {expected}, got rows {row.dtype}[{text}]", where=f"architecture '{architecture}'")


def holds_numbers(row: Row) -> bool:
    return row.dtype.is_float or row.dtype.is_integer


class InputLayer(nn.Module):
    """The first layer: converts rows to float32 and reshapes them for the next layer."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return x.to("float32").reshape(x.shape[0], *self.shape)

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.shape))
