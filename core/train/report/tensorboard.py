"""Exports the curves of a training to event files for TensorBoard."""

from __future__ import annotations

from pathlib import Path

from lathe.core.errors import LatheError
from lathe.core.train.report.history import read_history

_NAMES = {
    "loss": "train/loss", "rate": "train/learning_rate", "rows_per_second": "train/rows_per_second",
    "loss_scale": "train/loss_scale", "skipped": "train/skipped",
}  # fmt: skip


def write_tensorboard(folder: Path, out: Path) -> None:
    """Write the curves of a training, finished or not, into an event file in `out`.

    LatheError if tensorboardX is not installed (extra `train`).
    """
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError as error:
        raise LatheError("TensorBoard files need the extra `train`: pip install '.[train]'") from error
    history = read_history(folder)
    curves = {label: history.train.get(name, []) for name, label in _NAMES.items()}
    curves |= {f"validation/{name}": curve for name, curve in history.validation.items()}
    with SummaryWriter(str(out)) as writer:
        for label, curve in curves.items():
            for step, value in curve:
                writer.add_scalar(label, value, int(step))
