"""Builds the datasets of one server process from its settings."""

from __future__ import annotations

from server.children import Children, Limits
from server.datasets.service import Check, Datasets
from server.datasets.store import DatasetStore
from server.repository.fs import Fs
from server.repository.space import state_space
from server.settings import Settings


def build_datasets(settings: Settings, check: Check | None = None, fs: Fs | None = None) -> Datasets:
    """Wire the objects; ``check`` and ``fs`` are for tests that put doubles in their place."""
    limits = Limits(settings.child_timeout, settings.child_memory, settings.child_processes)
    check = check or Children(limits, ("core.train.data",), "dataset")
    space = state_space(settings)
    store = DatasetStore(settings.state_folder / "datasets", settings.max_datasets, fs, space=space)
    return Datasets(store, check, settings.max_dataset)
