"""Which live versions are not in memory, so that this server should get no new callers yet."""

from __future__ import annotations

from collections.abc import Iterator

from server.repository.lifecycle import State
from server.repository.live import LiveModel, LiveModels
from server.repository.names import LIVE
from server.types import Awaited


class Readiness:
    """Looks at all models; what a caller unloaded is not waited for.

    A model counts as soon as it has a live version. One without counts only if it lay in the repository when the server
    started: a folder that is copied in later, and turns out to be bad, takes nothing away that was there before. While
    a new live version is loaded the one before it answers, which is no reason to send callers elsewhere.
    """

    def __init__(self, models: LiveModels) -> None:
        self._models = models
        self._found: frozenset[str] | None = None  # None: all count, since the server is starting

    def begin(self) -> None:
        """Remember the models that are there now: the start is over."""
        self._found = frozenset(model.name for model in self._models)

    def awaited(self) -> list[Awaited]:
        """Return what is missing, in the order of names."""
        return [awaited for model in self._models if not model.unloaded for awaited in self._of(model)]

    def _of(self, model: LiveModel) -> Iterator[Awaited]:
        live = model.aliases.version(LIVE)
        if live is None:
            yield from self._first(model)
        elif live not in model.loaded and not self._is_replaced(model, live):
            yield _awaited(model, live)

    def _first(self, model: LiveModel) -> Iterator[Awaited]:
        """A version that was found at the start and was to become the first live one."""
        was_changed = model.aliases.generation > 0  # then a gate may have kept every version from going live
        if was_changed or not model.statuses or not (self._found is None or model.name in self._found):
            return
        yield _awaited(model, max(model.statuses))

    def _is_replaced(self, model: LiveModel, live: int) -> bool:
        """Whether another version answers while the live one is on its way into memory."""
        is_coming = model.status(live).state in (State.PUBLISHED, State.COMPILING, State.LOADING)
        return self._found is not None and is_coming and LIVE in model.answering()


def _awaited(model: LiveModel, version: int) -> Awaited:
    return Awaited(model.name, version, model.status(version).state.value)
