"""The unit of a measuring run: one case, which is measured, written down and counted by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

PRECISIONS = ("bfloat16", "tf32", "float32", "float16")


@dataclass(frozen=True)
class Options:
    """How to measure. Two runs of the same code with the same options have the same cases."""

    device: str = "cuda"
    batches: tuple[int, ...] = (1, 8, 32, 128)
    precisions: tuple[str, ...] = PRECISIONS
    models: tuple[str, ...] = ("resnet50", "minilm")  # that are timed
    zoo: tuple[str, ...] = ()  # that are compared with the CPU; all of them where none is named
    trained: tuple[str, ...] = ("lenet", "mlp", "resnet", "transformer")
    tune: str = "20"  # seconds of measuring kernels for each model and precision
    problems: int = 8  # of each model and precision, whose tiles are timed
    slice: float = 0.2  # seconds for each engine and round
    rounds: int = 5
    product: int = 8192  # rows of the square matrices that show the most operations per second
    copy: int = 1 << 30  # bytes of the copy that shows the most bytes per second

    @staticmethod
    def from_json(given: Mapping[str, Any]) -> Options:
        """What `asdict` and JSON made of options."""
        made: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in given.items()}
        return Options(**made)


@dataclass(frozen=True)
class Case:
    """`name` is unique in its part and says what is measured, such as "resnet50/bfloat16/128". `limit`: seconds after
    which the case is ended."""

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
    """What a case found, in a line for people and in figures. `ok` says whether a promise was kept; None where none was
    made."""

    text: str
    ok: bool | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """What a case may use: the options, and the figures of the cases before it, by their keys."""

    options: Options
    known: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"options": asdict(self.options), "known": dict(self.known)}
