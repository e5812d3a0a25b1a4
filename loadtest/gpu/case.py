"""The unit of a benchmark run: one case, which is measured, recorded and counted separately."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

PRECISIONS = ("bfloat16", "tf32", "float32", "float16")


@dataclass(frozen=True)
class Options:
    """The options of a run. Runs of the same code with the same options have the same cases."""

    device: str = "cuda"
    batches: tuple[int, ...] = (1, 8, 32, 128)
    precisions: tuple[str, ...] = PRECISIONS
    models: tuple[str, ...] = ("resnet50", "minilm")  # timed models
    zoo: tuple[str, ...] = ()  # models compared with the CPU; empty: all
    trained: tuple[str, ...] = ("lenet", "mlp", "resnet", "transformer")
    tune: str = "20"  # seconds of tuning per model and precision
    problems: int = 8  # kernels per model and precision whose tiles are timed
    slice: float = 0.2  # seconds per engine and round
    rounds: int = 5
    product: int = 8192  # rows of the square matrices that measure the peak FLOP/s
    copy: int = 1 << 30  # bytes of the copy that measures the peak bandwidth

    @staticmethod
    def from_json(given: Mapping[str, Any]) -> Options:
        """The inverse of `asdict`, after a round trip through JSON."""
        made: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in given.items()}
        return Options(**made)


@dataclass(frozen=True)
class Case:
    """`name` is unique within its part, such as "resnet50/bfloat16/128".

    `limit`: seconds after which the case is killed.
    """

    part: str
    name: str
    limit: float = 60.0

    @property
    def key(self) -> str:
        return f"{self.part}/{self.name}"

    @property
    def words(self) -> list[str]:
        return self.name.split("/")


@dataclass(frozen=True)
class Finding:
    """The result of a case: a line of text, and figures. `ok`: was its promise kept? None if it has no promise."""

    text: str
    ok: bool | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """The inputs of a case: the options, and the figures of earlier cases by their keys."""

    options: Options
    known: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"options": asdict(self.options), "known": dict(self.known)}
