"""The few types every layer of the server shares. They know nothing of HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.generic]
Tensors: TypeAlias = dict[str, Array]
Parameter: TypeAlias = str | int | float | bool
Parameters: TypeAlias = dict[str, Parameter]
Fits: TypeAlias = Callable[[Mapping[str, tuple[int, ...]]], bool]  # of the shapes of a request's inputs


@dataclass(frozen=True, slots=True)
class ModelRef:
    """One immutable version of one model."""

    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.name}:{self.version}"

    @property
    def fields(self) -> dict[str, str | int]:
        """Return it as a log line has it."""
        return {"model": self.name, "version": self.version}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a model takes or gives under one name; ``datatype`` is the wire's (FP32, INT64, BYTES ...)."""

    name: str
    datatype: str
    shape: tuple[int, ...]  # -1: any size
    any_rank: bool = False  # the shape is (-1,) then, which is how the wire says that any will do

    @property
    def text(self) -> str:
        """The datatype and shape for people, `FP32[-1, 4]`; `FP32[*]` where any rank will do."""
        return f"{self.datatype}{'[*]' if self.any_rank else list(self.shape)}"

    def describe(self) -> dict[str, object]:
        """Return the spec as the wire's metadata object."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


@dataclass(frozen=True, slots=True)
class Span:
    """``size`` bytes at ``offset`` of a registered region of shared memory."""

    region: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """One output the caller asked for."""

    name: str
    binary: bool = False
    classes: int = 0  # > 0: answer the best `classes` entries per row instead of the tensor
    span: Span | None = None  # where it goes instead of into the answer


@dataclass(slots=True)
class InferRequest:
    """One call for one inference; ``version`` is "" for the live one, digits, or an alias."""

    model: str
    inputs: Tensors
    version: str = ""
    id: str = ""
    outputs: tuple[RequestedOutput, ...] = ()  # empty: all of them
    parameters: Parameters = field(default_factory=dict)
    deadline: float | None = None  # monotonic seconds
    priority: int = 0  # 1 is the most urgent, 0 the model's default
    sticky_key: str = ""  # requests with the same one are answered by the same version while a candidate is tried


@dataclass(slots=True)
class InferResult:
    """The answer, and the version that gave it."""

    ref: ModelRef
    outputs: Tensors
    id: str = ""


class Awaited(NamedTuple):
    """A version that should answer and is not in memory."""

    model: str
    version: int
    state: str  # how far it has come
