"""Whether rewritten graphs and plans are checked. The checker itself is read only where they are: it takes 10 ms."""

from __future__ import annotations

import os

SWITCH = "LATHE_CHECK_PLANS"


def is_on() -> bool:
    """Whether every graph and every plan is to be checked."""
    return os.environ.get(SWITCH) == "1"
