"""Measures what compression costs and saves: `python -m loadtest compression`.

For each seed a model is trained on scikit-learn's digits by cross-validation: each row is tested once, by a model
that was not trained on it. With `--data`, it is trained on a file's rows but those held out
(`loadtest/image_sets.py`). Each method compresses the same trained models, so differences from float32 are paired.
The table has the mean accuracy over the seeds, the mean difference from float32 with its standard error, the bytes of
the file, and the processor time of a batch on one thread, all methods in turns.

The quantizers of ONNX Runtime, and with `--openvino PYTHON` those of NNCF, compress the same models with the same
calibration rows; their files are tested and timed in ONNX Runtime and OpenVINO. ONNX Runtime's quantizer of weights
needs the package onnx-ir. With `--work FOLDER` a run continues an earlier one with the same options, for example one
that `--limit` has ended (exit status 75).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from lathe.core.errors import UnsupportedError
from loadtest.compressed_files import Engine, hits, open_file
from loadtest.compression_results import FLOAT32, Results, Row, Score, markdown, rows_of
from loadtest.nncf_process import METHODS as NNCF_METHODS
from loadtest.nncf_process import NncfProcess
from loadtest.onnx_runtime_quantizer import quantize_file, quantize_weights_file

os.environ.setdefault("OMP_NUM_THREADS", "1")

Rows = NDArray[np.int64]

_CALIBRATION = 256  # rows
AUGMENTATION = [{"kind": "affine", "degrees": 15.0, "shift": 0.125, "scale": [0.9, 1.1], "shear": 11.0}]
_SEPARABLE = {"architecture": "convnet", "depth": 2, "block": "separable", "head": "flatten"}
_MODELS: Mapping[str, Mapping[str, Any]] = {
    "lenet5": {"architecture": "lenet5", "channels": [32, 64]},
    "separable": {**_SEPARABLE, "channels": [24, 48], "hidden": 64},
    "resnet-small": {"architecture": "resnet-small", "widths": [16, 32, 64]},
}
_STUDENTS: Mapping[str, Mapping[str, Any]] = {  # about a tenth of the weights
    "lenet5": {"architecture": "lenet5", "channels": [9, 20], "hidden": [44]},
    "separable": {**_SEPARABLE, "channels": [8, 12], "hidden": 20},
    "resnet-small": {"architecture": "resnet-small", "widths": [5, 10, 20]},
}
_ONNX_RUNTIME, _NNCF = "ONNX Runtime", "NNCF"
_UNFINISHED = 75  # EX_TEMPFAIL
_CALLS = 20  # of a model in each round of the timing


@dataclass(frozen=True)
class Problem:
    """One split of the digits, and the float32 model that was trained on its rows."""

    name: str
    seed: int
    epochs: int
    x: NDArray[np.uint8]
    y: NDArray[np.int64]
    train: Rows
    model: bytes = b""

    @property
    def calibration(self) -> dict[str, NDArray[Any]]:
        return {"x": self.x[self.train[:_CALIBRATION]]}

    def fit(self, model: bytes | Mapping[str, Any], epochs: int, rate: float, **tables: Any) -> bytes:
        """Train a model (a file, or the table of a recipe) on the rows of the split, and return the file."""
        import lathe
        from lathe.core.train.data import from_arrays
        from lathe.core.train.recipe import recipe
        from lathe.core.train.recipe.parent_model import Parent
        from lathe.core.train.recipe.training_setup import Resources
        from lathe.core.train.run import result
        from lathe.core.train.run.training_loop import FitRun

        tables = {"augment": AUGMENTATION, "schedule": {"kind": "one_cycle"}, **tables}
        is_file = isinstance(model, bytes)
        table = {"parent": True} if isinstance(model, bytes) else dict(model)
        if not is_file:
            tables["preprocess"] = [{"kind": "standardize"}]
        config = recipe.from_values(
            {
                "model": table,
                "data": {"held_out": 0.0},
                "epochs": epochs,
                "optimizer": {"kind": "adamw", "rate": rate, "weight_decay": 0.05 if not is_file else 0.0},
                "seed": self.seed,
                **tables,
            }
        )
        dataset = from_arrays({"x": self.x[self.train], "y": self.y[self.train]}, "images")
        parent = Parent(lathe.load(model)) if isinstance(model, bytes) else None
        teacher = lathe.load(self.model) if "distil" in tables else None
        with tempfile.TemporaryDirectory() as folder:
            FitRun(config, dataset, Path(folder), parent, Resources(threads=1), teacher).run()
            return (Path(folder) / result.FOLDER / result.MODEL).read_bytes()


Method = Callable[[Problem], bytes]


def _static(**options: Any) -> Method:
    import lathe

    return lambda problem: lathe.export(lathe.quantize(problem.model, problem.calibration, threads=1, **options))


def _weights(**options: Any) -> Method:
    import lathe

    return lambda problem: lathe.export(
        lathe.quantize_weights(problem.model, problem.calibration, threads=1, **options)
    )


def _trained(tuning: float, rate: float, **tables: Any) -> Method:
    """Fine-tune for a share `tuning` of the epochs of the first training."""
    return lambda problem: problem.fit(problem.model, max(round(tuning * problem.epochs), 1), rate, **tables)


def _fewer_channels(problem: Problem, **tables: Any) -> bytes:
    import lathe

    return problem.fit(lathe.export(lathe.prune_channels(problem.model, 0.5)), problem.epochs, 5e-3, **tables)


def _student(problem: Problem, **tables: Any) -> bytes:
    return problem.fit(_STUDENTS[problem.name], 2 * problem.epochs, 0.02, **tables)


def _from_float32(temperature: float, weight: float) -> dict[str, Any]:
    """The table of a distillation from the float32 model."""
    return {"teacher": "float32.onnx", "temperature": temperature, "weight": weight}


def _of_onnx_runtime(quantize: Callable[[Path, Path, list[dict[str, NDArray[Any]]]], None]) -> Method:
    """A method that writes a file from the file of the exact model and batches of calibration rows."""

    def make(problem: Problem) -> bytes:
        rows = problem.calibration["x"]
        batches = [{"x": rows[start : start + 32]} for start in range(0, len(rows), 32)]
        with tempfile.TemporaryDirectory() as folder:
            exact, small = (Path(folder) / name for name in ("exact.onnx", "small.onnx"))
            exact.write_bytes(problem.model)
            quantize(exact, small, batches)
            return small.read_bytes()

    return make


def _of_nncf(nncf: NncfProcess, method: str) -> Method:
    return lambda problem: nncf.make(method, problem.model, problem.calibration["x"])


def methods(nncf: NncfProcess | None) -> dict[str, Method]:
    """The methods by the names of their rows. Each makes the file of a compressed model."""
    import lathe

    found: dict[str, Method] = {
        FLOAT32: lambda problem: problem.model,
        "int8: static, percentile": _static(),
        "int8: static, min-max": _static(calibration="min-max"),
        "int8: static, entropy": _static(calibration="entropy"),
        "int8: static, mse": _static(calibration="mse"),
        "int8: static, one scale per tensor": _static(per_channel=False),
        "int8: the same, equalized": _static(per_channel=False, equalizes=True),
        "int8: the same, bias corrected": _static(per_channel=False, corrects_bias=True),
        "int8: the same, AdaRound": _static(per_channel=False, rounding="adaround"),
        "int8: static, AdaRound": _static(rounding="adaround"),
        "int8: dynamic": lambda problem: lathe.export(lathe.quantize_dynamic(problem.model)),
        f"{_ONNX_RUNTIME}: static, per channel": _of_onnx_runtime(quantize_file),
        f"{_ONNX_RUNTIME}: dynamic, per channel": _of_onnx_runtime(
            lambda exact, small, _: quantize_file(exact, small, None)
        ),
    }
    if find_spec("onnx_ir"):
        found[f"{_ONNX_RUNTIME}: weights of 4 bits"] = _of_onnx_runtime(
            lambda exact, small, _: quantize_weights_file(exact, small)
        )
    if nncf is not None:
        found |= {f"{_NNCF}: {each}": _of_nncf(nncf, each) for each in NNCF_METHODS}
    for bits in (4, 2):
        found |= {
            f"weights of {bits} bits: nearest": _weights(bits=bits),
            f"weights of {bits} bits: AdaRound": _weights(bits=bits, rounding="adaround"),
            f"weights of {bits} bits: GPTQ": _weights(bits=bits, method="gptq"),
            f"weights of {bits} bits: AWQ": _weights(bits=bits, method="awq"),
        }
    for code in ("int8", "int4", "int2", "ternary", "trained_ternary", "binary", "power_of_two"):
        found[f"trained: {code} weights, int8 activations"] = _trained(0.5, 2e-3, quantize={"weights": code})
    sparse = {"sparsity": 0.9, "together": True}
    return found | {
        "50 % zeros, 2:4, trained": _trained(0.5, 2e-3, prune={"sparsity": 0.5, "pattern": "2:4"}),
        "90 % zeros, no training": lambda problem: lathe.export(
            lathe.prune_weights(problem.model, 0.9, is_global=True)
        ),
        "90 % zeros, magnitude, trained": _trained(1.0, 1e-2, prune={**sparse, "end": 0.5}),
        "90 % zeros, magnitude, distilled": _trained(
            1.0, 1e-2, prune={**sparse, "end": 0.5}, distil=_from_float32(2.0, 0.5)
        ),
        "90 % zeros, movement, trained": _trained(1.0, 1e-2, prune={**sparse, "method": "movement"}),
        "half of the channels, no training": lambda problem: lathe.export(lathe.prune_channels(problem.model, 0.5)),
        "half of the channels, trained": _fewer_channels,
        "half of the channels, distilled": lambda problem: _fewer_channels(problem, distil=_from_float32(2.0, 0.5)),
        "a tenth of the weights, alone": _student,
        "a tenth of the weights, distilled": lambda problem: _student(problem, distil=_from_float32(2.0, 0.5)),
    }


@dataclass(frozen=True)
class Data:
    """Images uint8 [n, c, h, w], their classes int64 [n], and the rows held out; by default all are cross-validated."""

    name: str
    x: NDArray[np.uint8]
    y: NDArray[np.int64]
    held_out: NDArray[np.bool_] | None = None

    def tests(self, count: int, seed: int) -> list[Rows]:
        """The rows to test, in parts: those held out, or `count` parts of all rows."""
        return folds(self.y, count, seed) if self.held_out is None else [np.flatnonzero(self.held_out)]


def read_data(path: Path | None) -> Data:
    """The data of a file with the arrays x, y and test; the digits without a file."""
    if path is None:
        return Data("digits", *digits())
    with np.load(path) as file:
        return Data(path.stem, file["x"], file["y"], file["test"])


def digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """scikit-learn's digits: images uint8 [1797, 1, 8, 8], classes int64 [1797]."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return data.images.astype(np.uint8)[:, None], data.target.astype(np.int64)


def folds(classes: NDArray[np.int64], count: int, seed: int) -> list[Rows]:
    """`count` disjoint parts of all rows with about equal shares of each class."""
    random = np.random.default_rng(seed)
    part = np.empty(len(classes), np.int64)
    for each in np.unique(classes):
        rows = random.permutation(np.flatnonzero(classes == each))
        part[rows] = (np.arange(len(rows)) + each) % count
    return [np.flatnonzero(part == number) for number in range(count)]


def engine_of(method: str) -> Engine:
    """The engine that runs the files of a method."""
    if method.startswith(_ONNX_RUNTIME):
        return "onnxruntime"
    return "openvino" if method.startswith(_NNCF) else "lathe"


@dataclass(frozen=True)
class Plan:
    """A measurement: each method with each seed, on the first `parts` parts of the tested rows."""

    model: str
    data: Data
    methods: Mapping[str, Method]
    seeds: Sequence[int]
    folds: int
    parts: int
    epochs: int


def measure(plan: Plan, results: Results, nncf: NncfProcess | None, end: float) -> bool:
    """Measure the scores that are missing in `results`; false if the time `end` came before."""
    for seed in plan.seeds:
        for part, test in list(enumerate(plan.data.tests(plan.folds, seed)))[: plan.parts]:
            problem: Problem | None = None
            for method, make in plan.methods.items():
                if results.has(method, seed, part):
                    continue
                if time.monotonic() > end:
                    return False
                problem = problem or _problem(plan, results, seed, part, test)
                try:
                    file = make(problem)
                except UnsupportedError as error:  # such as no weight that is large enough
                    print(f"{method} is left out: {error}", flush=True)
                    continue
                opened = open_file(file, engine_of(method), nncf)
                score = Score(method, seed, part, hits(opened, problem.x[test], problem.y[test]), len(test))
                opened.close()
                results.add(score, file)
                print(f"seed {seed}, part {part}: {method} {score.hits / score.rows:.2%}", flush=True)
    return True


def _problem(plan: Plan, results: Results, seed: int, part: int, test: Rows) -> Problem:
    """The split with its trained float32 model."""
    train = np.setdiff1d(np.arange(len(plan.data.y)), test)
    train = np.random.default_rng(seed).permutation(train)
    problem = Problem(plan.model, seed, plan.epochs, plan.data.x, plan.data.y, train)
    name = f"{plan.data.name}-{plan.model}-{plan.epochs}-{plan.folds}-{seed}-{part}"
    return replace(problem, model=results.model(name, lambda: problem.fit(_MODELS[plan.model], plan.epochs, 0.01)))


def times(
    files: Mapping[str, bytes], x: NDArray[np.uint8], rounds: int, nncf: NncfProcess | None = None
) -> dict[str, float]:
    """The median over rounds of the processor seconds of the batch `x`, all files in turns."""
    opened = {method: open_file(model, engine_of(method), nncf) for method, model in files.items()}
    found: dict[str, list[float]] = {method: [] for method in opened}
    for number in range(rounds + 1):  # the first round warms up
        for method, file in opened.items():
            seconds = file.seconds(x, _CALLS)
            if number:
                found[method].append(seconds)
    for file in opened.values():
        file.close()
    return {method: statistics.median(each) for method, each in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m loadtest compression", description=__doc__)
    parser.add_argument("--model", default="lenet5", choices=list(_MODELS), help="architecture")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0, help="the first seed")
    parser.add_argument("--data", type=Path, help="file of images (image_sets.py); default: the digits")
    parser.add_argument("--folds", type=int, default=5, help="parts of the cross-validation")
    parser.add_argument("--epochs", type=int, default=60, help="epochs of the float32 model")
    parser.add_argument("--batch", type=int, default=64, help="rows of the timed batch")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of the timing; the medians are shown")
    parser.add_argument("--only", help="comma-separated parts of the names of methods; float32 is always measured")
    parser.add_argument("--parts", type=int, help="test this number of parts of each cross-validation; default: all")
    parser.add_argument("--json", type=Path, help="also write the table, and the accuracies by seed, to this file")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--openvino", metavar="PYTHON", help="a Python that has openvino and nncf")
    parser.add_argument("--work", type=Path, help="folder of models and scores, with which a later run goes on")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds; methods that have begun end later")
    options = parser.parse_args(arguments)
    nncf = NncfProcess(options.openvino) if options.openvino else None
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _measure_and_print(options, Results(options.work or Path(folder)), nncf)
    finally:
        if nncf is not None:
            nncf.close()


def _measure_and_print(options: argparse.Namespace, results: Results, nncf: NncfProcess | None) -> int:
    wanted = options.only.split(",") if options.only else [""]
    chosen = {
        name: make for name, make in methods(nncf).items() if name == FLOAT32 or any(part in name for part in wanted)
    }
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    data, parts = read_data(options.data), options.parts or options.folds
    plan = Plan(options.model, data, chosen, seeds, options.folds, parts, options.epochs)
    if not measure(plan, results, nncf, time.monotonic() + options.limit):
        return _UNFINISHED
    files = {method: results.file(method) for method in chosen if results.has(method, seeds[0], 0)}
    by_seed = results.by_seed(list(files), seeds, parts)
    sizes = {method: len(file) for method, file in files.items()}
    table = rows_of(by_seed, sizes, times(files, data.x[: options.batch], options.rounds, nncf))
    _show(table)
    if options.json:
        options.json.write_bytes(orjson.dumps({"table": [asdict(row) for row in table], "seeds": by_seed}))
    if options.markdown:
        options.markdown.write_text(markdown(table))
    return 0


def _show(table: Sequence[Row]) -> None:
    shown = Table("method", "accuracy", "difference, points", "bytes", "us", "times as fast as float32")
    exact = next(row.us for row in table if row.method == FLOAT32)
    for row in table:
        difference = f"{row.difference:+.2f} +- {row.error:.2f}"
        shown.add_row(
            row.method, f"{row.accuracy:.2f} %", difference, f"{row.size:,}", f"{row.us:.0f}", f"{exact / row.us:.2f}"
        )
    Console(width=140).print(shown)


if __name__ == "__main__":
    sys.exit(main())
