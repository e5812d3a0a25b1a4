"""`load_onnx_decoder`: a language model as an ONNX file with past, in a folder with its settings and tokenizer.

Folders come from Optimum (`config.json`, `model.onnx`), and from ONNX Runtime GenAI's model builder
(`genai_config.json`, which names the ONNX file).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.frontends.onnx import load
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import TensorType
from lathe.core.language.document import MOST_LAYERS, Document
from lathe.core.language.folder_texts import chat_template, folder_tokenizer
from lathe.core.language.json_file import read_json
from lathe.core.language.past_inputs import PastInputs, find_past_inputs
from lathe.core.language.special_tokens import folder_tokens
from lathe.core.language.text_sizes import TextSizes
from lathe.core.language.tokenizer import Tokenizer

GENAI_FILE = "genai_config.json"
DECODER_FILE = "decoder.onnx"  # in uploads: a version with a file model.onnx is a model of tensors
_FILES = (DECODER_FILE, "model.onnx", "decoder_with_past_model.onnx")


@dataclass(frozen=True)
class OnnxDecoder:
    """A decoder with past inputs, in the ONNX file `path`.

    `chat_template` and `special_tokens` are those of `LanguageModel`.
    """

    settings: TextSizes
    path: Path
    graph: Graph
    past: PastInputs
    chat_template: str | None
    _tokenizer: Callable[[], Tokenizer] = field(repr=False)
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. ModelError if the folder has none; UnsupportedError without the library `tokenizers`."""
        return self._tokenizer()


def onnx_decoder_file(folder: Path) -> Path | None:
    """The ONNX file of a decoder in a folder; None if it holds another kind of model. ModelError for damaged JSON."""
    if (folder / GENAI_FILE).exists() and not (folder / DECODER_FILE).exists():
        return folder / (_genai(folder)[1].text("filename") or "model.onnx")
    return next((folder / name for name in _FILES if (folder / name).exists()), None)


def load_onnx_decoder(folder: Path) -> OnnxDecoder:
    """The decoder in a folder that `onnx_decoder_file` knows.

    ModelError for files that are missing or damaged. UnsupportedError for a graph that is no decoder with past.
    """
    path = onnx_decoder_file(folder)
    if path is None:
        raise ModelError(f"expected one of {', '.join(_FILES)}", where=folder.name)
    if path.parent != folder or not path.is_file():
        raise ModelError(f"filename: expected an ONNX file beside {GENAI_FILE}", where=folder.name)
    config, context, vocabulary = _settings(folder)
    graph = load(path)
    past = find_past_inputs(graph)
    if past is None:
        raise UnsupportedError("expected inputs past_key_values.N.key and .value", where=path.name)
    if past.layers > MOST_LAYERS:
        raise ModelError(f"expected at most {MOST_LAYERS} layers, got {past.layers}", where=path.name)
    logits = next(value.type for value in graph.outputs if value.name == past.logits)
    width = logits.shape[-1] if isinstance(logits, TensorType) and logits.shape else None
    settings = TextSizes(
        width if isinstance(width, int) else vocabulary, context, past.layers, past.kv_heads, past.head_size
    )
    return OnnxDecoder(
        settings,
        path,
        graph,
        past,
        chat_template(folder),
        lambda: folder_tokenizer(folder, config),
        folder_tokens(folder),
    )


def _settings(folder: Path) -> tuple[Document, int, int]:
    """The document that may name the tokens that end an answer, the context and the vocabulary."""
    if (folder / GENAI_FILE).exists():
        model, _ = _genai(folder)
        return model, model.size("context_length"), model.size("vocab_size")
    config = Document("config.json", read_json(folder / "config.json"))
    context = next((name for name in _CONTEXTS if config.has(name)), _CONTEXTS[0])
    return config, config.size(context), config.size("vocab_size")


_CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len")


def _genai(folder: Path) -> tuple[Document, Document]:
    """The objects `model` and `model.decoder` of a `genai_config.json`."""
    model = Document(GENAI_FILE, read_json(folder / GENAI_FILE)).part("model")
    decoder = None if model is None else model.part("decoder")
    if model is None or decoder is None:
        raise ModelError("expected the objects model and model.decoder", where=GENAI_FILE)
    return model, decoder
