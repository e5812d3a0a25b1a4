"""docs/lab.md: its code runs unchanged, from data to a served version."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lathe.core.train import Trained
from lathe.server.client import Client
from tests.server.cli.test_cli import server_process

PAGE = "docs/lab.md"
URL = "http://127.0.0.1:8080"  # the address that the page uses


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_lab_ends_with_a_served_version(project: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (project / PAGE).read_text(), re.DOTALL | re.MULTILINE)
    for name in ("lab", "repo"):
        (tmp_path / name).mkdir()
    script = tmp_path / "lab" / "lab.py"
    with server_process(tmp_path / "repo", tmp_path / "cache") as (_, url):
        script.write_text("\n".join(blocks).replace(URL, url))
        environment = {**os.environ, "PYTHONPATH": str(project), "LATHE_CACHE_DIR": str(tmp_path / "compiled")}
        command = [sys.executable, str(script)]
        done = subprocess.run(command, cwd=script.parent, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        with Client(url) as client:
            assert [state.version for state in client.versions("lenet")] == [1, 2]
            assert client.infer("lenet", {"x": np.zeros((1, 1, 8, 8), np.float32)}).version == 1  # after the rollback
    trained, better = (Trained(script.parent / name) for name in ("lenet", "lenet-2"))
    assert min(trained.metrics["accuracy"], better.metrics["accuracy"]) > 0.9
    assert trained.report.exists() and (script.parent / "lenet.onnx").read_bytes() == better.path.read_bytes()
    assert "[0 1 2 3 4] by version 1" in done.stdout
    assert "epoch 10/10" in done.stdout and "preprocess" in done.stdout
