"""A value for each parameter of the routes' paths."""

from __future__ import annotations

PARAMETERS = {
    "model": "m", "version": "1", "alias": "blue", "dataset": "d", "region": "r", "job": "0" * 20, "adapter": "a",
}  # fmt: skip
