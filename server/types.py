"""The types that all layers of the server share. They are independent of HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Shape: TypeAlias = tuple[int, ...]
Array: TypeAlias = NDArray[np.generic]
Tensors: TypeAlias = dict[str, Array]
Parameter: TypeAlias = str | int | float | bool
Parameters: TypeAlias = dict[str, Parameter]
Fits: TypeAlias = Callable[[Mapping[str, tuple[int, ...]]], bool]  # input names -> shapes; whether they may be batched


@dataclass(frozen=True, slots=True)
class ModelRef:
    """One immutable version of one model."""

    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.name}:{self.version}"

    @property
    def fields(self) -> dict[str, str | int]:
        """The fields `model` and `version` of a log line."""
        return {"model": self.name, "version": self.version}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model; `datatype` is the protocol's (FP32, INT64, BYTES ...)."""

    name: str
    datatype: str
    shape: tuple[int, ...]  # -1: any size
    any_rank: bool = False  # any number of dimensions; `shape` is (-1,) then, since the protocol has no other notation

    @property
    def text(self) -> str:
        """The datatype and shape as text: `FP32[-1, 4]`, or `FP32[*]` for any rank."""
        return f"{self.datatype}{'[*]' if self.any_rank else list(self.shape)}"

    def describe(self) -> dict[str, object]:
        """Return the spec as the protocol's metadata object."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


@dataclass(frozen=True, slots=True)
class Span:
    """`size` bytes at `offset` of a registered region of shared memory."""

    region: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """One output that the client requested."""

    name: str
    binary: bool = False
    classes: int = 0  # > 0: the answer has the `classes` highest entries of each row instead of the tensor
    span: Span | None = None  # the shared memory that the output is written to instead of the answer


@dataclass(slots=True)
class InferRequest:
    """One inference request; `version` is "" for the live version, digits, or an alias."""

    model: str
    inputs: Tensors
    version: str = ""
    id: str = ""
    outputs: tuple[RequestedOutput, ...] = ()  # empty: all outputs
    parameters: Parameters = field(default_factory=dict)
    deadline: float | None = None  # monotonic seconds
    priority: int = 0  # 1 is the most urgent, 0 the model's default
    sticky_key: str = ""  # during a canary, requests with the same key are answered by the same version


@dataclass(slots=True)
class InferResult:
    """The outputs of a request, and the version that computed them."""

    ref: ModelRef
    outputs: Tensors
    id: str = ""


class MissingVersion(NamedTuple):
    """A version that should answer requests but is not in memory."""

    model: str
    version: int
    state: str  # its state in the repository's lifecycle
