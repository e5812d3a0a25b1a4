"""The folder of compiled code that the tests' processes share: not the user's own, and `make clean` deletes it."""

from __future__ import annotations

import os
from pathlib import Path

_HOME = Path(__file__).resolve().parents[1] / ".lathe" / "test-cache"


def use_own_cache() -> None:
    """Let `.lathe/test-cache` be the user's cache for this process and its children, which the compiler uses."""
    os.environ["XDG_CACHE_HOME"] = str(_HOME)
    for name in ("LATHE_CACHE_DIR", "LATHE_CACHE"):
        os.environ.pop(name, None)


def share_compiled_code(cache: Path) -> None:
    """Let a server with this cache folder find and keep compiled code where the other tests do.

    Its artifacts are its own, so it still compiles each model in a child process, up to the code of each kernel.
    """
    shared = _HOME / "lathe"
    shared.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    if not (cache / "shared").exists():
        (cache / "shared").symlink_to(shared)
