"""Greedy tokens beside those of Transformers: `python -m loadtest generation greedy FILE.gguf --transformers PYTHON`.

For 20 prompts and 256 tokens each, with the weights of the file in float32. The promise: tokens are equal, or at the
first difference the two best logits of Transformers are closer than 1e-4. `graph` is the decoder without a cache;
`cache` is `CachedDecoder` on a copy of the model whose weights are float32; `codes` is `CachedDecoder` as it is served,
where products with codes round their rows to 16 bits: no promise, the table shows it. With `--onnx FOLDER`, a decoder
with past as ONNX file of the same weights, this decoder is compared, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import lathe
from lathe.core.language.cached_decoder import CachedDecoder
from lathe.core.language.generation.generator import load_model, make_runner
from lathe.core.language.generation.options import GeneratorOptions
from lathe.core.language.language_model import load_language_model
from lathe.core.language.token_runner import Chunk, TokenRunner
from loadtest.generation.prompts import greedy_prompts

CLOSE = 1e-4  # of two logits: in float32, either may be the greater one
_PAGES = 16

# Logits of the places from an index on, [places, vocabulary], of the tokens of a text.
Run = Callable[[list[int], int], NDArray[np.float32]]
Form = Callable[[Path, int], AbstractContextManager[Run]]  # from a file and the number of threads


@dataclass(frozen=True)
class Expected:
    """For each prompt the greedy tokens, int64 [prompts, NEW], and the differences of the two best logits."""

    tokens: NDArray[np.int64]
    gaps: NDArray[np.float32]


@dataclass(frozen=True)
class Found:
    """How one form of the decoder compares.

    `equal`: prompts with equal tokens. `places`: places of all texts at which another token is best, given the same
    tokens before. `gap`: the largest difference of the two best logits at the first such place of a text.
    """

    form: str
    equal: int
    places: int
    gap: float


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest generation greedy", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--transformers", required=True, help="a Python with torch, Transformers and gguf")
    parser.add_argument("--onnx", type=Path, action="append", default=[], help="a folder with an ONNX file")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=Path, help="write the texts to this file, for the check llama")
    args = parser.parse_args(arguments)
    model = load_language_model(args.model)
    prompts = greedy_prompts(model)
    expected = _expected(args.transformers, args.model, prompts, args.tokens)
    if args.texts:
        texts = [[prompt, found] for prompt, found in zip(prompts, expected.tokens.tolist(), strict=True)]
        args.texts.write_text(json.dumps(texts))
    rows = []
    forms: list[tuple[str, Form, Path]] = [(name, make, args.model) for name, make in FORMS.items()]
    forms += [(folder.name, _onnx, folder) for folder in args.onnx]
    for form, make, path in forms:
        with make(path, args.threads) as run:
            rows.append(_compared(form, prompts, expected, run))
    _show(rows, expected.tokens.shape)
    return int(any(row.form != "codes" and row.gap >= CLOSE for row in rows))


def _expected(python: str, file: Path, prompts: list[list[int]], new: int) -> Expected:
    with tempfile.TemporaryDirectory() as folder:
        out, given = Path(folder) / "out.npz", Path(folder) / "prompts.json"
        given.write_text(json.dumps(prompts))
        peer = Path(__file__).with_name("transformers_peer.py")
        subprocess.run([python, peer, file, given, str(new), out], check=True)
        found: Any = np.load(out)
        return Expected(found["tokens"], found["gaps"])


def _compared(form: str, prompts: list[list[int]], expected: Expected, run: Run) -> Found:
    """Each place is given the tokens of Transformers before it.

    So greedy decoding finds the same tokens up to the first place that differs: logits depend on earlier tokens alone.
    """
    equal = places = 0
    gap = 0.0
    for prompt, tokens, gaps in zip(prompts, expected.tokens, expected.gaps, strict=True):
        best = run([*prompt, *tokens[:-1].tolist()], len(prompt) - 1).argmax(-1)
        differing = np.flatnonzero(best != tokens)
        equal += not len(differing)
        places += len(differing)
        gap = max(gap, *(float(gaps[place]) for place in differing[:1]), 0.0)
    return Found(form, equal, places, gap)


@contextmanager
def _graph(file: Path, threads: int) -> Iterator[Run]:
    graph = load_language_model(file).graph
    with lathe.compile(graph, threads=threads, tune="off", new_shapes="wait") as session:
        yield lambda ids, at: session.run({"input_ids": np.array([ids])})["logits"][0, at:]


@contextmanager
def _cache(file: Path, threads: int) -> Iterator[Run]:
    """The cached decoder with weights in float32."""
    model = load_language_model(file)
    for _, parameter in model.module.named_state():
        parameter.data = parameter.data  # no longer the codes of the file
    with _token_by_token(CachedDecoder(model, pages=_PAGES, threads=threads)) as run:
        yield run


@contextmanager
def _onnx(folder: Path, threads: int) -> Iterator[Run]:
    """As the server runs it: over pages in the form of ONNX Runtime GenAI, otherwise by `PastRunner`."""
    with _token_by_token(make_runner(load_model(folder), GeneratorOptions(threads=threads))) as run:
        yield run


@contextmanager
def _codes(file: Path, threads: int) -> Iterator[Run]:
    with _token_by_token(CachedDecoder(load_language_model(file), pages=_PAGES, threads=threads)) as run:
        yield run


@contextmanager
def _token_by_token(runner: TokenRunner) -> Iterator[Run]:
    """The prompt is one chunk, then each token is one."""

    def run(ids: list[int], at: int) -> NDArray[np.float32]:
        parts = [(0, at + 1), *((place, place + 1) for place in range(at + 1, len(ids)))]
        chunks = (Chunk(np.array(ids[start:stop]), start, range(_PAGES)) for start, stop in parts)
        return np.concatenate([runner.run([chunk]) for chunk in chunks])

    with closing(runner):
        yield run


FORMS: dict[str, Form] = {"graph": _graph, "cache": _cache, "codes": _codes}


def _show(rows: Sequence[Found], shape: tuple[int, ...]) -> None:
    table = Table("form", "equal texts", "places that differ", "gap at the first", title=f"texts, tokens: {shape}")
    for row in rows:
        table.add_row(row.form, str(row.equal), str(row.places), f"{row.gap:.2g}")
    Console().print(table)
