"""Training data: dataset files, selection of columns, splits, and the loader that makes batches.

Preprocessing of every row is part of the model's graph (`plan`, `preprocess.py`). Random augmentation happens in the
loader, in training only (`transforms.py`).

examples = select(open_dataset("digits.npz"))
parts = split(examples, held_out=0.2, seed=0)
with Loader(examples, parts.train, batch=64, seed=0) as loader:
    for batch in loader.epoch(0):
        step.run(batch)                                   # {"x": ..., "target": ...}
"""

import importlib
from typing import TYPE_CHECKING, Any

from lathe.core.errors import DataError
from lathe.core.train.data.dataset import Column, Dataset, Rows, from_arrays
from lathe.core.train.data.examples import Examples, default_target, select, select_inputs
from lathe.core.train.data.formats import open_dataset
from lathe.core.train.data.loader import Loader
from lathe.core.train.data.splits import Split, folds, split
from lathe.core.train.data.transforms import Transform

if TYPE_CHECKING:
    from lathe.core.train.data.preprocess import Plan, Preprocess, plan, taking

__all__ = [
    "Column", "DataError", "Dataset", "Examples", "Loader", "Plan", "Preprocess", "Rows", "Split", "Transform",
    "default_target", "folds", "from_arrays", "open_dataset", "plan", "select", "select_inputs", "split", "taking",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import `preprocess` on first use: it imports all operators, which describing a dataset does not need."""
    if name not in ("Plan", "Preprocess", "plan", "taking"):
        raise AttributeError(f"module 'lathe.core.train.data' has no attribute '{name}'")
    return getattr(importlib.import_module("lathe.core.train.data.preprocess"), name)
