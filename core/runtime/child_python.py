"""How a child process of Python is started: it finds this very package, and nothing of the working directory.

A user's project may have a `server.py` or a folder `core/`. Python looks for modules in the working directory first,
and an empty entry of PYTHONPATH (left by ``PYTHONPATH=$PYTHONPATH:/x``) stands for the working directory, too.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

OPERATORS = "LATHE_OPERATORS"  # environment: modules of custom operators, which child processes import
_ROOT = Path(__file__).resolve().parents[2]  # the folder that holds this package
_INSTALLED = {sysconfig.get_path(name) for name in ("purelib", "platlib")}  # where every Python process looks


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module; start it with :func:`python_path` in its environment."""
    return [sys.executable, "-P", "-m", module, *arguments]


def python_path() -> str:
    """Return what PYTHONPATH is to be in a child: the folder of this package goes first."""
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    folders = dict.fromkeys((str(_ROOT), *inherited, *_folders_of_operators()))
    return os.pathsep.join(folder for folder in folders if folder not in _INSTALLED)


def environment() -> dict[str, str]:
    """Return this process's environment as a child of the same user may see it."""
    return {**os.environ, "PYTHONPATH": python_path()}


def _folders_of_operators() -> Iterator[str]:
    """The folders where this process found modules of custom operators: a script's own, for example."""
    for name in filter(None, map(str.strip, os.environ.get(OPERATORS, "").split(","))):
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file is not None:
            is_package = hasattr(module, "__path__")
            yield str(Path(file).resolve().parents[name.count(".") + is_package])
