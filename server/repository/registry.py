"""What is in memory and what answers for which name. Read for every request, without a lock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from server.errors import BadRequest, NotFound, ServerError, Unavailable, UnknownModel
from server.repository import names

if TYPE_CHECKING:
    from server.canary.traffic import Trial
    from server.scheduling.servable import Servable


@dataclass(frozen=True, slots=True)
class View:
    """One model as requests see it; replaced whole, never changed."""

    routes: Mapping[str, Servable] = field(default_factory=dict)  # "", digits and aliases
    loaded: Mapping[int, Servable] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)  # names that are known but do not answer: why
    trial: Trial | None = None  # shares the requests that name no version


class Registry:
    """The views of all models. Writing is one assignment, on the event loop's thread."""

    def __init__(self) -> None:
        self._views: dict[str, View] = {}
        self.is_complete = True  # False while a start has not looked at all models

    def unknown(self, model: str) -> ServerError:
        """Return the error for a name that no model has, as far as is known."""
        if self.is_complete:
            return UnknownModel.of(model, self._views)
        return Unavailable(f"model {model[:80]!r} is not known yet: the server is starting", retry_after=1.0)

    def resolve(self, model: str, version: str = "") -> Servable:
        """Return what answers; "" is the live version, digits that one, else an alias.

        Raises NotFound for an unknown model, version or alias, Unavailable for one that is known but not in memory, and
        for all that are not known while the server starts.
        """
        view = self._views.get(model)
        if view is not None and (servable := view.routes.get(version)) is not None:
            return servable
        raise self.unknown(model) if view is None else _why(view, model, version)

    def route(self, model: str, version: str = "", key: str = "") -> Servable:
        """Return what answers this request: as :meth:`resolve`, but while a candidate is tried it gets its share."""
        view = self._views.get(model)
        if view is not None and view.trial is not None and version in ("", names.LIVE):
            return view.trial.route(key)
        return self.resolve(model, version)

    def settled(self, model: str, version: str = "") -> Servable | None:
        """Return what :meth:`route` would; None where nothing answers, or a trial has to say what."""
        view = self._views.get(model)
        return view.routes.get(version) if view is not None and view.trial is None else None

    def servables(self) -> Iterator[Servable]:
        """Return everything in memory."""
        for view in list(self._views.values()):
            yield from view.loaded.values()

    def models(self) -> Iterable[str]:
        """Return the names of the known models."""
        return sorted(self._views)

    def view(self, model: str) -> View:
        """Return one model's view; raises NotFound, while the server starts Unavailable."""
        view = self._views.get(model)
        if view is None:
            raise self.unknown(model)
        return view

    def find(self, model: str) -> View | None:
        """Return one model's view, None where there is no such model."""
        return self._views.get(model)

    def put(self, model: str, view: View) -> None:
        """Show a model from now on as ``view`` says."""
        self._views[model] = view

    def remove(self, model: str) -> None:
        """Forget a model."""
        self._views.pop(model, None)


def _why(view: View, model: str, version: str) -> ServerError:
    if version in view.absent:
        return Unavailable(f"model {model!r}{_at(version)} is not loaded: {view.absent[version]}")
    if version and not names.is_version(version) and names.ALIAS.fullmatch(version) is None:
        return BadRequest(f"version {version[:80]!r}: expected a number or an alias")
    return NotFound(f"model {model!r} has no version{_at(version)}")


def _at(version: str) -> str:
    return f" {version[:80]!r}" if version else ""
