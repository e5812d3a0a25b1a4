"""The memory that a compiled model will need, from the header of its file: nothing is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lathe.core.errors import ArtifactError
from lathe.core.runtime.artifact.bundle import Bundle
from lathe.core.runtime.device.devices import HOST


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes of host memory, without the memory of other devices.

    `weights` are used from loading to closing. They include pinned memory through which other devices swap. Every run
    in flight uses up to `run` more.
    """

    weights: int
    run: int


def memory_needs(path: Path) -> MemoryNeeds:
    """The memory needs of an artifact (see artifact.py), for the largest batch that it was compiled for.

    A model that is compiled per shape needs its graph, and its weights once more in the layout of kernels. The memory
    of its runs depends on their shapes, so `run` is 0. ArtifactError if the file is missing or writable by another
    user, if its header is damaged, and for a malformed plan.
    """
    with Bundle(path) as bundle:
        parts = _parts(bundle.facts)
        if parts is None:
            return MemoryNeeds(2 * bundle.size("source.bin"), 0)
        try:
            batch = int(bundle.facts["description"]["max_batch"])
            arenas = [max(int(a), 0) * batch + int(b) for a, b in (part["plan"]["arena"] for part in parts)]
            swapped = [part["plan"] for part in bundle.facts.get("parts", ()) if part["device"] != HOST]
            swaps = [max(int(a), 0) * batch + int(b) for a, b in (plan["swap"] for plan in swapped)]
            pinned = sum(int(plan["streamed"]) for plan in swapped) + sum(swaps)
            return MemoryNeeds(sum(int(part["plan"]["weights"]) for part in parts) + pinned, sum(arenas))
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{bundle.name}: its plan is malformed ({type(error).__name__} {error})") from error


def _parts(facts: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The facts of the parts that run on the host; None for an artifact that holds only a graph."""
    parts = facts.get("parts", [facts] if "plan" in facts else None)
    return None if parts is None else [part for part in parts if part["device"] == HOST]
