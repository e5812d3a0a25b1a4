"""Models exported by PyTorch, Paddle and TensorFlow, against the frameworks' own outputs.

LATHE_EXPORTERS names a folder with an environment per framework; its interpreter runs the maker of the same name.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

import lathe
from tests.exporters.agreement import folder_agrees

ENVIRONMENTS = Path(os.environ["LATHE_EXPORTERS"])

# Models that an exporter itself refuses; any other missing model fails.
MODELS = {"torch": 42, "paddle": 4, "tensorflow": 3}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("framework", MODELS)
def test_exported_models_agree_with_their_framework(framework: str, tmp_path: Path, subtests: pytest.Subtests) -> None:
    python = (ENVIRONMENTS / framework / "bin" / "python").absolute()
    maker = Path(__file__).with_name(f"make_{framework}.py")
    made = subprocess.run([python, maker, tmp_path], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-4000:]
    folders = sorted(path.parent for path in tmp_path.glob("*/model.onnx"))
    assert len(folders) == MODELS[framework], made.stderr[-4000:]
    for folder in folders:
        with subtests.test(folder.name):
            folder_agrees(folder)


def test_the_example_of_the_documentation_exports_a_model_that_batches(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/getting-started.md").read_text()
    (example,) = [
        block for block in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "torch" in block
    ]
    python = (ENVIRONMENTS / "torch" / "bin" / "python").absolute()
    made = subprocess.run([python, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-4000:]
    with lathe.compile(tmp_path / "mine.onnx") as session:
        assert session.batching.symbol is not None
        assert session.run({"x": np.ones((5, 4), np.float32)})["y"].shape == (5, 3)
