"""`client.push` and `lathe push` of PyTorch's models, against what PyTorch answers.

Lathe's own environment has no torch: the modules are pushed by an interpreter that has, LATHE_EXPORTERS/torch's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lathe.server.client import Client
from tests.server.cli.running import PROJECT, run_lathe
from tests.server.cli.test_cli import server_process

pytestmark = pytest.mark.timeout(600)
PYTHON = (Path(os.environ["LATHE_EXPORTERS"]) / "torch" / "bin" / "python").absolute()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with server_process(tmp_path_factory.mktemp("repo"), tmp_path_factory.mktemp("cache")) as (_, url):
        yield url


@pytest.fixture(scope="module")
def pushed(url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which PyTorch's answers lie, once all its models are pushed."""
    folder = tmp_path_factory.mktemp("pushed")
    script = Path(__file__).with_name("push_torch.py")
    command = [PYTHON, script, url, folder, PROJECT, sysconfig.get_path("purelib")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("name", ["module", "program", "onnx", "words", "asyncio"])
def test_models_pushed_from_python_answer_like_pytorch(name: str, url: str, pushed: Path) -> None:
    agrees(url, name, pushed / f"{name}.npz")


def test_an_exported_program_in_a_file(url: str, pushed: Path) -> None:
    said = run_lathe("push", "file", str(pushed / "program.pt2"), "--python", str(PYTHON), "--url", url)
    assert said.startswith("file version 1 is ready, live\n")
    assert "input FP32[-1, 4]" in said and "batches  up to" in said
    agrees(url, "file", pushed / "file.npz")


def test_a_damaged_program_is_refused_with_pytorchs_message(url: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bad.pt2", "w") as archive:
        archive.writestr("bad/archive_format", "pt2")
    said = run_lathe("push", "bad", str(tmp_path / "bad.pt2"), "--python", str(PYTHON), "--url", url, fails=True)
    assert said.startswith(f"error: {tmp_path / 'bad.pt2'}: PyTorch: ") and said.count("\n") == 1


def test_errors_say_how_to_fix_them(pushed: Path) -> None:
    said = json.loads((pushed / "refused.json").read_text())
    assert "static shape of 2" in said["fixed"] and "dynamic_shapes=" in said["fixed"]
    assert said["no example"] == ("example: a torch.nn.Module needs an example of its inputs: push(name, module, (x,))")
    assert "does not fit Linear.forward(input: " in said["other arguments"]
    assert "got the class torch.nn.modules.linear.Linear, not an object of it" in said["a class"]
    assert said["an option"] == "example: does not apply to an exported program, which has its own inputs and shapes"
    assert not any("\n" in text for text in said.values())


def agrees(url: str, name: str, file: Path) -> None:
    """Compare a model's answers with PyTorch's, with rows in one batch."""
    arrays = dict(np.load(file))
    inputs = {key[3:]: value for key, value in arrays.items() if key.startswith("in_")}
    with Client(url) as client:
        outputs = client.infer(name, inputs).outputs
        assert client.config(name)["max_batch_size"] > 1
    expected = [arrays[f"out_{i}"] for i in range(len(outputs))]
    for got, wanted in zip(outputs.values(), expected, strict=True):
        np.testing.assert_allclose(got, wanted, 1e-4, 1e-5)
