"""How much memory a compiled model will take, from the header of its file: nothing is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import ArtifactError
from core.runtime.bundle import Bundle
from core.runtime.devices import HOST


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of this machine's memory, not of other devices'. `weights` are there from loading to closing; every run in
    flight takes up to `run`."""

    weights: int
    run: int


def needs(path: Path) -> Needs:
    """What an artifact (see artifact.py) needs, its largest batch taken as that which it was compiled for.

    A model that is compiled per shape holds its graph, and its weights once more as kernels want them; what a run
    takes shows with its shapes, and is not counted. ArtifactError as in `artifact.load`.
    """
    with Bundle(path) as bundle:
        parts = _parts(bundle.facts)
        if parts is None:
            return Needs(2 * bundle.size("source.bin"), 0)
        try:
            batch = int(bundle.facts["description"]["max_batch"])
            arenas = [max(int(a), 0) * batch + int(b) for a, b in (part["plan"]["arena"] for part in parts)]
            return Needs(sum(int(part["plan"]["weights"]) for part in parts), sum(arenas))
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{bundle.name}: its plan is malformed ({type(error).__name__} {error})") from error


def _parts(facts: dict[str, Any]) -> list[dict[str, Any]] | None:
    """What runs on the processor; None for a graph."""
    parts = facts.get("parts", [facts] if "plan" in facts else None)
    return None if parts is None else [part for part in parts if part["device"] == HOST]
