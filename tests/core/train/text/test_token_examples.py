"""Packing of documents into rows of tokens, and tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lathe.core.errors import DataError, ModelError
from lathe.core.train.data import open_dataset
from lathe.core.train.recipe.language_setup import language_examples
from lathe.core.train.recipe.recipe import Data, Text
from lathe.core.train.text.language import Language, parse_language
from lathe.core.train.text.token_examples import TokenExamples, split_documents
from lathe.core.train.text.tokenizer_training import byte_pair_tokenizer, character_tokenizer
from lathe.core.train.zoo.decoder import Decoder
from tests.core.train.text.small_language import write_documents

MESSAGES = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": "no"},
]


def language(texts: list[str]) -> Language:
    tokenizer = character_tokenizer(texts)
    module = Decoder(layers=1, width=8, heads=2).decoder(16, tokenizer.library.get_vocab_size())
    return Language(module.settings, tokenizer)


def packed(path: Path, found: Language, length: int, held_out: float = 0.25) -> TokenExamples:
    return language_examples(Text(length=length), Data(held_out=held_out), open_dataset(path), found)[0]


def test_rows_hold_the_documents_with_their_ends_and_parts_share_none(tmp_path: Path) -> None:
    folder = write_documents(tmp_path / "texts", 8)
    dataset = open_dataset(folder)
    documents = list(dataset.take(np.arange(8))["text"])
    found = language(documents)
    examples = packed(folder, found, 16)
    parts = split_documents(dataset, 0.25, 0.0, 0)
    assert len(parts.test) == 2
    for part, rows in (("train", parts.train), ("test", parts.test)):
        batch = examples.take(np.arange(examples.parts[part].start, examples.parts[part].stop))
        expected = [token for row in rows.tolist() for token in (*found.tokenizer.encode(documents[row]), found.end)]
        tokens = batch["input_ids"].ravel()
        assert tokens[: len(expected)].tolist() == expected
        assert (tokens[len(expected) :] == found.end).all() and len(tokens) - len(expected) < 16
        target = batch["target"].ravel()
        assert target[: len(expected) - 1].tolist() == expected[1:]
        assert (target[len(expected) - 1 :] == -100).all(), "neither padding nor the next part counts"


def test_only_answers_of_conversations_count(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n")
    found = language(["<|im_start|>user\nhiasnyeo<|im_end|>"])
    examples = packed(tmp_path / "chat.jsonl", found, 512, held_out=0.0)
    target = examples.take(np.arange(1))["target"][0]
    answers = "".join(found.tokenizer.decode([token]) for token in target[target >= 0].tolist() if token != found.end)
    assert answers == "yes<|im_end|>\nno<|im_end|>\n"


def test_a_template_of_the_model_decides_what_an_answer_is(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n")
    base = language(["UA:hiyesandno."])
    template = (
        "{% for m in messages %}{{ 'U:' if m.role == 'user' else 'A:' }}{{ m.content }}.{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    examples = packed(tmp_path / "chat.jsonl", Language(base.settings, base.tokenizer, template), 64, held_out=0.0)
    target = examples.take(np.arange(1))["target"][0]
    assert base.tokenizer.decode(target[target >= 0].tolist()) == "yes.no."


def test_shares_without_a_document_are_refused(tmp_path: Path) -> None:
    dataset = open_dataset(write_documents(tmp_path / "texts", 3))
    with pytest.raises(DataError, match="held_out is"):
        split_documents(dataset, 0.1, 0.0, 0)


def test_other_data_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="needs documents"):
        packed(tmp_path / "t.csv", language(["ab"]), 16)


@pytest.mark.parametrize("kind", ["characters", "bpe"])
def test_tokenizers_give_the_text_back(kind: str) -> None:
    texts = ["the cat — sat\n on the mat", "the hat"]
    trained = character_tokenizer(texts) if kind == "characters" else byte_pair_tokenizer(texts, 300)
    assert trained.decode(trained.encode(texts[0])) == texts[0]
    assert trained.decode([*trained.encode("the"), *trained.ends]) == "the"
    if kind == "bpe":
        assert trained.decode(trained.encode("ünknown")) == "ünknown", "it has every byte"
        assert len(trained.encode("the")) < 3
        again = byte_pair_tokenizer(texts, 300)
        assert again.library.to_str() == trained.library.to_str()


def test_a_language_survives_its_metadata() -> None:
    found = language(["abc"])
    again = parse_language(found.dump())
    assert (again.settings, again.end, again.tokenizer.encode("cab")) == (
        found.settings,
        found.end,
        found.tokenizer.encode("cab"),
    )
    with pytest.raises(ModelError, match="language"):
        parse_language("{}")
