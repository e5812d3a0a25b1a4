"""Routes (model, version or alias) to loaded versions. Each request reads it, without a lock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lathe.server.errors import BadRequest, NotFound, ServerError, Unavailable, UnknownModel
from lathe.server.repository import names

if TYPE_CHECKING:
    from lathe.server.canary.traffic import Trial
    from lathe.server.serving.servable import Servable


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model as requests see it; immutable, and replaced as a whole."""

    routes: Mapping[str, Servable] = field(default_factory=dict)  # by "" (live), version number or alias
    loaded: Mapping[int, Servable] = field(default_factory=dict)
    absence_reasons: Mapping[str, str] = field(default_factory=dict)  # known names that do not answer -> the reason
    trial: Trial | None = None  # splits the requests without a version


class Registry:
    """The views of all models. Writing is one assignment, on the event loop's thread."""

    def __init__(self) -> None:
        self._views: dict[str, ModelView] = {}
        self.is_complete = True  # False until the start has synced all models

    def unknown(self, model: str) -> ServerError:
        """Return the error for an unknown model: UnknownModel, or Unavailable while the server starts."""
        if self.is_complete:
            return UnknownModel.of(model, self._views)
        return Unavailable(f"model {model[:80]!r} is not known yet: the server is starting", retry_after=1.0)

    def resolve(self, model: str, version: str = "") -> Servable:
        """Return the loaded version for `version`: "" is the live version, digits a number, anything else an alias.

        Raises BadRequest for a malformed version, NotFound for an unknown model, version or alias, and Unavailable for
        one that is known but not in memory, or for any unknown model while the server starts.
        """
        view = self._views.get(model)
        if view is not None and (servable := view.routes.get(version)) is not None:
            return servable
        raise self.unknown(model) if view is None else _resolve_error(view, model, version)

    def route(self, model: str, version: str = "", key: str = "") -> Servable:
        """Return the version for a request: like `resolve`, but a trial assigns requests for the live one by `key`."""
        view = self._views.get(model)
        if view is not None and view.trial is not None and version in ("", names.LIVE_ALIAS):
            return view.trial.route(key)
        return self.resolve(model, version)

    def settled(self, model: str, version: str = "") -> Servable | None:
        """Return the version that `route` would; None if none answers, and while the model has a trial."""
        view = self._views.get(model)
        return view.routes.get(version) if view is not None and view.trial is None else None

    def servables(self) -> Iterator[Servable]:
        """Yield all versions in memory."""
        for view in list(self._views.values()):
            yield from view.loaded.values()

    def models(self) -> Iterable[str]:
        """Return the names of the known models."""
        return sorted(self._views)

    def view(self, model: str) -> ModelView:
        """Return one model's view; raises NotFound, or Unavailable while the server starts."""
        view = self._views.get(model)
        if view is None:
            raise self.unknown(model)
        return view

    def find(self, model: str) -> ModelView | None:
        """Return one model's view, None if there is no such model."""
        return self._views.get(model)

    def put(self, model: str, view: ModelView) -> None:
        """Replace a model's view."""
        self._views[model] = view

    def remove(self, model: str) -> None:
        """Forget a model."""
        self._views.pop(model, None)


def _resolve_error(view: ModelView, model: str, version: str) -> ServerError:
    if version in view.absence_reasons:
        return Unavailable(f"model {model!r}{_suffix(version)} is not loaded: {view.absence_reasons[version]}")
    if version and not names.is_version_number(version) and names.ALIAS_PATTERN.fullmatch(version) is None:
        return BadRequest(f"version {version[:80]!r}: expected a number or an alias")
    return NotFound(f"model {model!r} has no version{_suffix(version)}")


def _suffix(version: str) -> str:
    return f" {version[:80]!r}" if version else ""
