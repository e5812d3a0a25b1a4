"""Starts child processes of Python that import this very package, and nothing from the working directory.

A user's project may have a `lathe.py` or a `json.py`. Python looks for modules in the working directory first, and an
empty entry of PYTHONPATH (left by `PYTHONPATH=$PYTHONPATH:/x`) stands for the working directory, too.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import lathe

OPERATORS = "LATHE_OPERATORS"  # environment: modules of custom operators, which child processes import
_ROOT = Path(lathe.__file__).resolve().parents[1]  # the folder that holds the package `lathe`
_INSTALLED = {sysconfig.get_path(name) for name in ("purelib", "platlib")}  # where every Python process looks


def command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module with `arguments`; start it with the variables of `environment`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def python_path() -> str:
    """PYTHONPATH for a child: this package's folder, the inherited entries, then the folders of custom operators.

    Folders of installed packages are left out.
    """
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    folders = dict.fromkeys((str(_ROOT), *inherited, *_operator_folders()))
    return os.pathsep.join(folder for folder in folders if folder not in _INSTALLED)


def environment() -> dict[str, str]:
    """This process's environment variables, with PYTHONPATH set to `python_path()`, for a child of the same user."""
    return {**os.environ, "PYTHONPATH": python_path()}


def _operator_folders() -> Iterator[str]:
    """The folders from which this process imported the modules of custom operators: a script's own, for example."""
    for name in filter(None, map(str.strip, os.environ.get(OPERATORS, "").split(","))):
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file is not None:
            is_package = hasattr(module, "__path__")
            yield str(Path(file).resolve().parents[name.count(".") + is_package])
