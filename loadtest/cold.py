"""Cost of the first compilation of a model: processor time and memory of a fresh process with an empty cache.

    python -m loadtest cold MODEL.onnx ... [--seconds S] [--json FILE]

One thread, no tuning (tune="off"). The process compiles the file and runs it once. If dimensions other than the batch
are dynamic, that first run compiles. Inputs come from `feeds-0.npz` beside the file, or are generated. If further
files exist (`feeds-1.npz`), `next` is the cost of one more combination of shapes. Child processes are counted.

The byte code of Lathe is written beforehand, as an installation does: importing is not counted as compiling a model.

Memory is resident memory, mapped files included: after the first run (`resident`) and at its maximum (`peak`).
`imports` is the resident memory before compiling. Exit status 1 if the peak is above 1.3 times the weights plus 150 MB,
or if the first compilation takes longer than `--seconds`.
"""

from __future__ import annotations

import argparse
import compileall
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

from loadtest.footprint import PROJECT, run_step

MB = 10**6
MAX_WEIGHTS_RATIO, BESIDES = 1.3, 150 * MB  # limit of the peak: 1.3 times the weights plus 150 MB
WIDTH = 110  # of the table


@dataclass(frozen=True)
class Cold:
    """The figures of one model: processor seconds and bytes. `next` is None if there are no further shapes."""

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
        return MAX_WEIGHTS_RATIO * self.weights + BESIDES

    def broken(self, seconds: float | None) -> list[str]:
        """Messages for every limit that this model exceeds."""
        found = []
        if self.peak > self.allowed:
            found.append(f"{self.model} takes {self.peak / MB:.0f} MB, expected at most {self.allowed / MB:.0f}")
        if seconds is not None and self.first > seconds:
            found.append(f"{self.model} takes {self.first:.1f} s, expected at most {seconds:g}")
        return found


def measure(path: Path) -> Cold:
    with tempfile.TemporaryDirectory() as cache:
        figures = run_step("cold", path, Path(cache))
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
    """The name to print: the folder's for files called model.onnx, otherwise the file's."""
    return path.parent.name if path.stem == "model" else path.stem


def weights_of(proto: onnx.ModelProto, path: Path) -> int:
    """Approximate bytes of the weights: the size of the ONNX file and of its external data files."""
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
    parser.add_argument("--seconds", type=float, help="longest permitted first compilation, in processor seconds")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    chosen = parser.parse_args(arguments)
    console = Console(width=WIDTH)
    for folder in ("lathe", "core", "loadtest"):
        compileall.compile_dir(PROJECT / folder, quiet=2)
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
