"""Makes the example pipelines again: `python -m tools.make_pipelines [FOLDER]`, needs the `test` extra.

`digit`: a picture of a digit in, its name out, over the bundled model `digits`; `seven.jpg` is a held-out image.

`embedding`: a text in, its embedding out. The words and the vectors of the 900 tokens come from the texts that describe
scikit-learn's data sets, 43 kB in all: the vectors are a latent semantic analysis (Deerwester et al., 1990), the
singular vectors of how often each token occurs in each paragraph. So it tells flowers from wine, and little else.
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
EXAMPLE = 0  # of the held-out images
SIDE = 64  # pixels of the example picture
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def paragraphs() -> list[str]:
    """The texts that scikit-learn brings along, cut at empty lines."""
    folder = Path(sklearn.__file__).parent / "datasets" / "descr"
    texts = (file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.rst")))
    return [part for text in texts for part in text.split("\n\n") if len(part.split()) > 4]


def make_tokenizer(texts: list[str]) -> Tokenizer:
    """The most frequent words, and the letters for the others; lower case, no special tokens around a text.

    (The library's own trainer breaks ties by the addresses of its tables, so no two runs agree.)
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
    """`[tokens, WIDTH]`: what occurs in the same paragraphs points the same way."""
    counts = np.zeros((tokenizer.get_vocab_size(), len(texts)))
    for column, text in enumerate(texts):
        np.add.at(counts[:, column], tokenizer.encode(text).ids, 1)
    rarity = np.log(len(texts) / np.maximum((counts > 0).sum(axis=1), 1))
    left, strength, _ = np.linalg.svd(np.log1p(counts) * rarity[:, None], full_matrices=False)
    turned = left[:, :WIDTH] * np.sign(left[np.abs(left[:, :WIDTH]).argmax(axis=0), np.arange(WIDTH)])  # signs are free
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
