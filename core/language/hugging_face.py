"""Settings and weights of decoders in a Hugging Face folder: `config.json` and safetensors files.

Defaults of missing fields are those of the library Transformers, which leaves some of them out of the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace

from lathe.core.errors import UnsupportedError
from lathe.core.ir.graph import Array
from lathe.core.language.decoder import ACTIVATIONS
from lathe.core.language.document import MOST_LAYERS, Document
from lathe.core.language.settings import DecoderSettings, Experts, LinearScaling, Llama3Scaling, Rotary, Scaling
from lathe.core.language.weight_sources import WeightSource, part, stacked

# Buffers that older versions of Transformers wrote, and a copy of tied weights. `lm_head.weight` of other models is
# read, so it is never unused there.
UNUSED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|h\.\d+\.attn\.(masked_)?bias|lm_head\.weight)")


def read_settings(config: Document) -> DecoderSettings:
    """The settings in a `config.json`.

    UnsupportedError for another `model_type`, and for settings that the decoder lacks. ModelError for a field that is
    missing or has no possible value.
    """
    family = config.choice("model_type", list(FAMILIES))
    if config.has("quantization_config"):
        raise UnsupportedError("quantization_config: quantized folders are not supported", where=config.where)
    return FAMILIES[family](config)


def weight_source(settings: DecoderSettings, names: Collection[str]) -> Callable[[str], WeightSource]:
    """The function from the path of a parameter to its source in a file that has tensors of these names.

    Files of a bare model, without its last product, have names without a leading `model.` or `transformer.`.
    """
    if settings.family == "gpt2":
        prefix = "transformer." if any(name.startswith("transformer.") for name in names) else ""
        return lambda path: _gpt2_source(path, prefix)
    prefix = "model." if any(name.startswith("model.") for name in names) else ""
    if settings.experts is not None:
        return lambda path: _mixture_source(path, prefix, settings)
    return lambda path: _plain_source(path, prefix)


def _llama(config: Document) -> DecoderSettings:
    heads, width = config.size("num_attention_heads"), config.size("hidden_size")
    biased = config.flag("attention_bias", False)
    return DecoderSettings(
        family=str(config.get("model_type")),
        vocabulary=config.size("vocab_size"),
        width=width,
        heads=heads,
        kv_heads=config.size("num_key_value_heads", heads),
        head_size=config.size("head_dim", max(width // heads, 1)),
        feedforward=config.size("intermediate_size"),
        context=config.size("max_position_embeddings"),
        windows=(None,) * _layers(config, "num_hidden_layers"),
        epsilon=config.number("rms_norm_eps", 1e-6),
        activation=config.choice("hidden_act", list(ACTIVATIONS), "silu"),
        rotary=_rotary(config),
        tied=config.flag("tie_word_embeddings", False),
        query_bias=biased,
        output_bias=biased,
        feedforward_bias=config.flag("mlp_bias", False),
    )


def _mistral(config: Document) -> DecoderSettings:
    settings = _without_biases(_llama(config))
    missing = "sliding_window" not in config.fields  # null stands for no window
    window = config.size("sliding_window", 4096) if missing or config.has("sliding_window") else None
    return replace(settings, windows=(window,) * settings.layers)


def _smollm3(config: Document) -> DecoderSettings:
    """By default every fourth layer has no rotary embedding; these are the layers that may have a window."""
    settings = replace(_llama(config), rotary=_rotary(config, 2_000_000.0))
    settings = replace(settings, tied=config.flag("tie_word_embeddings", True))
    step = config.size("no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers")  # with a 1 for each layer that has rotary embedding
    rotated = [(layer + 1) % step != 0 for layer in range(settings.layers)] if rotated is None else rotated
    if not isinstance(rotated, list) or len(rotated) < settings.layers or any(each not in (0, 1) for each in rotated):
        raise config.error("no_rope_layers", f"a list of 0 and 1 for {settings.layers} layers", rotated)
    unrotated = frozenset(layer for layer in range(settings.layers) if not rotated[layer])
    windowed = tuple(layer in unrotated for layer in range(settings.layers))
    windows = _qwen_windows(config, settings.layers, windowed) if config.has("sliding_window") else settings.windows
    return replace(settings, windows=windows, unrotated=unrotated)


def _qwen2(config: Document) -> DecoderSettings:
    settings = replace(_without_biases(_llama(config)), query_bias=True)
    return replace(settings, windows=_qwen_windows(config, settings.layers))


def _qwen3(config: Document) -> DecoderSettings:
    settings = replace(_llama(config), head_size=config.size("head_dim", 128), query_norm=True, feedforward_bias=False)
    return replace(settings, windows=_qwen_windows(config, settings.layers))


def _qwen2_moe(config: Document) -> DecoderSettings:
    settings = replace(_without_biases(_llama(config)), query_bias=config.flag("qkv_bias", True))
    experts = _qwen_experts(config, settings.layers, 60, 4, 1408)
    experts = replace(experts, shared=config.size("shared_expert_intermediate_size", 5632))
    first = config.get("max_window_layers")
    first = first if type(first) is int else 28
    every_other = tuple(layer < first and layer % 2 == 0 for layer in range(settings.layers))
    return replace(settings, windows=_qwen_windows(config, settings.layers, every_other), experts=experts)


def _qwen3_moe(config: Document) -> DecoderSettings:
    settings = replace(_llama(config), query_norm=True, feedforward_bias=False)
    all_layers = (True,) * settings.layers
    windows = _qwen_windows(config, settings.layers, all_layers)
    return replace(settings, windows=windows, experts=_qwen_experts(config, settings.layers, 128, 8, 768))


def _qwen_experts(config: Document, layers: int, count: int, chosen: int, width: int) -> Experts:
    """The experts, by default of these numbers, in every `decoder_sparse_step`-th layer but `mlp_only_layers`."""
    # Older files have the second name.
    name = "num_local_experts" if config.has("num_local_experts") else "num_experts"
    step, plain = config.size("decoder_sparse_step", 1), config.get("mlp_only_layers")
    plain = [] if plain is None else plain
    if not isinstance(plain, list) or not all(type(layer) is int for layer in plain):
        raise config.error("mlp_only_layers", "a list of layers", plain)
    return Experts(
        count=config.size(name, count),
        chosen=config.size("num_experts_per_tok", chosen),
        width=config.size("moe_intermediate_size", width),
        normalized=config.flag("norm_topk_prob", False),
        shared=None,
        layers=tuple(layer not in plain and (layer + 1) % step == 0 for layer in range(layers)),
    )


def _mixtral(config: Document) -> DecoderSettings:
    settings = replace(_without_biases(_llama(config)), rotary=_rotary(config, 1_000_000.0))
    window = config.size("sliding_window") if config.has("sliding_window") else None
    experts = Experts(
        count=config.size("num_local_experts", 8),
        chosen=config.size("num_experts_per_tok", 2),
        width=settings.feedforward,
        normalized=True,
        shared=None,
        layers=(True,) * settings.layers,
    )
    return replace(settings, windows=(window,) * settings.layers, experts=experts)


def _gpt2(config: Document) -> DecoderSettings:
    for name, only in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if config.flag(name, only) is not only:
            raise UnsupportedError(f"{name}: only {str(only).lower()} is supported", where=config.where)
    heads, width = config.size("n_head"), config.size("n_embd")
    return DecoderSettings(
        family="gpt2",
        vocabulary=config.size("vocab_size"),
        width=width,
        heads=heads,
        kv_heads=heads,
        head_size=max(width // heads, 1),
        feedforward=config.size("n_inner", 4 * width),
        context=config.size("n_positions"),
        windows=(None,) * _layers(config, "n_layer"),
        epsilon=config.number("layer_norm_epsilon", 1e-5),
        activation=config.choice("activation_function", list(ACTIVATIONS), "gelu_new"),
        normalization="layer",
        gated=False,
        tied=config.flag("tie_word_embeddings", True),
        query_bias=True,
        output_bias=True,
        feedforward_bias=True,
    )


FAMILIES = {
    "llama": _llama, "mistral": _mistral, "mixtral": _mixtral, "qwen2": _qwen2, "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3, "qwen3_moe": _qwen3_moe, "smollm3": _smollm3, "gpt2": _gpt2,
}  # fmt: skip


def _layers(config: Document, name: str) -> int:
    return config.size(name, most=MOST_LAYERS)


def _without_biases(settings: DecoderSettings) -> DecoderSettings:
    return replace(settings, query_bias=False, output_bias=False, feedforward_bias=False)


def _qwen_windows(config: Document, layers: int, windowed: tuple[bool, ...] | None = None) -> tuple[int | None, ...]:
    """The window of each layer: by `layer_types` where the file has them, otherwise by `windowed`.

    Without `windowed`, layers from `max_window_layers` on have a window.
    """
    if not config.flag("use_sliding_window", False):
        return (None,) * layers
    window, types = config.size("sliding_window", 4096), config.get("layer_types")
    if types is None and windowed is not None:
        return tuple(window if each else None for each in windowed)
    if types is None:
        first = config.get("max_window_layers")
        first = 28 if first is None else first
        if type(first) is not int or first < 0:
            raise config.error("max_window_layers", "an integer of at least 0", first)
        return tuple(window if layer >= first else None for layer in range(layers))
    kinds = {"sliding_attention": window, "full_attention": None}
    if (
        not isinstance(types, list)
        or len(types) != layers
        or not all(isinstance(kind, str) and kind in kinds for kind in types)
    ):
        raise config.error("layer_types", f"{layers} of sliding_attention and full_attention", types)
    return tuple(kinds[kind] for kind in types)


def _rotary(config: Document, theta: float = 10_000.0) -> Rotary:
    """The rotary embedding: `rope_parameters`, or `rope_theta` (else `theta`) and `rope_scaling` of older files."""
    scaling = config.part("rope_parameters") or config.part("rope_scaling")
    theta = config.number("rope_theta", theta)
    if scaling is None:
        return Rotary(theta)
    if scaling.number("partial_rotary_factor", 1.0) != 1:
        raise UnsupportedError("partial_rotary_factor: only 1 is supported", where=scaling.where)
    return Rotary(scaling.number("rope_theta", theta), _scaling(scaling))


def _scaling(config: Document) -> Scaling | None:
    field = "rope_type" if config.has("rope_type") else "type"  # older files have the second name
    match config.choice(field, ("default", "linear", "llama3"), "default"):
        case "linear":
            return LinearScaling(config.number("factor"))
        case "llama3":
            low, high = config.number("low_freq_factor"), config.number("high_freq_factor")
            if low >= high:
                raise config.error("high_freq_factor", f"a number above low_freq_factor, {low}", high)
            return Llama3Scaling(config.number("factor"), low, high, config.size("original_max_position_embeddings"))
    return None


def _plain_source(path: str, prefix: str) -> WeightSource:
    return WeightSource(prefix + path.removeprefix("model.") if path.startswith("model.") else path)


# The matrices of one expert in files, by the parameters that hold those of all experts.
_EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_MIXTRAL_PARTS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


def _mixture_source(path: str, prefix: str, settings: DecoderSettings) -> WeightSource:
    found = re.fullmatch(r"model\.(layers\.\d+\.)mlp\.(?:experts\.(\w+_proj)|gate\.weight)", path)
    if found is None or settings.experts is None:
        return _plain_source(path, prefix)
    layer, parameter = found.groups()
    mixtral = settings.family == "mixtral"
    begin = f"{prefix}{layer}{'block_sparse_moe' if mixtral else 'mlp'}."
    if parameter is None:
        return WeightSource(f"{begin}gate.weight")
    parts = (_MIXTRAL_PARTS if mixtral else _EXPERT_PARTS)[parameter]
    each = [f"{begin}experts.{expert}.{part}.weight" for part in parts for expert in range(settings.experts.count)]
    return WeightSource(each[0], stacked(len(parts)), tuple(each[1:]))


# GPT-2 stores its weights [inputs, outputs], and those of queries, keys and values as one.
_GPT2_NAMES = {
    "embed_tokens": "wte", "embed_positions": "wpe", "norm": "ln_f", "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2", "self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}  # fmt: skip
_GPT2_PARTS = {"self_attn.q_proj": 0, "self_attn.k_proj": 1, "self_attn.v_proj": 2}
_GPT2_TRANSPOSED = {"self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"}


def _gpt2_source(path: str, prefix: str) -> WeightSource:
    if not path.startswith("model."):
        return WeightSource(path)
    *layer, module, kind = _split_path(path.removeprefix("model."))
    begin = prefix + "".join(f"h.{number}." for number in layer)
    if module in _GPT2_PARTS:
        return WeightSource(f"{begin}attn.c_attn.{kind}", _transposed_part(_GPT2_PARTS[module]))
    name = f"{begin}{_GPT2_NAMES[module]}.{kind}"
    return WeightSource(name, _transposed) if module in _GPT2_TRANSPOSED else WeightSource(name)


def _split_path(path: str) -> list[str]:
    """`layers.3.self_attn.q_proj.weight` as ["3", "self_attn.q_proj", "weight"]; without a layer, the last two."""
    found = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+)\.(weight|bias)", path)
    assert found is not None, path
    return [group for group in found.groups() if group is not None]


def _transposed(array: Array) -> Array:
    return array.T


def _transposed_part(index: int) -> Callable[[Array], Array]:
    return lambda array: part(index, 3)(array.T)
