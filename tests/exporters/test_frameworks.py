"""Models that PyTorch, Paddle and TensorFlow export, against what the frameworks themselves compute.

LATHE_EXPORTERS names a folder with an environment per framework; its interpreter runs the maker of the same name.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.exporters.agreement import folder_agrees

ENVIRONMENTS = Path(os.environ["LATHE_EXPORTERS"])

# What an exporter itself refuses; anything else that is missing fails.
MODELS = {"torch": 42, "paddle": 4, "tensorflow": 3}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("framework", MODELS)
def test_framework(framework: str, tmp_path: Path, subtests: pytest.Subtests) -> None:
    python = (ENVIRONMENTS / framework / "bin" / "python").absolute()
    maker = Path(__file__).with_name(f"make_{framework}.py")
    made = subprocess.run([python, maker, tmp_path], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-4000:]
    folders = sorted(path.parent for path in tmp_path.glob("*/model.onnx"))
    assert len(folders) == MODELS[framework], made.stderr[-4000:]
    for folder in folders:
        with subtests.test(folder.name):
            folder_agrees(folder)
