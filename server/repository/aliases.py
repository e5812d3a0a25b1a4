"""The aliases of a model, the history of each, and the plan of a running canary: the content of `aliases.json`.

An alias has a history and a position in it, like the back and forward buttons of a browser. Moving the alias cuts the
entries after the position and appends one; rolling back moves the position towards the start. The entries after it stay
reachable (`to=V`) until the next move. Any change of the live alias's version ends the trial of a candidate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from lathe.server.canary.plan import CanaryPlan
from lathe.server.errors import BadRequest, Conflict, NotFound
from lathe.server.repository import names

SCHEMA = 1
HISTORY_LIMIT = 100  # steps remembered per alias


class DamagedDocument(ValueError):
    """A file of the repository whose content is not valid."""


@dataclass(frozen=True, slots=True)
class Alias:
    """The versions that an alias has named, oldest first, and its position in that history."""

    history: tuple[int, ...]
    position: int

    @property
    def version(self) -> int:
        """The version that the alias names."""
        return self.history[self.position]

    @property
    def previous(self) -> int | None:
        """The version after one rollback; None at the start of the history."""
        return self.history[self.position - 1] if self.position else None

    def moved(self, version: int) -> Alias:
        """Return the alias moved to `version`, which replaces the history after its old position.

        Unchanged if it names `version` already. The oldest entries beyond `HISTORY_LIMIT` are dropped.
        """
        if version == self.version:
            return self
        history = (*self.history[: self.position + 1], version)[-HISTORY_LIMIT:]
        return Alias(history, len(history) - 1)

    def with_rollback(self, to: int | None) -> Alias:
        """Return the alias one step back in its history, or at the nearest entry that is `to`; raises Conflict.

        Entries up to the position take precedence over later ones. Conflict at the start of the history without `to`,
        or if `to` is not in it.
        """
        if to is None:
            if not self.position:
                raise Conflict(f"version {self.version} is the first of the history: there is nothing to roll back to")
            return replace(self, position=self.position - 1)
        if to not in self.history:
            raise Conflict(f"version {to} is not in the history {list(self.history)}; set the alias to it instead")
        earlier = [i for i in range(self.position, -1, -1) if self.history[i] == to]
        return replace(self, position=earlier[0] if earlier else self.history.index(to))

    def without(self, version: int) -> Alias:
        """Return the alias with `version`, which it must not name now, removed from its history.

        Equal entries that become neighbours are one afterwards.
        """
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
    """All aliases of one model and its running trial, after the change of the model with the number `generation`."""

    generation: int = 0
    high_water: int = 0  # the highest version number that was ever assigned
    aliases: Mapping[str, Alias] = field(default_factory=lambda: MappingProxyType({}))
    canary: CanaryPlan | None = None  # the running trial: a candidate that gets a part of the live version's requests

    def version(self, alias: str) -> int | None:
        """Return the version that `alias` names, None if there is no such alias."""
        found = self.aliases.get(alias)
        return found.version if found else None

    def get(self, alias: str) -> Alias:
        """Return one alias; raises NotFound."""
        found = self.aliases.get(alias)
        if found is None:
            raise NotFound(f"alias {alias!r}: the model has {sorted(self.aliases) or 'no alias'}")
        return found

    def moved(self, alias: str, version: int) -> Aliases:
        """Return the aliases with `alias` moved to `version`; a new alias is added.

        The trial is removed if another version is live afterwards.
        """
        found = self.aliases.get(alias)
        return self._with(alias, found.moved(version) if found else Alias((version,), 0))

    def with_rollback(self, alias: str, to: int | None) -> Aliases:
        """Return the aliases with `alias` one step back, or at `to`; raises NotFound, Conflict.

        The trial is removed if another version is live afterwards.
        """
        return self._with(alias, self.get(alias).with_rollback(to))

    def without_version(self, version: int) -> Aliases:
        """Return the aliases without `version` in any history; raises Conflict if an alias or the trial names it."""
        for name, alias in self.aliases.items():
            if alias.version == version:
                raise Conflict(f"version {version} is what alias {name!r} names: move the alias first")
        if self.canary is not None and self.canary.version == version:
            raise Conflict(f"a canary of version {version} is running: cancel the canary first")
        return replace(self, aliases=_frozen({name: alias.without(version) for name, alias in self.aliases.items()}))

    def with_high_water(self, version: int) -> Aliases:
        """Return the aliases with a high-water mark of at least `version`."""
        return replace(self, high_water=max(self.high_water, version))

    def with_next_generation(self) -> Aliases:
        """Return the aliases with the next generation number."""
        return replace(self, generation=self.generation + 1)

    def with_canary(self, plan: CanaryPlan | None) -> Aliases:
        """Return the aliases with a new trial, whose generation is the next one; None: without a trial."""
        return replace(self, canary=plan and replace(plan, generation=self.generation + 1))

    def stepped(self, plan: CanaryPlan) -> Aliases:
        """Return the aliases with `plan` in place of the running trial's plan: the same trial in another step."""
        return replace(self, canary=plan)

    def _with(self, name: str, alias: Alias) -> Aliases:
        keeps_trial = name != names.LIVE_ALIAS or alias.version == self.version(name)
        return replace(
            self, aliases=_frozen({**self.aliases, name: alias}), canary=self.canary if keeps_trial else None
        )

    def to_json(self) -> dict[str, Any]:
        """Return the document."""
        entries = {
            name: {"version": a.version, "history": list(a.history), "position": a.position}
            for name, a in sorted(self.aliases.items())
        }
        return {
            "schema": SCHEMA,
            "generation": self.generation,
            "high_water": self.high_water,
            "aliases": entries,
            **({"canary": self.canary.to_json()} if self.canary else {}),
        }

    @classmethod
    def from_json(cls, document: object) -> Aliases:
        """Parse the document; raises DamagedDocument naming the invalid part."""
        match document:
            case {
                "schema": 1,
                "generation": int(generation),
                "high_water": int(high),
                "aliases": dict(entries),
                **more,
            } if generation >= 0 and high >= 0:
                aliases = _frozen({name: _alias(name, entry) for name, entry in entries.items()})
                return cls(generation, high, aliases, _canary(more.get("canary")))
        raise DamagedDocument("aliases: expected schema 1 with generation, high_water and aliases")


def _frozen(aliases: dict[str, Alias]) -> Mapping[str, Alias]:
    return MappingProxyType(aliases)


def _alias(name: object, entry: object) -> Alias:
    if not isinstance(name, str) or names.ALIAS_PATTERN.fullmatch(name) is None:
        raise DamagedDocument(f"alias {name!r}: expected {names.ALIAS_PATTERN.pattern}")
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
