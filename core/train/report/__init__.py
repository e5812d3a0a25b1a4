"""Reports of a training: its history, an HTML page, and event files for TensorBoard."""

from lathe.core.train.report.history import History, read_history
from lathe.core.train.report.operators import slowest_operators
from lathe.core.train.report.page import FILE, page, write
from lathe.core.train.report.search import search_section
from lathe.core.train.report.tensorboard import write_tensorboard

__all__ = [
    "FILE",
    "History",
    "page",
    "read_history",
    "search_section",
    "slowest_operators",
    "write",
    "write_tensorboard",
]
