"""Reading data does not import the compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest


def loaded_by(statement: str) -> set[str]:
    """The modules of a fresh process after a statement."""
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_describing_data_loads_neither_operators_nor_compiler() -> None:
    loaded = loaded_by("import lathe.core.train.data.__main__")
    assert "lathe.core.train.data.describe" in loaded
    assert not loaded & {
        "lathe.core.ops",
        "lathe.core.compiler.pipeline",
        "lathe.core.frontends.onnx",
        "llvmlite",
        "onnx",
    }


@pytest.mark.parametrize(
    "first",
    ["lathe.core.train.run.fit_run", "lathe.core.train.data.preprocess", "lathe.core.train.training_step.train_step"],
)
def test_public_names_are_the_same_whatever_was_imported_before(first: str) -> None:
    script = f"""
import {first}
from lathe import train
from lathe.core.train import data
assert callable(train.step) and train.TrainStep.__name__ == "TrainStep"
assert callable(data.plan) and data.Plan.__name__ == "Plan"
assert train.losses.CrossEntropy and train.optimizers.Adam and train.schedules.OneCycle
"""
    subprocess.run([sys.executable, "-c", script], check=True)
