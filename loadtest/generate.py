"""Measures text generation over the planned cache: `python -m loadtest generate MODEL`.

MODEL is a GGUF file or a Hugging Face folder. Cells: tokens of a prompt per second until its first token, tokens per
second of one stream behind a prompt, and those of several streams together, prompts included. All decode greedily.
With `--llama PYTHON`, a Python that has llama-cpp-python runs the same GGUF file. Each engine has a process of its own;
they take turns in every cell, and the table has medians. `--clock cpu` counts the processor seconds of the process
instead of the time that passes: on one thread, so that other programs on the machine matter less.
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

from loadtest.llama_cpp_peer import CHUNK, Row, serve

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
        if args.llama:
            peer = Path(__file__).with_name("llama_cpp_peer.py")
            engines["llama.cpp"] = _Worker([args.llama, str(peer), str(args.model), str(threads)])
        rows += [{"threads": threads, **row} for row in _measured(engines, args.rounds, args.clock)]
    print(json.dumps(rows, indent=1)) if args.json else _show(rows)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest generate", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=lambda text: [int(each) for each in text.split(",")], default=[1, 2])
    parser.add_argument("--precision", type=lambda text: text.split(","), default=["float32"])
    parser.add_argument("--llama", help="a Python with llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


class _Worker:
    """An engine in a process of its own, which answers one request at a time."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

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
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _lathe(model: Path, threads: int, precision: str) -> _Worker:
    options = [str(model), "--threads", str(threads), "--precision", precision, "--worker"]
    return _Worker([sys.executable, "-m", "loadtest", "generate", *options])


def _cells() -> dict[str, Cell]:
    rng = np.random.default_rng(0)

    def prompt(length: int) -> list[int]:
        return [int(token) for token in rng.integers(100, 40_000, length)]

    cells: dict[str, Cell] = {}
    for length in _PROMPTS:
        cells[f"prefill{length}"] = [prompt(length)], 1, length, True
    for length in (_PROMPTS[0], _PROMPTS[-1]):
        cells[f"decode{length}"] = [prompt(length)], _NEW, _NEW - 1, False
    for streams in _STREAMS:
        cells[f"c{streams}"] = [prompt(_PROMPTS[0]) for _ in range(streams)], _NEW, streams * _NEW, True
    return cells


def _measured(engines: Mapping[str, _Worker], rounds: int, clock: str) -> list[dict[str, Any]]:
    """A row for each engine: the medians of all cells, and the memory at the end."""
    rows: dict[str, dict[str, Any]] = {name: {"engine": name} for name in engines}
    for label, (prompts, count, tokens, whole) in _cells().items():
        found: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(rounds):
            for name, engine in engines.items():
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

    serve(step, lambda: None)


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    names = [name for name in rows[0] if name != "rss_mib"]
    table = Table(*names, "rss_mib", title="tokens per second, medians")
    for row in rows:
        table.add_row(*(str(row[name]) for name in (*names, "rss_mib")))
    Console().print(table)
