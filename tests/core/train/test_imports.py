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


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "first",
    [
        "lathe.core.train.run.training_loop",
        "lathe.core.train.data.preprocess",
        "lathe.core.train.training_step.train_step",
    ],
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


def test_submodules_of_the_public_package_are_those_of_core() -> None:
    script = """
import sys
from lathe.train.data import Loader, from_arrays, open_dataset, plan, select, split
from lathe import train
import lathe.core.train.data, lathe.train.losses, lathe.train.optimizers, lathe.train.schedules
assert train.data is sys.modules["lathe.train.data"] is lathe.core.train.data
for name in ("losses", "optimizers", "schedules"):
    assert getattr(train, name) is getattr(lathe.core.train, name) is sys.modules["lathe.train." + name]
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_modules_of_layers_can_be_imported_by_their_public_names() -> None:
    script = """
import sys
import lathe.nn.functional as F
from lathe.nn.init import uniform_
from lathe import nn
import lathe.core.nn.functional
assert F is nn.functional is lathe.core.nn.functional is sys.modules["lathe.nn.functional"]
assert callable(uniform_) and callable(F.relu)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
