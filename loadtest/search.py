"""Searches an architecture that is as fast as a hand-made LeNet-5, and compares both: `python -m loadtest search`.

The LeNet-5 of the recipes (6 and 16 channels, hidden layers of 120 and 84) is measured first. Its time is the latency
limit of a search over stages of convolutional blocks, by regularised evolution on a part of the training rows. Then
both architectures train with equal settings and several seeds on all training rows, and are tested on the rows held
out, which the search has not seen: a third of scikit-learn's digits, or those of a file (`loadtest/image_sets.py`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.console import Console
from rich.table import Table

from loadtest.compressed_files import hits, open_file
from loadtest.compression import AUGMENTATION, Data, Problem, Rows, read_data, times

LENET: Mapping[str, Any] = {"architecture": "lenet5"}
_START = {"architecture": "convnet", "stages": 2, "channels": [6, 16, 32], "kernels": [5], "head": "flatten"}
_WIDTHS = [4, 6, 8, 12, 16, 24, 32, 48, 64]
SPACE: Mapping[str, Any] = {
    "model.stages": {"low": 1, "high": 3},
    "model.channels.0": {"choices": _WIDTHS},
    "model.channels.1": {"choices": _WIDTHS},
    "model.channels.2": {"choices": _WIDTHS},
    "model.kernels": {"choices": [[3], [5], [3, 5], [5, 3]]},
    "model.depth": {"low": 1, "high": 2},
    "model.block": {"choices": ["plain", "separable", "inverted"]},
    "model.pool": {"choices": ["max", "average", "stride"]},
    "model.head": {"choices": ["mean", "flatten"]},
    "model.hidden": {"choices": [0, 32, 64, 128]},
}
_RATE, _WEIGHT_DECAY = 0.01, 0.05  # of AdamW for all models, chosen with the LeNet-5: see loadtest/compression.py
_TOLERANCE = 1.05  # ratio of times up to which the models are equally fast


@dataclass(frozen=True)
class Settings:
    """`epochs` are those of a trial, of rows of which there are `rows`; `final_epochs` those of the comparison."""

    trials: int
    rows: int
    epochs: int
    final_epochs: int
    seeds: int
    batch: int
    augment: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Row:
    """An architecture: its accuracy by seed, in percent, the bytes of its file, and the microseconds of a run."""

    name: str
    accuracies: tuple[float, ...]
    size: int
    us: float


def search(data: Data, train: Rows, limit_ms: float, settings: Settings, folder: Path) -> dict[str, Any]:
    """Search in `folder`; returns metrics.json of the result."""
    from lathe.core.train.recipe.training_setup import Resources
    from lathe.core.train.run import result
    from lathe.core.train.run.search import run_search
    from lathe.core.train.run.work_folder import Sources

    rows = train[: settings.rows]
    np.savez(folder / "rows.npz", x=data.x[rows], y=data.y[rows])
    recipe = {
        "data": {"held_out": 0.0, "validation": 0.25},
        "preprocess": [{"kind": "standardize"}],
        "augment": settings.augment,
        "model": _START,
        "optimizer": {"kind": "adamw", "rate": _RATE, "weight_decay": _WEIGHT_DECAY},
        "schedule": {"kind": "one_cycle"},
        "epochs": settings.epochs,
    }
    latency = {"limit_ms": limit_ms, "batch": settings.batch, "finalists": 3, "seeds": 3}
    sweep = {"recipe": recipe, "space": SPACE, "trials": settings.trials, "sampler": "evolution", "latency": latency}
    (folder / "recipe.json").write_bytes(orjson.dumps(sweep))
    run_search(folder, Sources(folder / "rows.npz"), Resources(threads=2), lambda: False, _print_event)
    return result.read_metrics(folder)


def _print_event(event: Any) -> None:
    from lathe.core.train.run.terminal_view import trial_line

    if event.kind == "trial" and event.values["state"] != "skipped":
        print(trial_line(event.values), flush=True)
    elif event.kind == "log":
        print(event.values["message"], flush=True)


def compare(data: Data, train: Rows, test: Rows, found: Mapping[str, Any], settings: Settings) -> list[Row]:
    """Train the LeNet-5 and the architecture `found` with each seed, two at a time, and time the last models."""
    models = {"LeNet-5": dict(LENET), "found": dict(found)}
    runs = [(name, seed) for seed in range(100, 100 + settings.seeds) for name in models]

    def fit(run: tuple[str, int]) -> bytes:
        name, seed = run
        problem = Problem(data.name, seed, settings.final_epochs, data.x, data.y, train)
        return problem.fit(models[name], settings.final_epochs, _RATE, augment=settings.augment)

    with ThreadPoolExecutor(2) as pool:
        files = dict(zip(runs, pool.map(fit, runs), strict=True))
    last = {name: files[name, runs[-1][1]] for name in models}
    seconds = times(last, data.x[: settings.batch], rounds=25)
    return [
        Row(
            name,
            tuple(_accuracy(files[each], data, test) for each in runs if each[0] == name),
            len(last[name]),
            seconds[name] * 1e6,
        )
        for name in models
    ]


def _accuracy(model: bytes, data: Data, test: Rows) -> float:
    file = open_file(model, "lathe", None)
    right = hits(file, data.x[test], data.y[test])
    file.close()
    return 100 * right / len(test)


def broken_promises(lenet: Row, found: Row) -> list[str]:
    """What the search promises and missed: a higher mean accuracy, at a time of at most that of the LeNet-5."""
    gain = statistics.fmean(found.accuracies) - statistics.fmean(lenet.accuracies)
    broken = [] if gain > 0 else [f"accuracy: expected more than that of the LeNet-5, got {gain:+.2f} points"]
    if found.us > _TOLERANCE * lenet.us:
        broken.append(f"time: expected at most {lenet.us:.1f} us, got {found.us:.1f}")
    return broken


def main(arguments: Sequence[str] | None = None) -> int:
    """Search, compare and print; 1 if the architecture that was found is worse or slower than the LeNet-5."""
    from lathe.core.train.run.latency import measure

    parser = argparse.ArgumentParser(prog="python -m loadtest search", description=__doc__)
    parser.add_argument("--data", type=Path, help="file of images (image_sets.py); default: the digits")
    parser.add_argument("--trials", type=int, default=20, help="trained candidates")
    parser.add_argument("--rows", type=int, default=12_000, help="rows of the search, of which a quarter validates")
    parser.add_argument("--epochs", type=int, help="epochs of a trial; default: 20 on the digits, 3 on a file")
    parser.add_argument("--final-epochs", type=int, help="epochs of the comparison; default: 60 or 5")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of the comparison")
    parser.add_argument("--batch", type=int, default=64, help="rows of the timed batch")
    parser.add_argument("--json", type=Path, help="also write the comparison and the search's record to this file")
    given = parser.parse_args(arguments)
    epochs, final = (20, 60) if given.data is None else (3, 5)
    settings = Settings(
        given.trials,
        given.rows,
        given.epochs or epochs,
        given.final_epochs or final,
        given.seeds,
        given.batch,
        AUGMENTATION if given.data is None else [],
    )
    data = read_data(given.data)
    test = data.tests(3, seed=0)[0]
    train = np.random.default_rng(0).permutation(np.setdiff1d(np.arange(len(data.y)), test))
    first = Problem(data.name, 0, 1, data.x, data.y, train[:256]).fit(dict(LENET), 1, _RATE)
    limit_ms = measure([first], settings.batch)[0]
    print(f"LeNet-5: {limit_ms * 1e3:.1f} us for {settings.batch} rows", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        record = search(data, train, limit_ms, settings, Path(folder))
    lenet, found = rows = compare(data, train, test, record["recipe"]["model"], settings)
    _show(rows, record, len(test))
    broken = broken_promises(lenet, found)
    if given.json:
        table = [asdict(row) for row in rows]
        given.json.write_bytes(orjson.dumps({"table": table, "sweep": record["sweep"], "broken": broken}))
    for line in broken:
        print(line)
    return 1 if broken else 0


def _show(rows: Sequence[Row], record: Mapping[str, Any], tested: int) -> None:
    latency = record["sweep"]["latency"]
    print(f"model = {orjson.dumps(record['recipe']['model']).decode()}")
    print(latency["reason"])
    off = [abs(each["predicted_ms"] / each["measured_ms"] - 1) for each in latency["measured"] if each["predicted_ms"]]
    print(f"{len(off)} measured trials: predicted times were off by {statistics.median(off):.0%} (median)")
    shown = Table("architecture", f"accuracy of {tested:,} rows", "difference, points", "bytes", "us")
    for row in rows:
        differences = [ours - theirs for ours, theirs in zip(row.accuracies, rows[0].accuracies, strict=True)]
        error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
        shown.add_row(
            row.name,
            f"{statistics.fmean(row.accuracies):.2f} %",
            f"{statistics.fmean(differences):+.2f} +- {error:.2f}",
            f"{row.size:,}",
            f"{row.us:.1f}",
        )
    Console(width=140).print(shown)


if __name__ == "__main__":
    sys.exit(main())
