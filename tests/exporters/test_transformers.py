"""Architectures of Transformers and torchvision from both exporters of PyTorch: they agree with ONNX Runtime, share
batches where rows are independent, and leave no node to the reference."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.exporters.corpus import examined

PYTHON = (Path(os.environ["LATHE_EXPORTERS"]) / "torch" / "bin" / "python").absolute()
LEAST = 150  # models; what an exporter refuses is missing

# Exported wrongly: a size of the example became a constant.
REFUSED = dict.fromkeys(("gpt2_past.dynamo", "llama_past.dynamo"), "ORT no")


@pytest.mark.timeout(3 * 3600)
def test_exported_architectures(tmp_path: Path, subtests: pytest.Subtests) -> None:
    maker = Path(__file__).with_name("make_transformers.py")
    made = subprocess.run([PYTHON, maker, tmp_path], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-4000:]
    folders = sorted(path.parent for path in tmp_path.glob("*/model.onnx"))
    assert len(folders) >= LEAST, made.stderr[-4000:]
    for folder in folders:
        with subtests.test(folder.name):
            found = examined(folder)
            assert found.result == REFUSED.get(folder.name, "agrees"), found.notes
            assert found.batchable or not found.independent, found.notes
            assert not found.fallbacks, found.notes
