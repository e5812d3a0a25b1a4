"""Which version each alias names, which it named before, and which one is tried: the content of ``aliases.json``.

An alias is a walk along its history, like the pages of a browser: moving it cuts what lies ahead and appends,
rolling back steps towards the start, and a version ahead can be named again (``to=V``) until the next move.
Whatever moves the live alias ends the trial of a candidate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from server.canary.plan import CanaryPlan
from server.errors import BadRequest, Conflict, NotFound
from server.repository import names

SCHEMA = 1
HISTORY_LIMIT = 100  # steps remembered per alias


class DamagedDocument(ValueError):
    """A document of the repository that does not read as one."""


@dataclass(frozen=True, slots=True)
class Alias:
    """The versions an alias has named, oldest first, and where on that walk it stands."""

    history: tuple[int, ...]
    position: int

    @property
    def version(self) -> int:
        """The version it names."""
        return self.history[self.position]

    @property
    def previous(self) -> int | None:
        """The version one rollback would name."""
        return self.history[self.position - 1] if self.position else None

    def moved(self, version: int) -> Alias:
        """Return the alias naming ``version``, one step further."""
        if version == self.version:
            return self
        history = (*self.history[: self.position + 1], version)[-HISTORY_LIMIT:]
        return Alias(history, len(history) - 1)

    def rolled_back(self, to: int | None) -> Alias:
        """Return the alias one step back, or at ``to``, which must be on its history; raises Conflict."""
        if to is None:
            if not self.position:
                raise Conflict(f"version {self.version} is the first of the history: there is nothing to roll back to")
            return replace(self, position=self.position - 1)
        if to not in self.history:
            raise Conflict(f"version {to} is not in the history {list(self.history)}; set the alias to go there")
        behind = [i for i in range(self.position, -1, -1) if self.history[i] == to]
        return replace(self, position=behind[0] if behind else self.history.index(to))

    def without(self, version: int) -> Alias:
        """Return the alias with ``version``, which it does not name, gone from the history."""
        history: list[int] = []
        position = 0
        for i, entry in enumerate(self.history):
            if entry != version and (not history or history[-1] != entry):
                history.append(entry)
            if i == self.position:
                position = len(history) - 1
        return Alias(tuple(history), position)


@dataclass(frozen=True, slots=True)
class Aliases:
    """All aliases of one model. Every change of the model makes the next generation."""

    generation: int = 0
    high_water: int = 0  # the highest version number ever given out
    aliases: Mapping[str, Alias] = field(default_factory=lambda: MappingProxyType({}))
    canary: CanaryPlan | None = None  # a candidate that shares the live version's requests

    def version(self, alias: str) -> int | None:
        """Return the version that ``alias`` names, None where there is no such alias."""
        found = self.aliases.get(alias)
        return found.version if found else None

    def get(self, alias: str) -> Alias:
        """Return one alias; raises NotFound."""
        found = self.aliases.get(alias)
        if found is None:
            raise NotFound(f"alias {alias!r}: the model has {sorted(self.aliases) or 'no alias'}")
        return found

    def moved(self, alias: str, version: int) -> Aliases:
        """Return the aliases with ``alias`` naming ``version``."""
        found = self.aliases.get(alias)
        return self._with(alias, found.moved(version) if found else Alias((version,), 0))

    def rolled_back(self, alias: str, to: int | None) -> Aliases:
        """Return the aliases with ``alias`` one step back, or at ``to``."""
        return self._with(alias, self.get(alias).rolled_back(to))

    def without_version(self, version: int) -> Aliases:
        """Return the aliases with ``version`` gone from every history; raises Conflict if an alias names it."""
        for name, alias in self.aliases.items():
            if alias.version == version:
                raise Conflict(f"version {version} is what alias {name!r} names: move the alias first")
        if self.canary is not None and self.canary.version == version:
            raise Conflict(f"version {version} is being tried: end its trial first")
        return replace(self, aliases=_frozen({name: alias.without(version) for name, alias in self.aliases.items()}))

    def raised(self, version: int) -> Aliases:
        """Return the aliases knowing that ``version`` has been given out."""
        return replace(self, high_water=max(self.high_water, version))

    def next_generation(self) -> Aliases:
        """Return the aliases as the next generation."""
        return replace(self, generation=self.generation + 1)

    def trying(self, plan: CanaryPlan | None) -> Aliases:
        """Return the aliases with another candidate, or none."""
        return replace(self, canary=plan and replace(plan, generation=self.generation + 1))

    def stepped(self, plan: CanaryPlan) -> Aliases:
        """Return the aliases with the trial under way in another step."""
        return replace(self, canary=plan)

    def _with(self, name: str, alias: Alias) -> Aliases:
        stays = name != names.LIVE or alias.version == self.version(name)
        return replace(self, aliases=_frozen({**self.aliases, name: alias}), canary=self.canary if stays else None)

    def to_json(self) -> dict[str, Any]:
        """Return the document."""
        listed = {
            name: {"version": a.version, "history": list(a.history), "position": a.position}
            for name, a in sorted(self.aliases.items())
        }
        return {
            "schema": SCHEMA,
            "generation": self.generation,
            "high_water": self.high_water,
            "aliases": listed,
            **({"canary": self.canary.to_json()} if self.canary else {}),
        }

    @classmethod
    def from_json(cls, document: object) -> Aliases:
        """Read the document; raises DamagedDocument where it breaks a rule."""
        match document:
            case {
                "schema": 1,
                "generation": int(generation),
                "high_water": int(high),
                "aliases": dict(listed),
                **more,
            } if generation >= 0 and high >= 0:
                aliases = _frozen({name: _alias(name, entry) for name, entry in listed.items()})
                return cls(generation, high, aliases, _canary(more.get("canary")))
        raise DamagedDocument("aliases: expected schema 1 with generation, high_water and aliases")


def _frozen(aliases: dict[str, Alias]) -> Mapping[str, Alias]:
    return MappingProxyType(aliases)


def _alias(name: object, entry: object) -> Alias:
    if not isinstance(name, str) or names.ALIAS.fullmatch(name) is None:
        raise DamagedDocument(f"alias {name!r}: expected {names.ALIAS.pattern}")
    match entry:
        case {"version": int(version), "history": [*steps], "position": int(position)} if (
            all(type(step) is int and 0 < step < 10**9 for step in steps)
            and 0 <= position < len(steps)
            and steps[position] == version
        ):
            return Alias(tuple(steps), position)
    raise DamagedDocument(f"alias {name!r}: expected a history of versions and the position of the one named")


def _canary(entry: object) -> CanaryPlan | None:
    if entry is None:
        return None
    if not isinstance(entry, dict):
        raise DamagedDocument("canary: expected an object")
    try:
        return CanaryPlan.from_json(entry)
    except (BadRequest, TypeError) as error:
        raise DamagedDocument(f"canary: {error}") from error
