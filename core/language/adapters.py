"""Low-rank adapters of a decoder (Hu et al., 2021: LoRA), in the files that the library PEFT writes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.ir.graph import Array
from lathe.core.language import hugging_face
from lathe.core.language.decoder import Decoder
from lathe.core.language.document import Document
from lathe.core.language.json_file import read_json
from lathe.core.language.safetensors import read_safetensors
from lathe.core.language.stored_tensor import StoredTensor
from lathe.core.language.weight_sources import WeightSource
from lathe.core.nn.linear import Linear

# The two files of an adapter: those of PEFT, and those beside a model that Lathe has trained.
_FILES = (("adapter_config.json", "adapter_model.safetensors"), ("lora.json", "lora.safetensors"))
_PREFIX = "base_model.model."  # PEFT's name of the decoder
_PLAIN = re.compile(r"[\w.]+")
# What PEFT computes otherwise than x W^T + scale * x A^T B^T, and the values with which it does not.
_PLAIN_VALUES: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",), "use_dora": (False,), "lora_bias": (False,), "modules_to_save": ([],),
    "layer_replication": ([],), "trainable_token_indices": ([], {}), "alora_invocation_tokens": ([],),
    "target_parameters": ([],),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}  # fmt: skip


@dataclass(frozen=True)
class Factors:
    """The product of `b` [out, rank] and `a` [rank, in], which is added to a weight; `b` includes the scale."""

    a: Array
    b: Array


@dataclass(frozen=True)
class Adapter:
    """The factors of an adapter by the path of the linear layer, such as `model.layers.0.self_attn.q_proj`."""

    factors: Mapping[str, Factors]


def adapter_files(folder: Path) -> tuple[Path, Path]:
    """The settings and the weights of the adapter in a folder. ModelError if it has none."""
    for names in _FILES:
        settings, weights = (folder / name for name in names)
        if settings.exists():
            return settings, weights
    raise ModelError(f"expected an adapter, with a file '{_FILES[0][0]}' or '{_FILES[1][0]}'", where=folder.name)


def read_adapter(decoder: Decoder, settings: Path, weights: Path) -> Adapter:
    """The adapter in these files, for this decoder.

    Layers of the decoder may have one, but not its embedding, its last product and the experts of a mixture. ModelError
    for damaged files, factors of other shapes, and tensors that belong to no such layer. UnsupportedError for other
    kinds of adapters than LoRA, and for variants that compute something else.
    """
    config = Document(settings.name, read_json(settings))
    _check_plain(config)
    tensors, where = read_safetensors(weights), weights.name
    factors: dict[str, Factors] = {}
    used: set[str] = set()
    for path, layer in _layers(decoder):
        found = _names(decoder, path, tensors)
        if found is not None:
            used.update(found)
            factors[path] = _factors(decoder, path, layer, [tensors[name] for name in found], config, where)
    unused = sorted(tensors.keys() - used)
    if unused:
        message = f"tensor '{unused[0]}' belongs to no linear layer of the model ({len(unused)} such tensors)"
        raise ModelError(message, where=where)
    if not factors:
        raise ModelError("expected factors of at least one layer, got none", where=where)
    return Adapter(factors)


def _check_plain(config: Document) -> None:
    config.choice("peft_type", ["LORA"])
    for name, plain in _PLAIN_VALUES.items():
        if config.has(name) and config.get(name) not in plain:
            raise UnsupportedError(f"{name}: {config.get(name)!r} is not supported"[:200], where=config.where)


def _layers(decoder: Decoder) -> Iterator[tuple[str, Linear]]:
    for path, module in decoder.named_modules():
        if isinstance(module, Linear) and path.startswith("model.layers."):
            yield path, module


def _names(decoder: Decoder, path: str, tensors: Mapping[str, StoredTensor]) -> tuple[str, str] | None:
    """The names of the factors of a layer, by Lathe's or by Transformers' name of the layer; None without factors.

    They differ for GPT-2 only. ModelError if one factor is missing.
    """
    for module in (path, _stored_module(decoder, path)):
        names = (f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight")
        missing = [name for name in names if name not in tensors]
        if len(missing) == 1:
            raise ModelError(f"tensor '{missing[0]}' is missing")
        if not missing:
            return names
    return None


def _stored_module(decoder: Decoder, path: str) -> str:
    source = hugging_face.weight_source(decoder.settings, ("model.", "transformer."))(f"{path}.weight")
    return source.name.removesuffix(".weight")


def _factors(
    decoder: Decoder, path: str, layer: Linear, tensors: list[StoredTensor], config: Document, where: str
) -> Factors:
    a, b = (np.asarray(each.array(), np.float32) for each in tensors)
    module = tensors[0].name.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
    if module != path:  # GPT-2 has one layer for queries, keys and values
        source = hugging_face.weight_source(decoder.settings, ("transformer.",))(f"{path}.weight")
        b = _converted(source, b, where)
    rank = int(_of_layer(config, "rank_pattern", module, config.size("r")))
    expected = ((rank, layer.in_features), (layer.out_features, rank))
    if (a.shape, b.shape) != expected:
        message = f"factors of '{path}': expected {expected[0]} and {expected[1]}, got {a.shape} and {b.shape}"
        raise ModelError(message, where=where)
    alpha = _of_layer(config, "alpha_pattern", module, config.number("lora_alpha"))
    scale = alpha / (math.sqrt(rank) if config.flag("use_rslora", False) else rank)
    return Factors(a, (b * np.float64(scale)).astype(np.float32))


def _converted(source: WeightSource, b: Array, where: str) -> Array:
    """The part of a factor [out, rank] that belongs to a parameter, whose weights are stored [in, out]."""
    try:
        return np.asarray(source.convert(b.T))
    except ValueError:
        raise ModelError(f"tensor '{source.name}': its factor has a shape that cannot be split", where=where) from None


def _of_layer(config: Document, field: str, module: str, default: float) -> float:
    """The number of a layer: that of the first name in `field` that ends the layer's name, else `default`."""
    part = config.part(field)
    for name in () if part is None else part.fields:
        assert part is not None
        if _PLAIN.fullmatch(name) is None:
            raise UnsupportedError(
                f"{field}: expected names of layers, got the pattern {name[:100]!r}", where=config.where
            )
        if module == name or module.endswith(f".{name}"):
            return part.number(name)
    return default
