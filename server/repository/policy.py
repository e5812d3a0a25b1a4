"""The rules for loading, answering, retention and adoption of versions, as pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lathe.server.repository.aliases import Aliases
from lathe.server.repository.names import LIVE_ALIAS


def versions_to_load(state: Aliases, versions: Collection[int], also: Collection[int] | None = None) -> list[int]:
    """Return the versions, of those in `versions`, that should be in memory, the most urgent first.

    The order: versions that aliases name, the live one first; the candidate on trial; the versions after one rollback,
    so that a rollback needs no loading; the versions of the model's configuration, `also`. Without `also` the last is
    the newest version, so that it can be tested by its number before it goes live.
    """
    ordered = sorted(state.aliases.items(), key=lambda item: item[0] != LIVE_ALIAS)
    targets = [alias.version for _, alias in ordered]
    previous = [alias.previous for _, alias in ordered]
    candidate = state.canary.version if state.canary else None
    configured = sorted(versions)[-1:] if also is None else also
    chosen = dict.fromkeys(v for v in (*targets, candidate, *previous, *configured) if v is not None)
    return [version for version in chosen if version in versions]


def answering_version(
    state: Aliases, alias: str, loaded: Collection[int], now: int | None, coming: Collection[int] = frozenset()
) -> int | None:
    """Return the version that answers for `alias`, None if there is none.

    That is the version that the alias names. If it is not loaded, the version that answers `now` continues to answer,
    if that is loaded. Otherwise, as after a start, it is the latest loaded version before the named one in the history,
    unless the named version is `coming` (about to be loaded): callers would get answers of an older version for a
    while. KeyError for an unknown alias.
    """
    named = state.aliases[alias]
    if named.version in loaded:
        return named.version
    if now in loaded:
        return now
    if named.version in coming:
        return None
    before = (version for version in reversed(named.history[: named.position]) if version in loaded)
    return next(before, None)


def versions_to_delete(
    state: Aliases, versions: Collection[int], keep: int, pinned: Collection[int] = frozenset()
) -> list[int]:
    """Return the versions that retention deletes, oldest first.

    Candidates are the versions that no alias names now or after one rollback, that are not on trial, and not `pinned`
    by a pipeline or a running operation; the newest `keep` of them stay.
    """
    needed = {alias.version for alias in state.aliases.values()} | {a.previous for a in state.aliases.values()}
    needed |= {state.canary.version} if state.canary else set()
    needed |= set(pinned)
    spare = sorted(version for version in versions if version not in needed)
    return spare[: max(0, len(spare) - keep)]


def with_first_live(state: Aliases, version: int, specific: Collection[int] = ()) -> Aliases:
    """Return the aliases after `version` was added: it goes live if no version is live.

    If the configuration wants `specific` versions in memory, only these go live in this way.
    """
    if LIVE_ALIAS in state.aliases or (specific and version not in specific):
        return state
    return state.moved(LIVE_ALIAS, version)


def unadopted_versions(state: Aliases, manifested: Mapping[int, bool]) -> list[int]:
    """Return the version folders that are not adopted yet, the highest number first.

    So the highest version of a new model goes live: the one adopted first. `manifested` maps each folder to whether it
    has a manifest. A folder is adopted if it has a manifest, the model has logged changes or a live alias, and the
    number is at most `high_water`.
    """
    known = LIVE_ALIAS in state.aliases or state.generation > 0  # a gate may have kept every version from going live
    fresh = (v for v, has_manifest in manifested.items() if not (known and has_manifest and v <= state.high_water))
    return sorted(fresh, reverse=True)
