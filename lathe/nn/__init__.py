"""Models in Python, with the names and arguments of PyTorch: see `lathe.core.nn`."""

from lathe.core.nn import *  # noqa: F403
from lathe.core.nn import __all__ as __all__
