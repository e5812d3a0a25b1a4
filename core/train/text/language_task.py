"""`LanguageTask`: the decoder of a training, from its recipe to the files of its result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from lathe.core.errors import ModelError
from lathe.core.ir.graph import Array, Graph
from lathe.core.language.decoder import Decoder
from lathe.core.language.hugging_face_writer import checkpoint_of, config_of, safetensors_bytes
from lathe.core.nn import init
from lathe.core.nn.lora import LoRALinear, add_lora, merge_lora
from lathe.core.nn.trace import trace
from lathe.core.train.text.language import Language
from lathe.core.train.text.token_examples import INPUT

OUTPUT = "logits"
ADAPTER_WEIGHTS = ("*.lora_a", "*.lora_b")


@dataclass(frozen=True)
class Adapters:
    """The settings of LoRA: rank, alpha, and patterns of the layers that get adapters."""

    rank: int
    alpha: float
    layers: tuple[str, ...]


@dataclass(frozen=True)
class LanguageTask:
    """A decoder under training. With `adapters` its linear layers have them, and they alone are trained."""

    module: Decoder
    language: Language
    adapters: Adapters | None = None

    def graph(self, length: int | str) -> Graph:
        """`input_ids` int64 [batch, length] -> `logits` [..., vocabulary]; a name as `length` is dynamic."""
        return trace(self.module, {INPUT: f"int64[batch,{length}]"}, [OUTPUT], self.language.settings.family)

    def finish(self, trained: Graph) -> tuple[Graph, dict[str, bytes]]:
        """The model to be served, with the weights of `trained`, and its files as a Hugging Face folder, by name.

        Adapters are merged into the weights; their own files are `lora.safetensors` and `lora.json`.
        """
        weights = {value.name: array for value, array in trained.constants.items()}
        for name, parameter in self.module.named_state():
            if name in weights:
                parameter.data = weights[name]
        files = self._adapter_files()
        merge_lora(self.module)
        state = {name: parameter.data for name, parameter in self.module.named_state()}
        return self.graph("length"), {**files, **_folder_files(self.language, state)}

    def _adapter_files(self) -> dict[str, bytes]:
        """The adapters alone: factors with the names that the library PEFT gives them, and its settings."""
        if self.adapters is None:
            return {}
        tensors, paths = {}, []
        for path, module in self.module.named_modules():
            if isinstance(module, LoRALinear):
                paths.append(path)
                tensors[f"base_model.model.{path}.lora_A.weight"] = module.lora_a.data
                tensors[f"base_model.model.{path}.lora_B.weight"] = module.lora_b.data
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.adapters.rank,
            "lora_alpha": self.adapters.alpha,
            "target_modules": sorted({path.rpartition(".")[2] for path in paths}),
            "bias": "none",
        }
        return {"lora.safetensors": safetensors_bytes(tensors), "lora.json": _json(settings)}


def begin_task(module: Decoder, language: Language, adapters: Adapters | None, seed: int) -> LanguageTask:
    """The task of training `module`, with new adapters drawn with `seed`. ModelError for adapters that do not fit."""
    if adapters is not None:
        with init.seeded(seed):
            try:
                add_lora(module, adapters.rank, adapters.alpha, adapters.layers)
            except ValueError as error:
                raise ModelError(str(error), where="lora") from None
    return LanguageTask(module, language, adapters)


def decoder_of(model: Graph, language: Language) -> Decoder:
    """The decoder in a graph that `LanguageTask` made: its constants have the names of the parameters.

    ModelError for a graph that lacks a weight, or has it in another shape.
    """
    weights = {value.name: array for value, array in model.constants.items()}
    with init.skipped():
        module = Decoder(language.settings)
    for name, parameter in module.named_state():
        if name not in weights or weights[name].shape != parameter.data.shape:
            got = list(weights[name].shape) if name in weights else "nothing"
            raise ModelError(f"weight '{name}': expected {list(parameter.data.shape)}, got {got}", where="model")
        parameter.data = weights[name]
    return module


def _folder_files(language: Language, state: Mapping[str, Array]) -> dict[str, bytes]:
    tokenizer, ends = language.tokenizer, list(language.tokenizer.ends)
    config = config_of(language.settings) | ({"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {})
    end = tokenizer.library.id_to_token(ends[0]) if ends else None
    special = dict(language.special_tokens) or ({"eos_token": end} if end else {})
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": language.settings.context,
        **special,
    }
    if language.chat_template is not None:
        settings["chat_template"] = language.chat_template
    return {
        "config.json": _json(config),
        "model.safetensors": safetensors_bytes(checkpoint_of(language.settings, state)),
        "tokenizer.json": tokenizer.library.to_str(pretty=False).encode(),
        "tokenizer_config.json": _json(settings),
    }


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1).encode()
