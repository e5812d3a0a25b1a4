"""Sets up the data and the model of a training of a language model, as its recipe says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lathe import nn
from lathe.core.language.decoder import Decoder as DecoderModule
from lathe.core.train.data import Dataset
from lathe.core.train.data.splits import Split
from lathe.core.train.recipe.parent_model import Parent
from lathe.core.train.recipe.recipe import Data, Recipe, RecipeError, Text
from lathe.core.train.text.encoding import check_documents, texts
from lathe.core.train.text.language import Language
from lathe.core.train.text.language_task import Adapters, LanguageTask, begin_task, decoder_of
from lathe.core.train.text.token_examples import TokenExamples, pack, split_documents
from lathe.core.train.text.tokenizer_training import byte_pair_tokenizer, character_tokenizer
from lathe.core.train.zoo.decoder import Decoder


@dataclass(frozen=True)
class LanguageSetup:
    """The packed documents, the split of their rows, and the decoder with its language."""

    examples: TokenExamples
    split: Split
    task: LanguageTask


def is_language_recipe(recipe: Recipe, parent: Parent | None) -> bool:
    """Whether a recipe trains a language model: a new decoder, or a model that has a tokenizer."""
    return isinstance(recipe.model, Decoder) or (parent is not None and parent.language is not None)


def set_up_language(recipe: Recipe, dataset: Dataset, parent: Parent | None) -> LanguageSetup:
    """Make tokens of the documents, and the decoder of the recipe.

    RecipeError for settings that language models lack, DataError for data without documents, ModelError for a model
    that does not fit.
    """
    _check(recipe, parent)
    documents = document_split(recipe.data, dataset)
    if isinstance(recipe.model, Decoder):
        language, module = _new_model(recipe.model, recipe, dataset, documents)
    else:
        assert parent is not None and parent.language is not None
        language, module = parent.language, decoder_of(parent.model, parent.language)
    _check_context(recipe.text, language)
    examples = pack(dataset, documents, recipe.text.length, language)
    lora = recipe.lora
    adapters = Adapters(lora.rank, lora.alpha or 2.0 * lora.rank, lora.layers) if lora is not None else None
    return LanguageSetup(examples, _rows_of(examples), begin_task(module, language, adapters, recipe.seed))


def language_examples(text: Text, data: Data, dataset: Dataset, language: Language) -> tuple[TokenExamples, Split]:
    """The packed documents for an evaluation, and the split of their rows. DataError for data without documents."""
    _check_context(text, language)
    examples = pack(dataset, document_split(data, dataset), text.length, language)
    return examples, _rows_of(examples)


def document_split(data: Data, dataset: Dataset) -> Split:
    check_documents(dataset)
    return split_documents(dataset, data.held_out, data.validation, data.seed)


def _rows_of(examples: TokenExamples) -> Split:
    parts = {name: np.arange(rows.start, rows.stop) for name, rows in examples.parts.items()}
    return Split(parts["train"], parts["validation"], parts["test"])


def _new_model(settings: Decoder, recipe: Recipe, dataset: Dataset, documents: Split) -> tuple[Language, DecoderModule]:
    """A new decoder, and a tokenizer that is trained on the documents of the training part."""
    found = texts(dataset, documents.train)
    is_characters = recipe.text.tokenizer == "characters"
    tokenizer = character_tokenizer(found) if is_characters else byte_pair_tokenizer(found, recipe.text.vocabulary)
    with nn.seeded(recipe.seed):
        module = settings.decoder(recipe.text.length, tokenizer.library.get_vocab_size())
    return Language(module.settings, tokenizer), module


def _check_context(text: Text, language: Language) -> None:
    settings = language.settings
    if settings.rotary is None and text.length > settings.context:
        message = f"text.length: expected at most the {settings.context} tokens of the model, got {text.length}"
        raise RecipeError(message)


def _check(recipe: Recipe, parent: Parent | None) -> None:
    """RecipeError for settings that do not apply to language models."""
    for name in ("preprocess", "augment", "prune", "quantize", "distil", "loss"):
        if getattr(recipe, name):
            raise RecipeError(f"{name}: language models have no such setting")
    if getattr(recipe.model, "head", "keep") == "replace":
        raise RecipeError("model.head: expected `keep` for a language model")
    if recipe.judge == "accuracy":
        raise RecipeError("judge: expected `loss` for a language model")
    if isinstance(recipe.model, Decoder) and recipe.lora is not None:
        raise RecipeError("lora: adapters need a model to fine-tune, got a new decoder")
    if not isinstance(recipe.model, Decoder) and "tokenizer" in recipe.text.model_fields_set:
        raise RecipeError("text.tokenizer: a model to fine-tune has its own tokenizer")
