"""Readiness: while live versions are not in memory yet, the server should get no new clients."""

from __future__ import annotations

from collections.abc import Iterator

from lathe.server.repository.lifecycle import State
from lathe.server.repository.live_models import LiveModel, LiveModels
from lathe.server.repository.names import LIVE_ALIAS
from lathe.server.types import MissingVersion


class Readiness:
    """Decides which versions the server must load before it is ready. Models that a call unloaded do not count.

    A model with a live version counts. A model without one counts only if it was in the repository when the server
    started: an invalid folder that is copied in later must not make a working server unready. While a new live version
    is loaded, the previous one answers, and the server stays ready.
    """

    def __init__(self, models: LiveModels) -> None:
        self._models = models
        self._found: frozenset[str] | None = (
            None  # models found at the start; None: still starting, so all models count
        )

    def begin(self) -> None:
        """Remember the models that exist now: the start is over."""
        self._found = frozenset(model.name for model in self._models)

    def missing_versions(self) -> list[MissingVersion]:
        """Return the versions that must be loaded before the server is ready, but are not; ordered by model name."""
        return [awaited for model in self._models if not model.is_unloaded for awaited in self._of(model)]

    def _of(self, model: LiveModel) -> Iterator[MissingVersion]:
        live = model.aliases.version(LIVE_ALIAS)
        if live is None:
            yield from self._first(model)
        elif live not in model.loaded and not self._has_stand_in(model, live):
            yield _awaited(model, live)

    def _first(self, model: LiveModel) -> Iterator[MissingVersion]:
        """Yield the newest version of a model without a live version, if the model counts.

        It counts if the server is still starting or found it at the start, and if it has no logged change: with
        changes, a gate may keep it from going live.
        """
        has_changes = model.aliases.generation > 0  # then a gate may have prevented all versions from going live
        if has_changes or not model.statuses or not (self._found is None or model.name in self._found):
            return
        yield _awaited(model, max(model.statuses))

    def _has_stand_in(self, model: LiveModel, live: int) -> bool:
        """Whether, once the server has started, another version answers while the live one is being loaded."""
        is_loading = model.status(live).state in (State.PUBLISHED, State.COMPILING, State.LOADING)
        return self._found is not None and is_loading and LIVE_ALIAS in model.answering()


def _awaited(model: LiveModel, version: int) -> MissingVersion:
    return MissingVersion(model.name, version, model.status(version).state.value)
