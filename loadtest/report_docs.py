"""Measures, and writes the tables and plots of docs/performance.md: `python -m loadtest docs` (or `make bench-docs`).

Generated parts of the page are between `<!-- NAME -->` and `<!-- /NAME -->`. The rest is written by hand.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console

from lathe.core.drawing.charts import Bar, horizontal_bars
from loadtest import engine, footprint, zoo
from loadtest.engine import OURS, Row

PAGE = footprint.PROJECT / "docs" / "performance.md"
LAYERS_OF, LAYERS_BATCH = "resnet", 8


def replace_part(text: str, name: str, content: str) -> str:
    """The page with new content between the marks of the part `name`. ValueError unless the marks occur once."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    parts = re.compile(f"(?<={re.escape(begin)}\n).*?(?={re.escape(end)})", re.DOTALL)
    if len(parts.findall(text)) != 1:
        raise ValueError(f"the page has no part between {begin} and {end}")
    return parts.sub(lambda _: content.rstrip("\n") + "\n", text)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def engine_table(rows: Sequence[Row], engines: Sequence[str]) -> str:
    """A Markdown table of milliseconds per engine, and of Lathe's lead, model by model."""
    named = ["model", "batch", *engines, "ahead"]
    cells = []
    for model, batches in groupby(rows, key=lambda row: row.model):
        for index, row in enumerate(batches):
            times = [f"{row.ms[name]:.3f}" if name in row.ms else "wrong" for name in engines]
            ahead = "-" if row.ahead is None else f"{row.ahead:.2f}"
            cells.append(["" if index else model, str(row.batch), *times, ahead])
    return markdown(named, cells)


def ratio_chart(rows: Sequence[Row]) -> str:
    """An SVG bar chart of each model's ratio to the best peer: the geometric mean over batches."""
    bars = []
    for model, batches in groupby(rows, key=lambda row: row.model):
        ratios = [row.ahead for row in batches if row.ahead is not None]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            bars.append(Bar(model, mean, f"{mean:.2f}"))
    return horizontal_bars(bars, "times as fast as the best of the others (geometric mean over batches)", mark=1.0)


def layer_chart(name: str, batch: int) -> str:
    """An SVG bar chart of each step's share of the machine's peak (roofline), in execution order."""
    import lathe

    graph = lathe.load(zoo.model(name).SerializeToString())
    with lathe.compile(graph, threads=1) as session:
        profile = session.profile(zoo.feeds(name, batch))
    bars = [
        Bar(f"{node.op} {node.label} ({profile.share(node):.0%})", node.roofline, f"{node.roofline:.0%}")
        for node in profile.nodes
    ]
    return horizontal_bars(bars, f"share of the peak, {name}, batch {batch} (in brackets: share of the time)", mark=1.0)


def footprint_table(rows: Sequence[footprint.Footprint]) -> str:
    return markdown(["model", *footprint.HEADINGS], [[row.model, *footprint.cells(row)] for row in rows])


def write(folder: Path, engines: Sequence[str], rows: Sequence[Row], sizes: Sequence[footprint.Footprint]) -> None:
    """Write the measurements into performance.md of `folder`, and the plots beside it."""
    page = folder / PAGE.name
    parts = [engine_table(rows, engines), f"{engine.summary(rows).capitalize()}.", "![ratio per model](ratios.svg)"]
    text = replace_part(page.read_text(), "engines", "\n\n".join(parts))
    text = replace_part(text, "layers", "![share of the peak per layer](layers.svg)")
    text = replace_part(text, "footprint", footprint_table(sizes))
    (folder / "ratios.svg").write_text(ratio_chart(rows))
    (folder / "layers.svg").write_text(layer_chart(LAYERS_OF, LAYERS_BATCH))
    page.write_text(text)


def main(arguments: Sequence[str] | None = None) -> int:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(prog="python -m loadtest docs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=names, default=[name for each in engine.SETS.values() for name in each])
    parser.add_argument("--footprints", type=names, default=list(footprint.MODELS))
    parser.add_argument("--engines", type=names, default=list(engine.ENGINES))
    parser.add_argument("--batches", type=lambda text: [int(size) for size in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slice", type=float, default=0.2, help="seconds per engine and round")
    parser.add_argument("--docs", type=Path, default=PAGE.parent, help="folder of performance.md")
    chosen, console = parser.parse_args(arguments), Console()
    rows = []
    for name in chosen.models:
        for batch in chosen.batches:
            console.print(f"[dim]{name}, batch {batch}[/dim]")
            rows.append(engine.measure(name, batch, chosen.engines, 1, chosen.rounds, chosen.slice))
    sizes = footprint.collect(chosen.footprints, [], console)
    write(chosen.docs, [OURS, *(name for name in chosen.engines if name != OURS)], rows, sizes)
    console.print(engine.summary(rows))
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
