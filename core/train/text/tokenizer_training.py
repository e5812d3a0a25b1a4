"""Tokenizers of new language models, trained on documents by the library `tokenizers`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from lathe.core.errors import DataError
from lathe.core.language.tokenizer import Tokenizer, tokenizers_library

END, UNKNOWN = "<|endoftext|>", "<|unknown|>"
_MOST_CHARACTERS = 1 << 16


def character_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """One token for each character that occurs in the texts, and one for all others.

    DataError for more than 65,536 different characters. UnsupportedError without the library.
    """
    library = tokenizers_library("text.tokenizer")
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    if len(counts) > _MOST_CHARACTERS:
        raise DataError(f"text: expected at most {_MOST_CHARACTERS} different characters, got {len(counts)}")
    vocabulary = {token: number for number, token in enumerate((END, UNKNOWN, *sorted(counts)))}
    found = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token=UNKNOWN))
    found.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(r"[\s\S]"), "isolated")
    found.decoder = library.decoders.Fuse()
    found.add_special_tokens([END, UNKNOWN])
    return Tokenizer(found, (vocabulary[END],))


def byte_pair_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE of at most `vocabulary` tokens (Sennrich et al., 2016; Radford et al., 2019); it has every byte.

    UnsupportedError without the library.
    """
    library = tokenizers_library("text.tokenizer")
    found = library.Tokenizer(library.models.BPE())
    found.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(texts, trainer)
    return Tokenizer(found, (found.token_to_id(END),))
