"""The switch for checks of rewritten graphs and plans. The checker is imported only if it is on: that takes 10 ms."""

from __future__ import annotations

import os

CHECK_VARIABLE = "LATHE_CHECK_PLANS"


def is_checking() -> bool:
    """Whether every rewritten graph and every plan is checked: the environment has `LATHE_CHECK_PLANS=1`."""
    return os.environ.get(CHECK_VARIABLE) == "1"
