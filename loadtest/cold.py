"""What the first compilation of a model costs: processor time and memory of a fresh process, with an empty cache.

    python -m loadtest cold MODEL.onnx ... [--seconds S] [--json FILE]

One thread, nothing measured (tune="off"). The process compiles the file and runs it once; where dimensions besides the
batch are free, that run compiles. Feeds are those that lie beside the file (`feeds-0.npz`), else made up. Where there
are others (`feeds-1.npz`), `next` is what a further combination of shapes costs. Child processes are counted.

Memory is resident memory, mapped files included: after the first run, and the most at any time. `imports` is that of
the process before it compiles. Exit status 1 where the most is above 1.3 times the weights and 150 MB, or a model takes
longer than `--seconds`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx
from rich.console import Console
from rich.table import Table

from loadtest.footprint import step

MB = 10**6
MOST, BESIDES = 1.3, 150 * MB  # times the weights, and bytes
WIDTH = 110  # of the table


@dataclass(frozen=True)
class Cold:
    """One model: processor seconds and bytes. `next` is None where there are no other shapes."""

    model: str
    nodes: int
    weights: int
    first: float
    next: float | None
    imports: int
    resident: int
    peak: int

    @property
    def allowed(self) -> float:
        return MOST * self.weights + BESIDES

    def broken(self, seconds: float | None) -> list[str]:
        """What is more than it may be."""
        found = []
        if self.peak > self.allowed:
            found.append(f"{self.model} takes {self.peak / MB:.0f} MB, expected at most {self.allowed / MB:.0f}")
        if seconds is not None and self.first > seconds:
            found.append(f"{self.model} takes {self.first:.1f} s, expected at most {seconds:g}")
        return found


def measure(path: Path) -> Cold:
    with tempfile.TemporaryDirectory() as cache:
        figures = step("cold", path, Path(cache))
    proto = onnx.load(path, load_external_data=False)
    return Cold(
        named(path),
        nodes=len(proto.graph.node),
        weights=weights_of(proto, path),
        first=figures["first"],
        next=figures.get("next"),
        imports=int(figures["imports"]),
        resident=int(figures["resident"]),
        peak=int(figures["peak"]),
    )


def named(path: Path) -> str:
    """A name for people: most files are called model.onnx."""
    return path.parent.name if path.stem == "model" else path.stem


def weights_of(proto: onnx.ModelProto, path: Path) -> int:
    """Bytes of the initializers and large constants, roughly: nearly all of a file, and of those beside it."""
    entries = [entry for each in proto.graph.initializer for entry in each.external_data]
    beside = {entry.value for entry in entries if entry.key == "location"}
    return os.path.getsize(path) + sum(os.path.getsize(path.parent / name) for name in beside)


def table(rows: Sequence[Cold]) -> Table:
    made = Table(title="one thread; seconds of the processor, and MB", title_justify="left")
    for column in ("model", "nodes", "weights", "first", "next", "imports", "resident", "peak", "allowed"):
        made.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        sizes = (row.imports, row.resident, row.peak, row.allowed)
        later = "" if row.next is None else f"{row.next:.2f}"
        made.add_row(row.model, str(row.nodes), f"{row.weights / MB:.1f}", f"{row.first:.2f}", later,
                     *(f"{size / MB:.0f}" for size in sizes))  # fmt: skip
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest cold", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, help="ONNX files")
    parser.add_argument("--seconds", type=float, help="the most that a first compilation may take")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    chosen = parser.parse_args(arguments)
    console = Console(width=WIDTH)
    rows = []
    for path in chosen.models:
        console.print(f"[dim]{named(path)}[/dim]")
        rows.append(measure(path))
    console.print(table(rows))
    broken = [what for row in rows for what in row.broken(chosen.seconds)]
    for what in broken:
        console.print(f"[red]{what}[/red]")
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
