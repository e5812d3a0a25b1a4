"""Decoders with a cache: the tokens of Transformers, any mix of chunks, shared pages, no compilation after loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lathe
from lathe.core.compiler import pipeline
from lathe.core.errors import FeedError
from lathe.core.ir.types import DType
from lathe.core.language.cached_decoder import CachedDecoder
from lathe.core.language.cached_graph import page_bytes
from lathe.core.language.token_runner import Chunk
from lathe.core.precisions import PRECISIONS
from tests.core.language.checkpoints import IDS, NEW, PROMPT, gguf_parts, weight
from tests.core.language.families import EXPECTED, FAMILIES, config, write_folder
from tests.core.language.gguf_writer import floats, gguf_bytes

PAGE, PAGES = 16, 40
_SHUFFLED = np.random.default_rng(0).permutation(PAGES).tolist()


def decoder_of(folder: Path, name: str, **options: Any) -> CachedDecoder:
    model = lathe.load_language_model(write_folder(folder, name))
    return CachedDecoder(model, pages=PAGES, page_size=PAGE, capacity=96, threads=2, **options)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> CachedDecoder:
    """Grouped queries and a window in some layers."""
    return decoder_of(tmp_path_factory.mktemp("decoder"), "qwen2-window")


def pages_of(sequence: int) -> list[int]:
    """Eight pages of a sequence, which lie apart and in no order."""
    return _SHUFFLED[8 * sequence : 8 * sequence + 8]


def chunk(tokens: Any, position: int, sequence: int, wanted: int | None = None) -> Chunk:
    tokens = np.asarray(tokens, np.int64)
    return Chunk(tokens, position, pages_of(sequence), len(tokens) if wanted is None else wanted)


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, 1e-4, 1e-4 * np.abs(expected).max())


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    decoder = decoder_of(tmp_path, name)
    logits = EXPECTED[f"{name}/logits"]
    assert_close(decoder.run([chunk(IDS[row], 0, row) for row in range(len(IDS))]), np.concatenate(logits))
    tokens = list(PROMPT)
    found = decoder.run([chunk(tokens, 0, 2, 1)])
    for _ in range(NEW):
        tokens.append(int(found[0].argmax()))
        found = decoder.run([chunk(tokens[-1:], len(tokens) - 1, 2)])
    assert tokens == EXPECTED[f"{name}/tokens"].tolist()
    for executable in decoder.executables:
        assert "FALLBACK" not in "\n".join(executable.explain(1))
        assert not executable.plan.copies, "the cache is written in place"
    decoder.close()


def test_chunks_and_single_tokens_share_a_run(decoder: CachedDecoder) -> None:
    """Each sequence gets the logits of a whole run, however its tokens are cut and whatever else runs with them."""
    row, other = IDS[0].tolist(), IDS[1].tolist()
    decoder.run([chunk(row[:5], 0, 0), chunk(other[:17], 0, 1), chunk(row[:1], 0, 2)])
    mixed = decoder.run([chunk(row[5:6], 5, 0), chunk(other[17:], 17, 1), chunk(row[1:20], 1, 2, 3)])
    last = decoder.run([chunk(row[20:], 20, 2), chunk(row[6:21], 6, 0, 1)])
    expected = EXPECTED["qwen2-window/logits"]
    assert_close(mixed, np.concatenate([expected[0, 5:6], expected[1, 17:], expected[0, 17:20]]))
    assert_close(last, np.concatenate([expected[0, 20:], expected[0, 20:21]]))


def test_sequences_share_the_pages_of_a_prefix(decoder: CachedDecoder) -> None:
    row = IDS[0].tolist()
    first = pages_of(0)
    decoder.run([Chunk(np.array(row[:PAGE]), 0, first, 0)])
    before = decoder.executables[0].state("keys.0")
    second = [first[0], *pages_of(1)[1:]]
    both = decoder.run([Chunk(np.array(row[PAGE:]), PAGE, pages, 1) for pages in (first, second)])
    assert_close(both, EXPECTED["qwen2-window/logits"][0, [-1, -1]])
    after = decoder.executables[0].state("keys.0")
    changed = np.flatnonzero((before != after).any((1, 2, 3)))
    assert set(changed) <= {first[1], second[1]}


def test_nothing_is_compiled_after_loading(decoder: CachedDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(pipeline, "build", lambda *arguments: calls.append(arguments))
    for length in range(1, 97):
        decoder.run([chunk(np.zeros(length), 0, 0, length % 3 and 1)])
    for position in range(96, 128):
        decoder.run([chunk([1], position, 0)])
    assert not calls


def test_weights_in_bfloat16_take_half_the_memory(tmp_path: Path) -> None:
    wide, narrow = (decoder_of(tmp_path, "llama", precision=each) for each in ("float32", "bfloat16"))
    expected = EXPECTED["llama/logits"][0]
    assert np.abs(narrow.run([chunk(IDS[0], 0, 0)]) - expected).max() < 0.05 * np.abs(expected).max()
    for ours, theirs in zip(narrow.executables, wide.executables, strict=True):
        assert ours.plan.weights < 0.6 * theirs.plan.weights


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_a_narrow_cache_costs_little_accuracy(tmp_path: Path, dtype: str) -> None:
    decoder = decoder_of(tmp_path, "llama", cache_dtype=dtype)
    expected = EXPECTED["llama/logits"][0]
    found = decoder.run([chunk(IDS[0], 0, 0)])
    assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()
    states = [decoder.executables[0].state(port.name) for port in decoder.executables[0].plan.states]
    settings = lathe.load_language_model(write_folder(tmp_path, "llama")).settings
    bytes_of_token = {"float16": 2 * 12, "bfloat16": 2 * 12, "int8": 12 + 4}[dtype] * 2 * 2 * 2  # 2 layers, 2 heads
    assert sum(state.nbytes for state in states) == PAGES * PAGE * bytes_of_token
    assert page_bytes(settings, PAGE, DType.parse(dtype)) == PAGE * bytes_of_token
    lines = decoder.executables[0].explain(1)
    assert not decoder.executables[0].plan.copies and "FALLBACK" not in "\n".join(lines)
    cache = f"[{PAGES},"  # a node that converts the cache would read all of it for each token
    assert {line.split()[0] for line in lines if cache in line} <= {"CacheWrite", "&"}  # &: a further result


def test_the_memory_of_the_cache_is_known_before_loading(decoder: CachedDecoder, tmp_path: Path) -> None:
    settings = lathe.load_language_model(write_folder(tmp_path, "qwen2-window")).settings
    states = [decoder.executables[0].state(port.name) for port in decoder.executables[0].plan.states]
    assert sum(state.nbytes for state in states) == PAGES * page_bytes(settings, PAGE)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Chunk(np.array([], np.int64), 0, [0], 0), "chunk 0: expected 1 or more tokens"),
        (Chunk(np.arange(4), 126, list(range(8))), "got 4 at 126"),
        (Chunk(np.arange(4), 14, [0]), "chunk 0: pages: expected 2 numbers of 0 to 39"),
        (Chunk(np.arange(4), 0, [PAGES]), "chunk 0: pages"),
        (Chunk(np.arange(4), 0, [0], 5), "chunk 0: wanted: expected 0 to 4, got 5"),
        (Chunk(np.zeros(97, np.int64), 0, list(range(8))), "chunks: expected at most 96 tokens, got 97"),
        (Chunk(np.array([-1]), 0, [0]), "tokens: expected 0 to 96, got -1 to -1"),
    ],
)
def test_bad_chunks_are_refused(decoder: CachedDecoder, wrong: Chunk, message: str) -> None:
    with pytest.raises(FeedError, match=message):
        decoder.run([wrong])


def test_no_logits_without_wanted_tokens(decoder: CachedDecoder) -> None:
    assert decoder.run([chunk(IDS[0], 0, 0, 0)]).shape == (0, decoder.vocabulary)
    assert decoder.run([]).shape == (0, decoder.vocabulary)


def _encoded(array: Any, kind: str) -> tuple[int, Any, bytes]:
    """A matrix as a GGUF tensor in blocks of 32 elements."""
    blocks = array.reshape(-1, 32)
    if kind == "Q8_0":
        scales = (np.abs(blocks).max(1, keepdims=True) / 127).astype("<f2")
        codes = np.rint(blocks / scales.astype(np.float32)).astype(np.int8)
        return 8, array.shape, np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], 1).tobytes()
    least = blocks.min(1, keepdims=True).astype("<f2")
    scales = ((blocks.max(1, keepdims=True) - least) / 15).astype("<f2")
    codes = np.clip(np.rint((blocks - least) / scales.astype(np.float32)), 0, 15).astype(np.uint8)
    packed = codes[:, :16] | codes[:, 16:] << 4
    return 3, array.shape, np.concatenate([scales.view(np.uint8), least.view(np.uint8), packed], 1).tobytes()


# Errors of logits relative to the largest: kernels round rows to 16 or 8 bits, and random weights magnify errors.
_ERRORS = {"float32": 5e-4, "int8-activations": 0.15}


@pytest.mark.sample(2)
@pytest.mark.parametrize("precision", [each for each in _ERRORS if each in PRECISIONS])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_weights_in_few_bits_stay_codes(tmp_path: Path, kind: str, precision: str) -> None:
    """The logits are those of the decoded weights; no plan holds a weight in float32."""
    given = config("llama-tied") | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    shapes = {
        "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
        "self_attn.o_proj": (64, 64), "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96),
        "input_layernorm": (64,), "post_attention_layernorm": (64,),
    }  # fmt: skip
    layers = range(given["num_hidden_layers"])
    whole = {f"model.layers.{i}.{name}.weight": shape for i in layers for name, shape in shapes.items()}
    whole |= {"model.embed_tokens.weight": (given["vocab_size"], 64), "model.norm.weight": (64,)}
    metadata, arrays = gguf_parts(given, {name: weight("coded", name, shape) for name, shape in whole.items()})
    tensors = {name: _encoded(a, kind) if a.ndim == 2 else floats(a) for name, a in arrays.items()}
    (tmp_path / "model.gguf").write_bytes(gguf_bytes(metadata, tensors))
    model = lathe.load_language_model(tmp_path / "model.gguf")
    decoder = CachedDecoder(model, pages=PAGES, page_size=PAGE, threads=1, precision=precision)
    (expected,) = lathe.interpret(model.graph, {"input_ids": IDS[:1]}).values()
    tolerance = _ERRORS[precision] * np.abs(expected).max()
    np.testing.assert_allclose(decoder.run([chunk(IDS[0], 0, 0)]), expected[0], 0, tolerance)
    elements = sum(array.size for array in arrays.values() if array.ndim == 2)
    held = sum(executable.plan.weights for executable in decoder.executables)
    assert held < elements * (2.0 if kind == "Q8_0" else 1.5)
