"""The stored results of a campaign, from which the next call continues."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class State:
    """Results by seed, one JSON object a line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "results.jsonl"
        self.seeds: set[int] = set()
        self.outcomes: Counter[str] = Counter()
        self.findings: dict[str, list[int]] = {}
        self.reasons: Counter[str] = Counter()
        for result in self.results():
            self._count(result)
        self._file = self._path.open("a")

    def results(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open() as lines:
            for line in lines:
                if line.endswith("\n"):  # the last one may have been cut off
                    yield json.loads(line)

    def add(self, result: dict[str, Any]) -> None:
        self._file.write(json.dumps(result) + "\n")
        self._file.flush()
        self._count(result)

    def _count(self, result: dict[str, Any]) -> None:
        self.seeds.add(result["seed"])
        kind = result["kind"]
        if kind == "excluded":
            self.reasons[result["text"]] += 1
        known = kind in ("agrees", "excluded")
        self.outcomes[kind if known else "disagrees"] += 1
        if not known:
            self.findings.setdefault(kind, []).append(result["seed"])

    def close(self) -> None:
        self._file.close()

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))
        lines = [f"{len(self.seeds)} graphs: {counts}"]
        lines += [f"  excluded {count}: {reason}" for reason, count in self.reasons.most_common()]
        ranked = sorted(self.findings.items(), key=lambda pair: -len(pair[1]))
        lines += [f"  {len(seeds)} x {kind} (seeds {', '.join(map(str, sorted(seeds)[:6]))})" for kind, seeds in ranked]
        return "\n".join(lines)
