"""docs/nn.md is correct: its examples run, its error messages are the real ones, its lists are complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lathe import nn
from lathe.core.errors import ModelError, TraceError

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "nn.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
MESSAGES = [" ".join(text.split()) for text in re.findall(r"```\n(\w.*?)```", PAGE, re.DOTALL)]


def test_the_examples_run(tmp_path: Path) -> None:
    """One after the other in one process."""
    script = tmp_path / "examples.py"
    script.write_text("\n".join(EXAMPLES))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LATHE_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    shape, loss, halved, *products, sequences = done.stdout.splitlines()
    assert shape.startswith("(2, 16, 5, 5)")
    assert 2 < float(loss) < 3
    assert halved == "[0.125 0.25  0.375 0.5  ]"
    assert products == ["[[2. 2. 2. 2.]", " [0. 0. 0. 0.]", " [4. 4. 4. 4.]]"]
    assert sequences == "(2, 4) [2, 5]"


def test_the_error_messages_are_the_real_ones() -> None:
    namespace: dict[str, type[nn.Module]] = {}
    exec(EXAMPLES[0], namespace)
    with pytest.raises(ModelError) as wrong:
        namespace["LeNet5"]()(np.zeros((2, 3, 28, 28), np.float32))
    with pytest.raises(TraceError) as unknown:
        nn.trace(lambda x: x if x.sum() > 0 else -x, {"x": "float32[n]"})
    assert [str(wrong.value), str(unknown.value)] == MESSAGES


def test_the_lists_are_complete() -> None:
    table = PAGE.partition("## Layers and functions")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(?:nn\.)?(\w+)`", table))
    layers = {name for name in nn.__all__ if name[0].isupper() and name not in ("ACTIVATIONS", "Tensor", "Identity")}
    assert layers <= named
    assert {name for name in named if name[0].isupper()} <= {*nn.__all__, "Dropout"}
