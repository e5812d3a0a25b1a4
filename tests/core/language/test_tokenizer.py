"""Tokenizers from `tokenizer.json` and from the vocabulary in a GGUF file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

import lathe
from lathe.core.errors import ModelError, UnsupportedError
from lathe.core.language.gguf import read_gguf
from lathe.core.language.gguf_tokenizer import make_tokenizer
from tests.core.language.families import gguf_content, write_folder
from tests.core.language.gguf_writer import gguf_bytes

TEXTS = (
    "Hello world!", "  two  spaces\n\n\nand\tlines ", "1234567 8.90", "naïve Straße 日本語 🙂", "It's we'll I'D",
    "<|im_start|>user\nhi<|im_end|>", "a<b>tool</b>", "",
)  # fmt: skip
SPECIAL, USER = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), ("<b>",)
PIECES = json.loads((Path(__file__).parent / "sentencepiece.json").read_text())
SPLITS: dict[str, Any] = {
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
}


def trained(pre: str = "smollm") -> Tokenizer:
    """A byte-level BPE tokenizer, trained by the library on this file."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = SPLITS[pre], decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=list(SPECIAL),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator([Path(__file__).read_text(), *TEXTS], trainer)
    made.add_tokens([AddedToken(token, normalized=False) for token in USER])
    return made


def vocabulary(pre: str = "smollm", **more: tuple[str, Any]) -> dict[str, Any]:
    """The metadata of a GGUF file with the vocabulary of `trained`."""
    made = trained(pre)
    tokens = [made.id_to_token(index) for index in range(made.get_vocab_size())]
    merges = [" ".join(pair) for pair in json.loads(made.to_str())["model"]["merges"]]
    kinds = [3 if token in SPECIAL else 4 if token in USER else 1 for token in tokens]
    fields = {
        "model": ("str", "gpt2"), "pre": ("str", pre), "tokens": ("strs", tokens), "merges": ("strs", merges),
        "token_type": ("i32s", kinds), "bos_token_id": ("u32", 1), "eos_token_id": ("u32", 2),
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in {**fields, **more}.items()}


def made_from(tmp_path: Path, metadata: dict[str, Any]) -> Any:
    (tmp_path / "model.gguf").write_bytes(gguf_bytes(metadata, {}))
    return make_tokenizer(read_gguf(tmp_path / "model.gguf"))


@pytest.mark.parametrize("pre", SPLITS)
def test_a_gguf_vocabulary_gives_the_tokens_of_the_library(tmp_path: Path, pre: str) -> None:
    found, oracle = made_from(tmp_path, vocabulary(pre)), trained(pre)
    for text in TEXTS:
        assert found.encode(text) == oracle.encode(text).ids, text
        assert found.decode(found.encode(text), special=True) == text
    assert found.ends == (2,)
    assert found.encode("<|im_end|>") == [2]
    assert found.decode([2]) == ""


def pieces(**more: tuple[str, Any]) -> dict[str, Any]:
    """The metadata of a GGUF file with the vocabulary that sentencepiece trained."""
    fields = {
        "model": ("str", "llama"), "tokens": ("strs", PIECES["tokens"]), "scores": ("f32s", PIECES["scores"]),
        "token_type": ("i32s", PIECES["types"]), "unknown_token_id": ("u32", 0), "bos_token_id": ("u32", 1),
        "eos_token_id": ("u32", 2),
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in {**fields, **more}.items()}


def test_pieces_with_scores_give_the_tokens_of_sentencepiece(tmp_path: Path) -> None:
    found = made_from(tmp_path, pieces())
    for text, tokens, decoded in PIECES["texts"]:
        if "<s>" not in text:  # sentencepiece splits the text of special tokens
            assert found.encode(text, special=False) == tokens, text
        assert found.decode(tokens) == decoded
    assert found.encode("a") == [1, *found.encode("a", special=False)]
    assert found.encode("a</s>", special=False)[-1] == 2


def test_pieces_without_a_space_before_the_text(tmp_path: Path) -> None:
    """The option `add_dummy_prefix` of sentencepiece; the first word has no space then."""
    plain, found = made_from(tmp_path, pieces()), made_from(tmp_path, pieces(add_space_prefix=("bool", False)))
    for text in (" the kernel", " a"):
        assert found.encode(text) == plain.encode(text[1:])
        assert found.decode(found.encode(text)) == text


def test_long_pieces_are_refused(tmp_path: Path) -> None:
    tokens = [*PIECES["tokens"][:-1], "x" * 5000]
    with pytest.raises(
        ModelError, match=r"tokenizer\.ggml\.tokens: expected tokens of at most 1024 characters, got 5000"
    ):
        made_from(tmp_path, pieces(tokens=("strs", tokens)))


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("llama-bpe", "I'LL pay 12345 €!\n\n x", ["I", "'LL", " pay", " ", "123", "45", " €!\n\n", " x"]),
        ("qwen2", "I'LL pay 12345 €!\n\n x", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", " €!\n\n", " x"]),
    ],
)
def test_words_before_merging(tmp_path: Path, pre: str, text: str, words: list[str]) -> None:
    """Each word becomes tokens by itself; the words are those of the models' own `tokenizer.json`."""
    found = made_from(tmp_path, vocabulary() | {"tokenizer.ggml.pre": ("str", pre)})
    pieces = found.library.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in pieces] == words


def test_a_begin_token_is_added_if_the_file_says_so(tmp_path: Path) -> None:
    found = made_from(tmp_path, vocabulary(add_bos_token=("bool", True)))
    plain = made_from(tmp_path, vocabulary())
    assert found.encode("abc") == [1, *plain.encode("abc")]
    assert found.encode("abc", special=False) == plain.encode("abc")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": ("str", "bert")}, r"tokenizer\.ggml\.model: expected one of gpt2, llama, got \"bert\""),
        ({"model": ("str", "llama")}, r"tokenizer\.ggml\.scores: expected \d+ numbers, got nothing"),
        ({"pre": ("str", "x")}, r"tokenizer\.ggml\.pre: expected one of gpt-2, smollm, .*, got \"x\""),
        ({"tokens": ("u32", 3)}, r"tokenizer\.ggml\.tokens: expected a list of strings, got 3"),
        ({"merges": ("strs", ["never seen"])}, "expected a vocabulary and merges: "),
        ({"token_type": ("i32s", [1])}, r"tokenizer\.ggml\.token_type: expected \d+ numbers"),
        ({"eos_token_id": ("u32", 9999)}, r"tokenizer\.ggml\.eos_token_id: expected a token below \d+, got 9999"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_an_error(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        made_from(tmp_path, vocabulary() | {f"tokenizer.ggml.{key}": value for key, value in change.items()})


def test_the_tokenizer_and_the_template_of_a_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "llama")
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read: No such file"):
        _ = lathe.load_language_model(folder).tokenizer
    (folder / "tokenizer.json").write_text(trained().to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    model = lathe.load_language_model(folder)
    assert model.tokenizer.encode(TEXTS[0]) == trained().encode(TEXTS[0]).ids
    assert (model.tokenizer.ends, model.chat_template) == ((2, 0), "{{ messages }}")
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert lathe.load_language_model(folder).chat_template == "d"
    (folder / "chat_template.jinja").write_text("{{ file }}")
    assert lathe.load_language_model(folder).chat_template == "{{ file }}"
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: expected a tokenizer: "):
        _ = lathe.load_language_model(folder).tokenizer


def test_the_template_of_a_gguf_file_is_kept(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf_content("llama"))
    assert lathe.load_language_model(tmp_path / "model.gguf").chat_template is None


def test_without_the_library_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path, "llama")
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UnsupportedError, match=r"needs the library tokenizers: install the extra 'text'"):
        _ = lathe.load_language_model(folder).tokenizer
