"""Measures text generation over the planned cache: `python -m loadtest generate MODEL`.

MODEL is a GGUF file or a Hugging Face folder. Cells: tokens of a prompt per second until its first token, tokens per
second of one stream behind a prompt, and those of several streams together, prompts included. All decode greedily.
Each `--peer ENGINE PYTHON MODEL` adds an engine (llama, ik_llama, onnx_runtime, openvino) that PYTHON has, and its
file or folder. Each engine has a process of its own; they take turns in every cell, each with an untimed run first,
and the table has medians. `--clock cpu` counts the processor seconds of the process instead of the time that passes:
on one thread, so that other programs on the machine matter less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from loadtest.generation_peers.peer_protocol import CHUNK, Row, greedy, serve

_PROMPTS, _STREAMS = (32, 128, 512), (4, 8, 16)
_NEW = 32  # tokens of a stream
_PAGE, _PAGES = 32, 16 * (CHUNK + 2 * _NEW) // 32
# Prompts, tokens per prompt, and the tokens whose rate counts: all if `whole`, otherwise those after the first ones.
Cell = tuple[list[list[int]], int, int, bool]


def main(arguments: Sequence[str]) -> int:
    args = _parser().parse_args(arguments)
    if args.worker:
        _serve_lathe(args.model, args.threads[0], args.precision[0])
        return 0
    rows = []
    for threads in args.threads:
        engines = {f"lathe {each}": _lathe(args.model, threads, each) for each in args.precision}
        for engine, python, model in args.peer:
            engines[f"{engine} {Path(model).stem}"] = _peer(engine, python, model, threads)
        rows += [{"threads": threads, **row} for row in _measured(engines, args.rounds, args.clock)]
    print(json.dumps(rows, indent=1)) if args.json else _show(rows)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest generate", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=lambda text: [int(each) for each in text.split(",")], default=[1, 2])
    parser.add_argument("--precision", type=lambda text: text.split(","), default=["float32"])
    parser.add_argument("--peer", nargs=3, action="append", default=[], metavar=("ENGINE", "PYTHON", "MODEL"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


class _Worker:
    """An engine in a process of its own, which answers one request at a time."""

    def __init__(self, command: Sequence[str], cwd: Path | None = None) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=cwd)
        limits = self._answer()
        self.vocabulary, self.context = int(limits["vocabulary"]), int(limits["context"])

    def ask(self, prompts: list[list[int]], count: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([prompts, count]) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = self._answer()
        return answer

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args!r} ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate()


def _lathe(model: Path, threads: int, precision: str) -> _Worker:
    options = [str(model), "--threads", str(threads), "--precision", precision, "--worker"]
    return _Worker([sys.executable, "-m", "loadtest", "generate", *options])


def _peer(engine: str, python: str, model: str, threads: int) -> _Worker:
    script = Path(__file__).parent / "generation_peers" / f"{engine}_peer.py"
    if not script.exists():
        names = sorted(path.stem.removesuffix("_peer") for path in script.parent.glob("*_peer.py"))
        raise SystemExit(f"--peer: expected an engine of {', '.join(names)}, got {engine!r}")
    module = f"loadtest.generation_peers.{script.stem}"
    return _Worker([python, "-m", module, str(Path(model).resolve()), str(threads)], cwd=Path(__file__).parents[1])


def _cells(vocabulary: int, context: int) -> dict[str, Cell]:
    """The cells for a model with these limits, with prompts of random tokens."""
    rng = np.random.default_rng(0)

    def prompt(length: int) -> list[int]:
        return [int(token) for token in rng.integers(0, vocabulary, length)]

    cells: dict[str, Cell] = {}
    for length in _PROMPTS:
        cells[f"prefill{length}"] = [prompt(length)], 1, length, True
    for length in (_PROMPTS[0], _PROMPTS[-1]):
        cells[f"decode{length}"] = [prompt(length)], _NEW, _NEW - 1, False
    for streams in _STREAMS:
        cells[f"c{streams}"] = [prompt(_PROMPTS[0]) for _ in range(streams)], _NEW, streams * _NEW, True
    return {label: cell for label, cell in cells.items() if len(cell[0][0]) + cell[1] <= context}


def _measured(engines: Mapping[str, _Worker], rounds: int, clock: str) -> list[dict[str, Any]]:
    """A row for each engine: the medians of all cells, and the memory at the end."""
    rows: dict[str, dict[str, Any]] = {name: {"engine": name} for name in engines}
    vocabulary, context = (min(getattr(e, limit) for e in engines.values()) for limit in ("vocabulary", "context"))
    for label, (prompts, count, tokens, whole) in _cells(vocabulary, context).items():
        found: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(rounds):
            for name, engine in engines.items():
                engine.ask(prompts, count)  # meanwhile the threads of the engine before stop spinning
                answer = engine.ask(prompts, count)
                first, last = answer[clock]
                found[name].append(tokens / (last if whole else last - first))
                rows[name]["rss_mib"] = answer["rss"]
        for name, rates in found.items():
            rows[name][label] = round(statistics.median(rates), 1)
    for engine in engines.values():
        engine.close()
    return list(rows.values())


def _serve_lathe(path: Path, threads: int, precision: str) -> None:
    from lathe.core.language.cached_decoder import CachedDecoder
    from lathe.core.language.language_model import load_language_model
    from lathe.core.language.token_runner import Chunk

    model = load_language_model(path)
    decoder = CachedDecoder(model, pages=_PAGES, page_size=_PAGE, capacity=CHUNK, threads=threads, precision=precision)
    share = _PAGES // _STREAMS[-1]

    def step(rows: Sequence[Row]) -> list[int]:
        chunks, start = [], 0
        for at in range(1, len(rows) + 1):
            if at == len(rows) or rows[at][2] != rows[start][2]:
                part, sequence = rows[start:at], rows[start][2]
                tokens = np.array([row[0] for row in part])
                pages = range(sequence * share, (sequence + 1) * share)
                chunks.append(Chunk(tokens, part[0][1], pages, sum(row[3] for row in part)))
                start = at
        return [int(token) for token in decoder.run(chunks).argmax(-1)]

    serve(lambda prompts, count: greedy(step, prompts, count), decoder.vocabulary, decoder.context)


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    names = [name for name in rows[0] if name != "rss_mib"]
    table = Table(*names, "rss_mib", title="tokens per second, medians")
    for row in rows:
        table.add_row(*(str(row[name]) for name in (*names, "rss_mib")))
    Console().print(table)
