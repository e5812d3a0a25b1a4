"""Data for training: datasets in files, the examples chosen from them, splits, and the loader that makes batches.

What every row goes through stands in the model's graph (`plan`, `preprocess.py`); what changes rows at random, in
training only, happens in the loader (`transforms.py`).

examples = select(open_dataset("digits.npz"))
parts = split(examples, held_out=0.2, seed=0)
with Loader(examples, parts.train, batch=64, seed=0) as loader:
    for batch in loader.epoch(0):
        step.run(batch)                                   # {"x": ..., "target": ...}
"""

import importlib
from typing import TYPE_CHECKING, Any

from core.errors import DataError
from core.train.data.dataset import Column, Dataset, Rows, from_arrays
from core.train.data.examples import Examples, select
from core.train.data.loader import Loader
from core.train.data.opening import open_dataset
from core.train.data.splits import Split, folds, split
from core.train.data.transforms import Transform

if TYPE_CHECKING:
    from core.train.data.preprocess import Plan, Preprocess, plan, taking

__all__ = [
    "Column", "DataError", "Dataset", "Examples", "Loader", "Plan", "Preprocess", "Rows", "Split", "Transform", "folds",
    "from_arrays", "open_dataset", "plan", "select", "split", "taking",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """What writes graphs brings all operators with it, and comes when it is used: describing data needs none."""
    if name not in ("Plan", "Preprocess", "plan", "taking"):
        raise AttributeError(f"module 'core.train.data' has no attribute '{name}'")
    return getattr(importlib.import_module("core.train.data.preprocess"), name)
