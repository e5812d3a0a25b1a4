"""`lathe serve` in a folder with files named like Lathe's packages: a FastAPI project has a server.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

import lathe.server
from lathe.server.client import Client
from tests.core.small_models import model
from tests.server.running import free_port
from tests.server.server_thread import until

PROJECT = Path(lathe.server.__file__).parents[1]
LATHE = [
    sys.executable,
    "-P",
    "-c",
    "from lathe.server.cli.app import app; app()",
]  # as the installed script does: without the working directory on the path


@pytest.mark.slow
def test_server_py_and_core_of_the_user_do_not_replace_lathes(tmp_path: Path) -> None:
    for name in ("server.py", "core/__init__.py", "json.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit(f'{__file__} was imported')\n")
    (tmp_path / "repo/negative/1").mkdir(parents=True)
    (tmp_path / "repo/negative/1/model.onnx").write_bytes(model("float[n,4] x => float[n,4] y", "y = Neg(x)"))
    port = free_port()
    command = [*LATHE, "serve", "--model-repo", "repo", "--port", str(port), "--threads", "1"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(PROJECT)}, stderr=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: process.poll() is not None or _is_ready(url))
        with Client(url) as client:
            answer = client.infer("negative", {"x": np.ones((1, 4), np.float32)})
        np.testing.assert_array_equal(answer.outputs["y"], -np.ones((1, 4), np.float32))
    finally:
        process.kill()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v2/health/ready").status_code == 200
    except httpx.TransportError:
        return False
