"""The inference protocol's repository extension, in its own words."""

from __future__ import annotations

from typing import Any

from server.repository import names
from server.repository.catalog import IndexEntry
from server.repository.lifecycle import State
from server.repository.rollout import Rollout

_WORDS = {
    State.READY: "READY",
    State.COMPILING: "LOADING",
    State.LOADING: "LOADING",
    State.DRAINING: "UNLOADING",
}


class ProtocolControl:
    """Index, load and unload of whole models."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout

    async def index(self, ready: bool = False) -> list[dict[str, Any]]:
        """Return name, version, state and reason of every version, or of the ready ones."""
        entries = self._rollout.index()
        return [_line(entry) for entry in entries if entry.status.state is State.READY or not ready]

    async def load(self, model: str, parameters: dict[str, Any] | None = None) -> None:
        """Load or reload a model; raises NotFound for an unknown one."""
        await self._rollout.load(names.check_model(model), parameters or {})

    async def unload(self, model: str, unload_dependents: bool = False) -> None:
        """Take a model out of service; raises NotFound for an unknown one. No model depends on another here."""
        await self._rollout.unload(names.check_model(model))


def _line(entry: IndexEntry) -> dict[str, Any]:
    state = _WORDS.get(entry.status.state, "UNAVAILABLE")
    line = {"name": entry.name, "version": str(entry.version), "state": state}
    reason = entry.status.reason or ("" if state == "READY" else entry.status.state.value)
    return {**line, "reason": reason} if reason else line
