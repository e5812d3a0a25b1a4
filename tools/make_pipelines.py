"""Rebuilds the example pipelines: `python -m tools.make_pipelines [FOLDER]` (needs the `test` extra).

`digit` maps a picture of a digit to its name, with the bundled model `digits`; `seven.jpg` is a held-out image.

`embedding` maps a text to its embedding. The vocabulary and the vectors of the 900 tokens come from the descriptions of
scikit-learn's data sets (43 kB). The vectors are a latent semantic analysis (Deerwester et al., 1990): the singular
vectors of token counts per paragraph. So it separates flowers from wine, and little else.
"""

from __future__ import annotations

import sys
from collections import Counter
from io import BytesIO
from pathlib import Path

import numpy as np
import onnx
import sklearn
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from tools.make_models import held_out

TOKENS = 900
WIDTH = 24
EXAMPLE = 0  # index of a held-out image
SIDE = 64  # pixels of the example picture
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def paragraphs() -> list[str]:
    """The descriptions of scikit-learn's data sets, split at empty lines, without paragraphs of four words or fewer."""
    folder = Path(sklearn.__file__).parent / "datasets" / "descr"
    texts = (file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.rst")))
    return [part for text in texts for part in text.split("\n\n") if len(part.split()) > 4]


def make_tokenizer(texts: list[str]) -> Tokenizer:
    """A WordPiece tokenizer with the most frequent words, and letters for all others; lower case, no special tokens.

    The library's own trainer is not used, because it breaks ties by memory address and so is not reproducible.
    """
    normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    words = [word for text in texts for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))]
    letters = sorted({letter for word in words for letter in word})
    ranked = sorted(Counter(words).items(), key=lambda item: (-item[1], item[0]))
    pieces = ["[PAD]", "[UNK]", *letters, *(f"##{letter}" for letter in letters), *(word for word, _ in ranked)]
    vocabulary = {piece: number for number, piece in enumerate(list(dict.fromkeys(pieces))[:TOKENS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    return tokenizer


def vectors(tokenizer: Tokenizer, texts: list[str]) -> NDArray[np.float32]:
    """Token vectors `[tokens, WIDTH]` by latent semantic analysis: tokens of the same paragraphs are similar."""
    counts = np.zeros((tokenizer.get_vocab_size(), len(texts)))
    for column, text in enumerate(texts):
        np.add.at(counts[:, column], tokenizer.encode(text).ids, 1)
    rarity = np.log(len(texts) / np.maximum((counts > 0).sum(axis=1), 1))
    left, strength, _ = np.linalg.svd(np.log1p(counts) * rarity[:, None], full_matrices=False)
    # The SVD leaves signs open: make the largest entry of each column positive.
    turned = left[:, :WIDTH] * np.sign(left[np.abs(left[:, :WIDTH]).argmax(axis=0), np.arange(WIDTH)])
    return np.asarray(turned * strength[:WIDTH] * rarity[:, None] / 100, np.float32)


def encoder(table: NDArray[np.float32]) -> onnx.ModelProto:
    """`input_ids [batch,length] int64 -> hidden [batch,length,WIDTH] float32`."""
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "input_ids"], ["hidden"])],
        "text_encoder",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"])],
        [helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["batch", "length", WIDTH])],
        [numpy_helper.from_array(table, "table")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def picture(number: int, side: int = SIDE) -> bytes:
    """A held-out image as a JPEG file of `side` x `side` pixels."""
    grey = np.round(held_out()[0][number, 0] * (255 / 16)).astype(np.uint8)
    file = BytesIO()
    Image.fromarray(grey).resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def main(folder: str = "docs/pipelines") -> None:
    digit, embedding = Path(folder) / "digit", Path(folder) / "embedding"
    for path in (digit, embedding):
        path.mkdir(parents=True, exist_ok=True)
    (digit / "labels.txt").write_text("".join(f"{name}\n" for name in NAMES))
    (digit / f"{NAMES[held_out()[1][EXAMPLE]]}.jpg").write_bytes(picture(EXAMPLE))
    texts = paragraphs()
    tokenizer = make_tokenizer(texts)
    (embedding / "tokenizer.json").write_text(tokenizer.to_str())
    onnx.save(encoder(vectors(tokenizer, texts)), str(embedding / "encoder.onnx"))


if __name__ == "__main__":
    main(*sys.argv[1:])
