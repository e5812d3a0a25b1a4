"""What should be in memory, what answers, and what may be deleted: pure functions of the facts."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from server.repository.aliases import Aliases
from server.repository.names import LIVE


def wanted(state: Aliases, versions: Collection[int], also: Collection[int] | None = None) -> list[int]:
    """Return the versions to hold in memory, the most urgent first.

    What an alias names comes first, then the candidate on trial, then what one rollback would name, so that going back
    needs no loading, and last what the model's owner wants ``also``: unless told otherwise the newest version, so that
    it can be tried by its number before it goes live.
    """
    ordered = sorted(state.aliases.items(), key=lambda item: item[0] != LIVE)
    targets = [alias.version for _, alias in ordered]
    previous = [alias.previous for _, alias in ordered]
    tried = state.canary.version if state.canary else None
    rest = sorted(versions)[-1:] if also is None else also
    chosen = dict.fromkeys(v for v in (*targets, tried, *previous, *rest) if v is not None)
    return [version for version in chosen if version in versions]


def answering(
    state: Aliases, alias: str, loaded: Collection[int], now: int | None, coming: Collection[int] = frozenset()
) -> int | None:
    """Return the version that answers for ``alias``: the one it names; while that is not loaded, the one that answers
    now. Where none does, as after a start, and the one it names is not ``coming`` either, the last one before it that
    is loaded: else callers who have been answered by a version would be answered by an older one."""
    named = state.aliases[alias]
    if named.version in loaded:
        return named.version
    if now in loaded:
        return now
    if named.version in coming:
        return None
    before = (version for version in reversed(named.history[: named.position]) if version in loaded)
    return next(before, None)


def collectable(
    state: Aliases, versions: Collection[int], keep: int, pinned: Collection[int] = frozenset()
) -> list[int]:
    """Return the versions that retention deletes: all but the newest ``keep`` that no alias needs, now or for one
    rollback, and that is neither on trial nor ``pinned``: by a pipeline, or by an operation under way."""
    needed = {alias.version for alias in state.aliases.values()} | {a.previous for a in state.aliases.values()}
    needed |= {state.canary.version} if state.canary else set()
    needed |= set(pinned)
    spare = sorted(version for version in versions if version not in needed)
    return spare[: max(0, len(spare) - keep)]


def first_goes_live(state: Aliases, version: int, specific: Collection[int] = ()) -> Aliases:
    """Return the aliases after ``version`` came: it goes live if nothing is, unless the model's owner wants
    ``specific`` versions and this is none of them."""
    if LIVE in state.aliases or (specific and version not in specific):
        return state
    return state.moved(LIVE, version)


def unadopted(state: Aliases, manifested: Mapping[int, bool]) -> list[int]:
    """Return the version folders the repository has not taken note of yet, the highest first, since the first one
    taken of a new model goes live. ``manifested`` says of each folder whether it has a manifest."""
    known = LIVE in state.aliases or state.generation > 0  # a gate may have kept every version from going live
    fresh = (v for v, has_manifest in manifested.items() if not (known and has_manifest and v <= state.high_water))
    return sorted(fresh, reverse=True)
