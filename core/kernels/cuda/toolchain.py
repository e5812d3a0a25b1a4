"""The one place that imports Triton: functions out of text, and a lock."""

from __future__ import annotations

import linecache
import threading
from functools import lru_cache
from importlib import metadata
from types import FunctionType
from typing import Any

from core.errors import UnsupportedError
from core.kernels.cuda.source import Source

# Triton's interpreter replaces what its language is made of while it runs, so nothing may compile at that time.
LOCK = threading.RLock()

TESTED = ("3.9.0", "3.6.0")  # every kernel is compiled with each of these in the tests; the newest one first
INTERPRETER = "3.9."  # the versions whose insides the interpreter of kernels reads

_KEPT = 256  # functions


def module() -> Any:
    """Triton, or UnsupportedError that says how to get it."""
    try:
        import triton
    except ImportError as error:
        raise UnsupportedError("kernels for GPUs need Triton, which is in the extra 'cuda' of lathe") from error
    return triton


def triton_version() -> str:
    """The version of Triton that is installed; "" for none."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


def interprets() -> bool:
    """Whether the installed Triton is one whose interpreter can run kernels."""
    return triton_version().startswith(INTERPRETER)


@lru_cache(_KEPT)
def function_of(source: Source) -> FunctionType:
    """The function that a source defines, as plain Python. Triton reads its text back by way of `linecache`."""
    triton = module()
    file = f"<lathe {source.symbol}>"
    linecache.cache[file] = (len(source.text), None, source.text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": f"lathe.{source.symbol}"}
    exec(compile(source.text, file, "exec"), names)
    function = names[source.symbol]
    plain: FunctionType = function.fn if isinstance(function, triton.runtime.jit.JITFunction) else function
    return plain
