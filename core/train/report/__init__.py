"""Looking at a training: a page of HTML, event files for TensorBoard, its curves in a line of text."""

from core.train.report.history import History, read_history
from core.train.report.operators import slowest
from core.train.report.page import FILE, page, write
from core.train.report.search import section
from core.train.report.tensorboard import write_tensorboard

__all__ = ["FILE", "History", "page", "read_history", "section", "slowest", "write", "write_tensorboard"]
