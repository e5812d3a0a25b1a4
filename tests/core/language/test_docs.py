"""The examples of docs/generate.md run, on a small model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lathe.core.language import encoder_decoder_files, gguf_model, hugging_face
from lathe.core.language.gguf_blocks import BLOCK_TYPES
from lathe.core.language.gguf_tokenizer import PRE_TOKENIZERS
from tests.core.language.checkpoints import gguf_parts, weight
from tests.core.language.families import FAMILIES, config, weights
from tests.core.language.gguf_writer import floats, gguf_bytes
from tests.core.language.test_encoder_decoders import RECORDED, write_folder
from tests.core.language.test_tokenizer import vocabulary

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "generate.md").read_text()


@pytest.mark.slow
def test_the_examples_run(tmp_path: Path) -> None:
    """One after the other in one process; files have the names in the page, and small models."""
    fields = vocabulary()
    tokens = len(fields["tokenizer.ggml.tokens"][1])
    embedding = {"model.embed_tokens.weight": weight("docs", "embedding", (tokens, 48))}
    metadata, arrays = gguf_parts({**config("llama-tied"), "vocab_size": tokens}, weights("llama-tied") | embedding)
    content = gguf_bytes(metadata | fields, {key: floats(array) for key, array in arrays.items()})
    (file,) = re.findall(r'load_language_model\("([^"]+)"\)', PAGE)
    (tmp_path / file).write_bytes(content)
    (folder,) = re.findall(r'load_encoder_decoder\("([^"]+)"\)', PAGE)
    (tmp_path / folder).mkdir()
    write_folder(tmp_path / folder, "whisper")
    script = tmp_path / "examples.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LATHE_CACHE_DIR": str(tmp_path / "cache")}
    environment["LATHE_CHECK_PLANS"] = "0"  # tests of the same models check their plans
    done = subprocess.run(
        [sys.executable, script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert "The capital of France is" in done.stdout
    assert 0 < float(done.stdout.splitlines()[-1]) < 20


def test_the_page_names_all_types_and_vocabularies() -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| GGUF file")]
    decoded = {type_.name for type_ in BLOCK_TYPES.values() if type_.decode is not None}
    assert set(re.findall(r"\b(?:B?F\d+|Q\d_\w+)\b", row)) == decoded
    assert set(re.findall(r"`([a-z0-9-]+)`", row)) == set(PRE_TOKENIZERS)


def test_the_page_names_all_encoder_decoders() -> None:
    part = PAGE.split("## Encoder-decoders")[1].split("\n## ")[0]
    families = set(re.findall(r"^\| [^|]+ \| `(\w+)` \|", part, re.MULTILINE)) - {"model_type"}
    assert families == set(encoder_decoder_files.FAMILIES)
    assert {each["config"]["model_type"] for each in RECORDED.values()} == families, "each has a checkpoint"


def test_the_page_names_all_families() -> None:
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \| `(\w+)` \|", PAGE, re.MULTILINE)
    assert {family for family, _ in rows} == set(hugging_face.FAMILIES)
    assert {family for _, family in rows} == set(gguf_model.FAMILIES)
    assert {config(name)["model_type"] for name in FAMILIES} == set(hugging_face.FAMILIES), "each has a checkpoint"
