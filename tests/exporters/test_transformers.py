"""Architectures of Transformers and torchvision from both exporters of PyTorch, against ONNX Runtime.

Models with independent rows must be batchable, and no node may run on the reference."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import lathe
from tests.exporters.corpus import examined
from tests.onnx_runtime import plain_session

PYTHON = (Path(os.environ["LATHE_EXPORTERS"]) / "torch" / "bin" / "python").absolute()
LEAST = 335  # models; those that an exporter refuses are missing


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
            assert found.result == "agrees", found.notes
            assert found.batchable or not found.independent, found.notes
            assert not found.fallbacks, found.notes


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("name", ["gpt2_past", "llama_past"])
def test_one_code_for_all_lengths_of_a_past(tmp_path: Path, name: str, exporter: str) -> None:
    maker = Path(__file__).with_name("make_transformers.py")
    subprocess.run([PYTHON, maker, tmp_path, name], capture_output=True, check=True)
    path = tmp_path / f"{name}.{exporter}" / "model.onnx"
    oracle, rng = plain_session(path), np.random.default_rng(0)
    with lathe.compile(path, threads=1, new_shapes="wait", tune="off", cache_dir=tmp_path / "cache") as session:
        for past in (0, 1, 2, 7, 31, 32, 33, *range(8, 50)):
            kept = {each: (2, 4, past, 16) for each in session.inputs if each.startswith("past")}
            feeds = {each: rng.standard_normal(shape).astype(np.float32) for each, shape in kept.items()}
            feeds["input_ids"] = rng.integers(3, 90, (2, 1))
            feeds["attention_mask"] = np.ones((2, past + 1), np.int64)
            for got, want in zip(session.run(feeds).values(), oracle.run(None, feeds), strict=True):
                np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
        assert not session._shapes.cached_runners(), "dynamic-shape code serves every length"
