"""Builds the datasets of one server process from its settings."""

from __future__ import annotations

from lathe.server.datasets.service import Check, Datasets
from lathe.server.datasets.store import DatasetStore
from lathe.server.processes.stage_children import Children, Limits
from lathe.server.repository.disk_space import state_space
from lathe.server.repository.fs import Fs
from lathe.server.settings import Settings


def build_datasets(settings: Settings, check: Check | None = None, fs: Fs | None = None) -> Datasets:
    """Build the objects of datasets; tests pass test doubles as `check` and `fs`."""
    limits = Limits(settings.child_timeout, settings.child_memory, settings.child_processes)
    check = check or Children(limits, ("lathe.core.train.data",), "dataset")
    space = state_space(settings)
    store = DatasetStore(settings.state_folder / "datasets", settings.max_datasets, fs, space=space)
    return Datasets(store, check, settings.max_dataset)
