"""Access to Triton: import, versions, functions from source text, and a lock."""

from __future__ import annotations

import linecache
import threading
from functools import lru_cache
from importlib import metadata
from types import FunctionType
from typing import Any

from lathe.core.errors import UnsupportedError
from lathe.core.kernels.cuda.source import Source

# While Triton's interpreter runs, it replaces the functions of Triton's language, so nothing may compile meanwhile.
LOCK = threading.RLock()

TESTED = ("3.9.0", "3.6.0")  # the tests compile every kernel with each of these versions; the newest first
INTERPRETER = "3.9."  # the versions with whose internals `interpreter.py` works

_CACHED = 256  # functions in the cache


def import_triton() -> Any:
    """The module `triton`. UnsupportedError if it is not installed."""
    try:
        import triton
    except ImportError as error:
        raise UnsupportedError("kernels for GPUs need Triton, which is in the extra 'cuda' of lathe") from error
    return triton


def triton_version() -> str:
    """The version of the installed Triton; "" if there is none."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


def is_interpreter_supported() -> bool:
    """Whether the installed Triton is one whose interpreter can run kernels."""
    return triton_version().startswith(INTERPRETER)


@lru_cache(_CACHED)
def function_of(source: Source) -> FunctionType:
    """The Python function that a source defines, without Triton's `jit` around it.

    Triton reads the function's text through `linecache`, so the text is entered there. UnsupportedError without Triton.
    """
    triton = import_triton()
    file = f"<lathe {source.symbol}>"
    linecache.cache[file] = (len(source.text), None, source.text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": f"lathe.{source.symbol}"}
    exec(compile(source.text, file, "exec"), names)
    function = names[source.symbol]
    plain: FunctionType = function.fn if isinstance(function, triton.runtime.jit.JITFunction) else function
    return plain
