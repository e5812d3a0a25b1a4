"""Logits beside those of llama.cpp: `python -m loadtest generation llama FILE.gguf --llama PYTHON --texts TEXTS.json`.

TEXTS.json comes from the check greedy: prompts and the greedy tokens after them. Both engines are given the same tokens
(teacher forcing), and the table counts the places at which their best tokens are the same. Where they differ, `apart`
is the largest difference between an engine's logits of the two tokens. Perplexities are those of the documentation, in
pieces of 512 tokens, whose first half is context only.

llama.cpp rounds the rows of its products with codes to 8 bits. With `--float32 FILE.gguf`, a copy of the file with
weights in float32, the table has llama.cpp without this rounding, too, against which both can be judged.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from lathe.core.language.cached_decoder import CachedDecoder
from lathe.core.language.language_model import LanguageModel, load_language_model
from lathe.core.language.token_runner import Chunk
from loadtest.generation.prompts import long_text

CLOSE, SAME, PERPLEXITY = 0.05, 0.99, 0.005
_PIECE, _CONTEXT = 512, 256

Logits = NDArray[np.float32]
# Logits [places, vocabulary] of the places of a text from an index on.
Run = Callable[[list[int], int], Logits]


@dataclass
class Pair:
    """How two engines compare: places at which the best tokens are the same, all places, and the largest difference.

    `far`: the places with other best tokens at which an engine's logits of the two differ by `CLOSE` or more.
    """

    same: int = 0
    places: int = 0
    far: int = 0
    difference: float = 0.0

    def add(self, one: Logits, other: Logits) -> None:
        best, theirs = one.argmax(-1), other.argmax(-1)
        self.same += int((best == theirs).sum())
        self.places += len(best)
        for place in np.flatnonzero(best != theirs):
            two = [best[place], theirs[place]]
            gaps = [abs(float(np.subtract(*logits[place, two]))) for logits in (one, other)]
            self.far += min(gaps) >= CLOSE
        self.difference = max(self.difference, float(np.abs(one - other).max()))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest generation llama", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama", required=True, help="a Python with llama-cpp-python")
    parser.add_argument("--texts", type=Path, required=True, help="what the check greedy wrote")
    parser.add_argument("--float32", type=Path, help="the same weights in float32, as GGUF file")
    parser.add_argument("--precision", type=lambda text: text.split(","), default=["float32"])
    parser.add_argument("--tokens", type=int, default=10_000, help="of the text for perplexity")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(arguments)
    model = load_language_model(args.model)
    runs: dict[str, Run] = {}
    for precision in args.precision:
        runs[f"lathe {precision}"] = _lathe(model, args.threads, precision)
    runs["llama.cpp"] = _Peer(args.llama, args.model, args.threads)
    if args.float32:
        runs["llama.cpp float32"] = _Peer(args.llama, args.float32, args.threads)
    pairs = {names: Pair() for names in combinations(runs, 2)}
    for prompt, tokens in json.loads(args.texts.read_text()):
        found = {name: run([*prompt, *tokens[:-1]], len(prompt) - 1) for name, run in runs.items()}
        for (one, other), pair in pairs.items():
            pair.add(found[one], found[other])
    _show_pairs(pairs)
    perplexities = _perplexities(runs, long_text(model, args.tokens))
    _show_perplexities(perplexities)
    first = f"lathe {args.precision[0]}"
    pair, ratio = pairs[first, "llama.cpp"], perplexities[first] / perplexities["llama.cpp"]
    kept = pair.same >= SAME * pair.places or not pair.far
    return int(not kept or abs(ratio - 1) > PERPLEXITY)


def _lathe(model: LanguageModel, threads: int, precision: str) -> Run:
    decoder = CachedDecoder(model, pages=_PIECE // 32, capacity=_PIECE, threads=threads, precision=precision)

    def run(ids: list[int], at: int) -> Logits:
        return decoder.run([Chunk(np.array(ids), 0, range(_PIECE // 32), len(ids) - at)])

    return run


class _Peer:
    """llama.cpp in a process of its own."""

    def __init__(self, python: str, file: Path, threads: int) -> None:
        command = [python, "-m", "loadtest.generation.llama_cpp_logits", str(file.resolve()), str(threads)]
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
        self._out = Path(tempfile.mkdtemp()) / "logits.npy"

    def __call__(self, ids: list[int], at: int) -> Logits:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([ids, at, str(self._out)]) + "\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise SystemExit(f"{self._process.args!r} ended with status {self._process.wait()}")
        found: Logits = np.load(self._out)
        return found


def _perplexities(runs: Mapping[str, Run], tokens: list[int]) -> dict[str, float]:
    """exp(mean negative log-probability) of the second half of each piece."""
    losses: dict[str, list[float]] = {name: [] for name in runs}
    for start in range(0, len(tokens) - _PIECE + 1, _PIECE):
        piece = tokens[start : start + _PIECE]
        for name, run in runs.items():
            logits = run(piece[:-1], _CONTEXT).astype(np.float64)
            largest = logits.max(-1)
            total = largest + np.log(np.exp(logits - largest[:, None]).sum(-1))
            losses[name] += (total - logits[np.arange(len(logits)), piece[_CONTEXT + 1 :]]).tolist()
    return {name: float(np.exp(np.mean(each))) for name, each in losses.items()}


def _show_pairs(pairs: Mapping[tuple[str, str], Pair]) -> None:
    table = Table(
        "engines", "same best token", "places", "share", f"others {CLOSE} or more apart", "largest difference"
    )
    for (one, other), pair in pairs.items():
        share = f"{pair.same / pair.places:.2%}"
        row = (f"{one}, {other}", str(pair.same), str(pair.places), share, str(pair.far), f"{pair.difference:.2g}")
        table.add_row(*row)
    Console().print(table)


def _show_perplexities(perplexities: Mapping[str, float]) -> None:
    table = Table("engine", "perplexity")
    for name, perplexity in perplexities.items():
        table.add_row(name, f"{perplexity:.4f}")
    Console().print(table)
