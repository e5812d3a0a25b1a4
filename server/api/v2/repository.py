"""The model repository extension of the protocol: index, load and unload."""

from __future__ import annotations

from typing import Any

from lathe.server.repository import names
from lathe.server.repository.catalog import IndexEntry
from lathe.server.repository.lifecycle import State
from lathe.server.repository.rollout import Rollout

_PROTOCOL_STATE = {
    State.READY: "READY",
    State.COMPILING: "LOADING",
    State.LOADING: "LOADING",
    State.DRAINING: "UNLOADING",
}


class ProtocolControl:
    """Implements the extension on top of `Rollout`."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout

    async def index(self, ready: bool = False) -> list[dict[str, Any]]:
        """Name, version, state and, if there is one, the reason of every version, or only of the ready ones."""
        entries = self._rollout.index()
        return [_index_entry(entry) for entry in entries if entry.status.state is State.READY or not ready]

    async def load(self, model: str, parameters: dict[str, Any] | None = None) -> None:
        """Load or reload a model; NotFound if it is unknown.

        If no version answers as `live` afterwards, raises the error that prevents it. Unsupported for `parameters` that
        hold files or a configuration; all other parameters are ignored.
        """
        await self._rollout.load(names.check_model(model), parameters or {})

    async def unload(self, model: str, unload_dependents: bool = False) -> None:
        """Unload a model; NotFound if it is unknown, Conflict if a loaded pipeline names one of its versions by number.

        A pipeline that follows an alias of the model answers Unavailable until the model is loaded again.
        `unload_dependents` has no effect: versions that only an unloaded pipeline kept in memory leave with it, and its
        other models stay.
        """
        await self._rollout.unload(names.check_model(model))


def _index_entry(entry: IndexEntry) -> dict[str, Any]:
    state = _PROTOCOL_STATE.get(entry.status.state, "UNAVAILABLE")
    line = {"name": entry.name, "version": str(entry.version), "state": state}
    reason = entry.status.reason or ("" if state == "READY" else entry.status.state.value)
    return {**line, "reason": reason} if reason else line
