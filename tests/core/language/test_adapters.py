"""LoRA adapters beside a decoder: the tokens of merged weights, rows of several adapters in one run, refused files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import lathe
from lathe.core.errors import FeedError, ModelError, UnsupportedError
from lathe.core.language.adapters import Adapter, adapter_files, read_adapter
from lathe.core.language.cached_decoder import CachedDecoder
from lathe.core.language.generation.generator import memory_bytes
from lathe.core.language.generation.options import GeneratorOptions
from lathe.core.language.token_runner import Chunk
from tests.core.language.adapter_files import factors, llama_factors, merged, write_adapter
from tests.core.language.checkpoints import PROMPT
from tests.core.language.families import config, gguf_content, weights, write_folder

COUNT = 24  # tokens
# Ranks, scales and the fields that give the scales.
ADAPTERS: list[tuple[int, float, dict[str, Any]]] = [
    (4, 2.0, {}), (2, 1.5, {"lora_alpha": 3}), (5, 5**0.5, {"lora_alpha": 5, "use_rslora": True}),
]  # fmt: skip


def greedy(graph: Any) -> list[int]:
    """The greedy tokens of a whole graph, run with the references."""
    tokens = list(PROMPT)
    for _ in range(COUNT):
        (logits,) = lathe.interpret(graph, {"input_ids": np.array([tokens])}).values()
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def merged_graph(folder: Path, name: str, tensors: Any, scale: float, transposed: bool = False) -> Any:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config(name)))
    save_file(merged(weights(name), tensors, scale, transposed), folder / "model.safetensors", {"format": "pt"})
    return lathe.load_language_model(folder).graph


def read(model: Any, folder: Path) -> Adapter:
    return read_adapter(model.module, *adapter_files(folder))


def greedy_together(decoder: CachedDecoder, count: int) -> list[list[int]]:
    """The greedy tokens of texts with the adapters 0 to `count - 1`, all in the same runs."""
    texts, pages = [list(PROMPT) for _ in range(count)], np.arange(count * 8).reshape(count, 8).tolist()
    done = 0
    for _ in range(COUNT):
        chunks = [Chunk(np.array(text[done:]), done, pages[i], 1, i) for i, text in enumerate(texts)]
        done = len(texts[0])
        for text, row in zip(texts, decoder.run(chunks), strict=True):
            text.append(int(row.argmax()))
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_texts_of_several_adapters_in_one_run_are_those_of_merged_weights(tmp_path: Path, form: str) -> None:
    path = write_folder(tmp_path / "base", "llama")
    if form == "gguf":
        path = tmp_path / "base.gguf"
        path.write_bytes(gguf_content("llama"))
    model, adapters, expected = lathe.load_language_model(path), [], [greedy(lathe.load_language_model(path).graph)]
    for seed, (rank, scale, settings) in enumerate(ADAPTERS):
        tensors = llama_factors(seed, rank)
        adapters.append(read(model, write_adapter(tmp_path / str(seed), tensors, rank, **settings)))
        expected.append(greedy(merged_graph(tmp_path / f"merged{seed}", "llama", tensors, scale)))
    decoder = CachedDecoder(model, pages=40, page_size=16, threads=2, adapters=adapters)
    assert greedy_together(decoder, 4) == expected
    assert len({tuple(each) for each in expected}) == 4
    assert "FALLBACK" not in "\n".join(decoder.executables[0].explain(1))
    with pytest.raises(FeedError, match="chunk 0: adapter: expected 0 to 3, got 4"):
        decoder.run([Chunk(np.zeros(1, np.int64), 0, [0], 1, 4)])


@pytest.mark.parametrize("names", ["transformer", "lathe"])
def test_gpt2_has_one_layer_for_queries_keys_and_values(tmp_path: Path, names: str) -> None:
    model = lathe.load_language_model(write_folder(tmp_path / "base", "gpt2"))
    tensors = factors(1, 3, {"transformer.h.1.attn.c_attn": (144, 48), "transformer.h.0.mlp.c_proj": (48, 192)})
    expected = greedy(merged_graph(tmp_path / "merged", "gpt2", tensors, 2.0, transposed=True))
    if names == "lathe":  # as a training writes them
        a, b = (tensors.pop(f"base_model.model.transformer.h.1.attn.c_attn.lora_{each}.weight") for each in "AB")
        for index, name in enumerate("qkv"):
            start = f"base_model.model.model.layers.1.self_attn.{name}_proj"
            tensors |= {f"{start}.lora_A.weight": a, f"{start}.lora_B.weight": np.split(b, 3)[index].copy()}
    adapter = read(model, write_adapter(tmp_path / "adapter", tensors, 3, fan_in_fan_out=True))
    decoder = CachedDecoder(model, pages=40, page_size=16, threads=2, adapters=[adapter])
    assert greedy_together(decoder, 2)[1] == expected


def test_patterns_give_layers_other_ranks_and_scales(tmp_path: Path) -> None:
    model = lathe.load_language_model(write_folder(tmp_path / "base", "llama"))
    tensors = llama_factors(0, 4)
    for factor in "AB":
        name = f"base_model.model.model.layers.1.mlp.down_proj.lora_{factor}.weight"
        tensors[name] = np.ascontiguousarray(tensors[name][:2] if factor == "A" else tensors[name][:, :2])
    patterns = {"rank_pattern": {"layers.1.mlp.down_proj": 2}, "alpha_pattern": {"down_proj": 6}}
    adapter = read(model, write_adapter(tmp_path / "adapter", tensors, 4, **patterns))
    for path, scale in (("model.layers.1.mlp.down_proj", 3), ("model.layers.0.mlp.down_proj", 1.5),
                        ("model.layers.0.mlp.gate_proj", 2)):  # fmt: skip
        given = tensors[f"base_model.model.{path}.lora_B.weight"]
        np.testing.assert_allclose(adapter.factors[path].b, given * scale, 1e-6)


def test_weights_are_held_once_and_claimed(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "base", "llama")
    model = lathe.load_language_model(path)
    files, adapters = {}, []
    for seed, (rank, _, settings) in enumerate(ADAPTERS):
        folder = write_adapter(tmp_path / str(seed), llama_factors(seed, rank), rank, **settings)
        files[str(seed)] = adapter_files(folder)
        adapters.append(read(model, folder))
    plain, adapted = (CachedDecoder(model, pages=1, threads=1, adapters=each) for each in ([], adapters))
    added = sum(
        made.plan.weights - base.plan.weights for made, base in zip(adapted.executables, plain.executables, strict=True)
    )
    options = GeneratorOptions()
    assert 0 < added <= memory_bytes(path, options, files) - memory_bytes(path, options)


_A, _B = (f"base_model.model.model.layers.0.mlp.gate_proj.lora_{each}.weight" for each in "AB")


@pytest.mark.parametrize(
    ("settings", "tensors", "kind", "message"),
    [
        ({"peft_type": "LOHA"}, {}, UnsupportedError, "peft_type: expected LORA, got \"LOHA\""),
        ({"use_dora": True}, {}, UnsupportedError, "use_dora: True is not supported"),
        ({"modules_to_save": ["lm_head"]}, {}, UnsupportedError, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, {}, UnsupportedError, "init_lora_weights"),
        ({"alpha_pattern": {".*": 3}}, {}, UnsupportedError, "alpha_pattern: expected names of layers"),
        ({"r": 0}, {}, ModelError, "r: expected an integer from 1"),
        ({"lora_alpha": "8"}, {}, ModelError, "lora_alpha: expected a positive number"),
        ({"r": 3}, {}, ModelError, r"factors of 'model.layers.0.self_attn.q_proj': expected \(3, 48\) and \(48, 3\)"),
        ({}, {_B: None}, ModelError, "lora_B.weight' is missing"),
        ({}, {_A: np.zeros((4, 47), np.float32)}, ModelError, r"got \(4, 47\)"),
        ({}, {"base_model.model.lm_head.lora_A.weight": np.zeros((4, 48), np.float32)}, ModelError, "lm_head"),
        ({}, {"base_model.model.model.layers.7.mlp.gate_proj.lora_A.weight": np.zeros(1)}, ModelError, "layers.7"),
    ],
)  # fmt: skip
def test_other_adapters_are_refused(
    tmp_path: Path, settings: dict[str, Any], tensors: dict[str, Any], kind: type[Exception], message: str
) -> None:
    model = lathe.load_language_model(write_folder(tmp_path / "base", "llama"))
    given = {name: array for name, array in (llama_factors(0, 4) | tensors).items() if array is not None}
    folder = write_adapter(tmp_path / "adapter", given, 4, **settings)
    with pytest.raises(kind, match=message):
        read(model, folder)


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        adapter_files(tmp_path)
