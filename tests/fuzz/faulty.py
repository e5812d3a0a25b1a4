"""A worker whose cases fail in every possible way, one after the other."""

from __future__ import annotations

import ctypes
import sys

import numpy as np

from tests.fuzz import worker


def check(data: bytes) -> str:
    """Case 0 is refused, 1 raises, 2 takes too much memory, 3 crashes, 4 never ends, the others are refused."""
    global _case
    _case += 1
    match _case:
        case 1:
            raise KeyError("x")
        case 2:
            np.ones(1 << 28, np.float64)
        case 3:
            ctypes.string_at(0)
        case 4:
            while True:
                pass
    return "refused"


_case = -1

if __name__ == "__main__":
    _case += int(sys.argv[3])
    worker.MOST_SECONDS = 0.2
    worker.check = check
    worker.main(*sys.argv[1:])
