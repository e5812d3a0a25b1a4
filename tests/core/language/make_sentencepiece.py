"""Makes `sentencepiece.json`: a small vocabulary that the library sentencepiece trains, and its tokens for some texts.

    python make_sentencepiece.py [FOLDER]

The texts are pages of the documentation of this project, so another run gives other numbers when they have changed.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import sentencepiece

TEXTS = (
    "Hello world!", "The  model\tis   compiled.\n\nAnd then?", " leading and trailing ", "1234567 8.90 + x_1",
    "naïve Straße 日本語 🙂 ½", "It's we'll I'D", "a", " ", "", "kernel kernels kernelized", "<unk> <s>x",
)  # fmt: skip


def main(folder: Path) -> None:
    docs = Path(__file__).parents[3] / "docs"
    lines = [line for page in ("style.md", "training.md", "gpu.md") for line in (docs / page).read_text().splitlines()]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=600, byte_fallback=True,
        character_coverage=0.99, normalization_rule_name="identity", remove_extra_whitespaces=False,
        minloglevel=2,
    )  # fmt: skip
    trained = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    count = range(trained.vocab_size())
    found = {
        "tokens": [trained.id_to_piece(index) for index in count],
        "scores": [trained.get_score(index) for index in count],
        # The types of GGUF files: 1 normal, 2 unknown, 3 control, 6 byte.
        "types": [
            2 if trained.is_unknown(i) else 3 if trained.is_control(i) else 6 if trained.is_byte(i) else 1
            for i in count
        ],
        "texts": [[text, trained.encode(text), trained.decode(trained.encode(text))] for text in TEXTS],
    }
    (folder / "sentencepiece.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
