"""Measures models that Lathe quantized: `python -m loadtest quantized MODEL.onnx ...`.

Each model is quantized to int8 with the defaults of `lathe quantize`, and by ONNX Runtime's own quantizer: static in
QDQ form per channel, and dynamic. With `--openvino PYTHON`, a Python that has OpenVINO and NNCF quantizes it as well.
All engines take turns, round after round, with the float32 model of each; times are medians of wall time. "ahead" is
the median over rounds of the best peer's time with int8 by Lathe's.

All free dimensions of inputs but the first are `--length`. Floating-point inputs have normal random numbers; integer
inputs have random token ids, but those named *mask* are 1 and those named *type* are 0. A model with integer inputs
counts as a transformer for NNCF. The error is relative to the float32 model's largest output.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from rich.console import Console
from rich.table import Table

from loadtest.onnx_runtime_peer import onnx_runtime
from loadtest.onnx_runtime_quantizer import Feeds, quantize_file
from loadtest.row_limits import add_result_options, finish
from loadtest.timing import relative_error, slice_ms

Run = Callable[[float], float]  # seconds to the median milliseconds of a call

_CALIBRATION = 32  # rows
_TOKENS = 1000  # random token ids are below
_OURS = "lathe"
_LEAST_WORST, _LEAST_MEAN = 0.95, 1.1  # of the best peer's time by Lathe's


@dataclass(frozen=True)
class Row:
    """One model at one batch size: median milliseconds of each engine with float32 and int8, and errors of int8."""

    model: str
    batch: int
    threads: int
    float32_ms: dict[str, float]
    int8_ms: dict[str, float]
    error: dict[str, float]
    ahead: float  # the best peer's time with int8 by Lathe's

    @property
    def gain(self) -> float:
        """Lathe's time with float32 by its time with int8."""
        return self.float32_ms[_OURS] / self.int8_ms[_OURS]


class _OpenVino:
    """The process of `loadtest.quantized_peer` for one model."""

    def __init__(self, python: str, model: Path, calibration: Path, threads: int, kind: str) -> None:
        command = [python, "-m", "loadtest.quantized_peer", str(model), str(calibration), str(threads), kind]
        root = Path(__file__).parents[1]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=root
        )
        self._answer()

    def ask(self, feeds: Path, seconds: float, quantized: bool) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(feeds), seconds, quantized]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> dict[str, float]:
        """The next line that is JSON: NNCF prints its progress as well."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, float] = json.loads(line)
                return answer
        raise SystemExit(f"{self._process.args!r} ended with status {self._process.wait()}")


def make_feeds(model: onnx.ModelProto, rows: int, length: int, seed: int) -> Feeds:
    """Random inputs of a model with `rows` rows."""
    rng, feeds = np.random.default_rng(seed), {}
    constants = {tensor.name for tensor in model.graph.initializer}
    for given in model.graph.input:
        if given.name in constants:
            continue
        dims = [dim.dim_value or length for dim in given.type.tensor_type.shape.dim]
        shape = (rows, *dims[1:])
        dtype = onnx.helper.tensor_dtype_to_np_dtype(given.type.tensor_type.elem_type)
        if dtype.kind == "f":
            feeds[given.name] = rng.standard_normal(shape).astype(dtype)
        elif "mask" in given.name:
            feeds[given.name] = np.ones(shape, dtype)
        else:
            feeds[given.name] = (rng.integers(1, _TOKENS, shape) * ("type" not in given.name)).astype(dtype)
    return feeds


def onnx_runtime_files(model: Path, calibration: Feeds, folder: Path) -> dict[str, Path]:
    """The files of ONNX Runtime's quantizer by method."""
    files = {kind: folder / f"{kind}.onnx" for kind in ("ort static", "ort dynamic")}
    rows = range(len(next(iter(calibration.values()))))
    batches = ({name: array[row : row + 1] for name, array in calibration.items()} for row in rows)
    quantize_file(model, files["ort static"], batches, "QInt8")
    quantize_file(model, files["ort dynamic"], None)
    return files


class _Engines:
    """All engines with one model, in float32 and in int8."""

    def __init__(self, path: Path, calibration: Feeds, folder: Path, options: argparse.Namespace) -> None:
        import lathe

        small = lathe.export(lathe.quantize(path, calibration))
        most = max(options.batches)
        self._ours = [lathe.compile(each, threads=options.threads, max_batch=most) for each in (path, small)]
        self._exact_peer = onnx_runtime(path, options.threads)
        files = onnx_runtime_files(path, calibration, folder)
        self._peers = {name: onnx_runtime(file, options.threads) for name, file in files.items()}
        self._openvino: _OpenVino | None = None
        if options.openvino:
            kind = "transformer" if any(array.dtype.kind == "i" for array in calibration.values()) else "convolutions"
            file = _save(folder / "calibration.npz", calibration)
            self._openvino = _OpenVino(options.openvino, path.resolve(), file, options.threads, kind)

    def runs(self, feeds: Feeds, file: Path) -> dict[tuple[str, bool], Run]:
        """What each engine does with feeds, which `file` has as well; by engine and whether the model is int8."""

        def ours(session: Any) -> Run:
            return lambda seconds: slice_ms(lambda: session.run(feeds), seconds)

        def theirs(session: Any) -> Run:
            return lambda seconds: slice_ms(lambda: session.run(None, feeds), seconds)

        def foreign(process: _OpenVino, quantized: bool) -> Run:
            return lambda seconds: process.ask(file, seconds, quantized)["ms"]

        runs = {(_OURS, bool(i)): ours(session) for i, session in enumerate(self._ours)}
        runs["ort", False] = theirs(self._exact_peer)
        runs |= {(name, True): theirs(session) for name, session in self._peers.items()}
        if self._openvino:
            runs |= {("openvino", quantized): foreign(self._openvino, quantized) for quantized in (False, True)}
        return runs

    def errors(self, feeds: Feeds, file: Path) -> dict[str, float]:
        """The relative error of each engine's int8 model against its own float32 model."""
        exact, small = (next(iter(session.run(feeds).values())) for session in self._ours)
        want = self._exact_peer.run(None, feeds)[0]
        found = {_OURS: relative_error(np.asarray(small), np.asarray(exact))}
        found |= {name: relative_error(peer.run(None, feeds)[0], want) for name, peer in self._peers.items()}
        if self._openvino:
            found["openvino"] = self._openvino.ask(file, 0.0, True)["error"]
        return found

    def close(self) -> None:
        if self._openvino:
            self._openvino.close()


def measure(path: Path, options: argparse.Namespace) -> Iterator[Row]:
    """The rows of one model."""
    model = onnx.load(path)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engines = _Engines(path, make_feeds(model, _CALIBRATION, options.length, 0), folder, options)
        for batch in options.batches:
            feeds = make_feeds(model, batch, options.length, batch)
            file = _save(folder / f"feeds-{batch}.npz", feeds)
            runs = engines.runs(feeds, file)
            for run in runs.values():
                run(options.slice)
            rounds = [{key: run(options.slice) for key, run in runs.items()} for _ in range(options.rounds)]
            yield _row(path.stem, batch, options.threads, rounds, engines.errors(feeds, file))
        engines.close()


def _row(
    model: str, batch: int, threads: int, rounds: Sequence[Mapping[tuple[str, bool], float]], error: dict[str, float]
) -> Row:
    medians = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    exact, small = ({e: ms for (e, quantized), ms in medians.items() if quantized is kind} for kind in (False, True))
    peers = [engine for engine in small if engine != _OURS]
    ahead = statistics.median(min(each[peer, True] for peer in peers) / each[_OURS, True] for each in rounds)
    return Row(model, batch, threads, exact, small, error, ahead)


def _save(file: Path, feeds: Feeds) -> Path:
    save: Any = np.savez  # its stub takes no keyword arguments of other types
    save(file, **feeds)
    return file


def missed(rows: Sequence[Row]) -> list[str]:
    """Lines for limits that the table misses."""
    ratios = [row.ahead for row in rows]
    mean = statistics.geometric_mean(ratios)
    lines = [f"geometric mean {mean:.2f}, expected {_LEAST_MEAN}"] if mean < _LEAST_MEAN else []
    behind = [row for row in rows if row.ahead < _LEAST_WORST]
    return lines + [f"{row.model}, batch {row.batch}: {row.ahead:.2f}, expected {_LEAST_WORST}" for row in behind]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest quantized", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.onnx")
    parser.add_argument("--batches", type=lambda text: [int(each) for each in text.split(",")], default=[1, 8])
    parser.add_argument("--length", type=int, default=128, help="extent of free dimensions but the first")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--slice", type=float, default=0.4, help="seconds per engine and round")
    parser.add_argument("--openvino", metavar="PYTHON", help="a Python that has openvino and nncf")
    add_result_options(parser)
    options = parser.parse_args(arguments)
    rows = [row for model in options.models for row in measure(model, options)]
    _show(rows)
    return finish(options, rows, missed(rows))


def _show(rows: Sequence[Row]) -> None:
    engines = list(dict.fromkeys(engine for row in rows for engine in (*row.float32_ms, *row.int8_ms)))
    table = Table("model", "batch", *(f"{engine}: float32, int8 ms (error)" for engine in engines), "gain", "ahead")
    for row in rows:
        cells = []
        for engine in engines:
            exact, small = (
                f"{times[engine]:.2f}" if engine in times else "-" for times in (row.float32_ms, row.int8_ms)
            )
            cells.append(f"{exact}, {small}" + (f" ({row.error[engine]:.1%})" if engine in row.error else ""))
        table.add_row(row.model, str(row.batch), *cells, f"{row.gain:.2f}", f"{row.ahead:.2f}")
    Console(width=200).print(table)
    print(f"geometric mean of ahead: {statistics.geometric_mean([row.ahead for row in rows]):.2f}")


if __name__ == "__main__":
    sys.exit(main())
