"""`Results`: what `python -m loadtest compression` has measured, in a folder, so that a later run goes on."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

FLOAT32 = "float32"


@dataclass(frozen=True)
class Score:
    """What one method reached with one seed on one part of the tested rows."""

    method: str
    seed: int
    part: int
    hits: int
    rows: int


@dataclass(frozen=True)
class Row:
    """One method: mean accuracy, its mean difference from float32 and the standard error, in points; bytes; time."""

    method: str
    accuracy: float
    difference: float
    error: float
    size: int
    us: float


class Results:
    """The scores, and the files of models, of one model and data set.

    `scores.jsonl` has a line for each score, `models` the float32 models, and `files` the last file of each method.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("models", "files"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._log = folder / "scores.jsonl"
        lines = self._log.read_bytes().splitlines() if self._log.exists() else []
        self.scores = [Score(**orjson.loads(line)) for line in lines]

    def has(self, method: str, seed: int, part: int) -> bool:
        return any((score.method, score.seed, score.part) == (method, seed, part) for score in self.scores)

    def add(self, score: Score, file: bytes) -> None:
        self._path(score.method).write_bytes(file)
        self.scores.append(score)
        with self._log.open("ab") as log:
            log.write(orjson.dumps(asdict(score)) + b"\n")

    def file(self, method: str) -> bytes:
        """The last file of a method."""
        return self._path(method).read_bytes()

    def model(self, name: str, train: Callable[[], bytes]) -> bytes:
        """The float32 model of this name, which is trained if there is none."""
        path = self._folder / "models" / f"{name}.onnx"
        if not path.exists():
            data = train()
            path.with_suffix(".part").write_bytes(data)
            path.with_suffix(".part").rename(path)
        return path.read_bytes()

    def by_seed(self, methods: Sequence[str], seeds: Sequence[int]) -> list[dict[str, float]]:
        """The accuracy of each method, for each seed."""
        return [{method: self._accuracy(method, seed) for method in methods} for seed in seeds]

    def _accuracy(self, method: str, seed: int) -> float:
        found = [score for score in self.scores if (score.method, score.seed) == (method, seed)]
        return sum(score.hits for score in found) / sum(score.rows for score in found)

    def _path(self, method: str) -> Path:
        return self._folder / "files" / hashlib.sha256(method.encode()).hexdigest()[:16]


def rows_of(
    by_seed: Sequence[Mapping[str, float]], sizes: Mapping[str, int], seconds: Mapping[str, float]
) -> list[Row]:
    """The table, from the accuracies of each seed, and the bytes and seconds of each method."""
    table = []
    for method, size in sizes.items():
        differences = [100 * (each[method] - each[FLOAT32]) for each in by_seed]
        error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
        mean = statistics.fmean(100 * each[method] for each in by_seed)
        table.append(Row(method, mean, statistics.fmean(differences), error, size, seconds[method] * 1e6))
    return table


def markdown(table: Sequence[Row]) -> str:
    """The table in Markdown."""
    exact = next(row for row in table if row.method == FLOAT32)
    lines = [
        "| method | accuracy | difference, points | bytes | of float32's | us | times as fast |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in table:
        found = f"{row.accuracy:.2f} % | {row.difference:+.2f} ± {row.error:.2f} | {row.size:,}"
        ratios = f"{row.size / exact.size:.2f} | {row.us:.0f} | {exact.us / row.us:.2f}"
        lines.append(f"| {row.method} | {found} | {ratios} |")
    return "\n".join(lines) + "\n"
