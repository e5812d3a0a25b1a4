"""Charts as SVG text, and HTML pages for them: for reports that need no scripts, libraries or network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 28, 14, 40
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")

STYLE = """
:root { color-scheme: light dark; --ink: #1f2937; --soft: #6b7280; --grid: #e5e7eb; --paper: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e7eb; --soft: #9ca3af; --grid: #374151; --paper: #111827; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1360px; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.05rem; margin: 0 0 .5rem; }
table { border-collapse: collapse; margin: 1rem 0 2rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { text-align: left; }
.held { color: #059669; } .broken { color: #dc2626; font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(520px, 1fr)); gap: 2rem; }
figure { margin: 0; } svg { width: 100%; } svg text { font-size: 12px; fill: var(--soft); }
.grid { stroke: var(--grid); }
ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; color: var(--soft); }
.key { width: .7rem; margin-right: .4rem; }
"""

Points = Sequence[tuple[float, float]]
Line = tuple[str, Points]  # name, points


@dataclass(frozen=True)
class Axis:
    """A scale from `low` to `high`. With `log`, both must be positive."""

    label: str
    low: float
    high: float
    log: bool = False
    ticks: Sequence[tuple[float, str]] = ()

    @staticmethod
    def linear(label: str, values: Sequence[float], low: float = 0.0) -> Axis:
        high = max([v for v in values if math.isfinite(v)], default=1.0)
        step = nice_step((high - low) / 5)
        top = low + step * max(1, math.ceil((high - low) / step - 1e-9))
        count = round((top - low) / step)
        return Axis(label, low, top, ticks=[(low + i * step, format_number(low + i * step)) for i in range(count + 1)])

    @staticmethod
    def decades(label: str, values: Sequence[float]) -> Axis:
        """A logarithmic axis from the power of ten at or below the smallest value to that at or above the largest.

        It has at least one decade, and a tick at each power of ten. Values that are not positive and finite are
        ignored; without other values it goes from 1 to 10.
        """
        positive = [v for v in values if math.isfinite(v) and v > 0] or [1.0]
        first = math.floor(math.log10(min(positive)))
        last = max(first + 1, math.ceil(math.log10(max(positive))))
        return Axis(
            label, 10.0**first, 10.0**last, True, [(10.0**e, format_number(10.0**e)) for e in range(first, last + 1)]
        )

    def place(self, value: float) -> float:
        """The position of a value on the axis: 0 at `low`, 1 at `high`; with `log`, 0 for values below `low`."""
        if self.log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def nice_step(rough: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least `rough`; 1 if `rough` is not positive."""
    if rough <= 0:
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))


def format_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def x_at(axis: Axis, value: float) -> float:
    return LEFT + axis.place(value) * (WIDTH - LEFT - RIGHT)


def y_at(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - TOP - BOTTOM)


def text(x: float, y: float, content: str, anchor: str = "middle", turn: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{escape(content)}</text>'


def frame(x: Axis, y: Axis) -> list[str]:
    """SVG elements of a chart's frame: a grid line at each tick of `y`, the tick labels, and the names of both axes."""
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for value, name in y.ticks:
        at = y_at(y, value)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>')
        parts.append(text(LEFT - 6, at + 4, name, "end"))
    parts += [text(x_at(x, value), floor + 16, name) for value, name in x.ticks]
    parts.append(text((LEFT + right) / 2, HEIGHT - 6, x.label))
    middle = (TOP + floor) / 2
    parts.append(text(13, middle, y.label, turn=f' transform="rotate(-90 13 {middle:.1f})"'))
    return parts


def svg(parts: Sequence[str], label: str) -> str:
    inside = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">\n{inside}\n</svg>'


def curves(lines: Sequence[Line], x: Axis, y: Axis, dots: bool = False) -> str:
    """An SVG chart with one polyline (or one set of dots) per line, and an HTML legend if there are several lines."""
    draw = _dots if dots else _polyline
    parts = frame(x, y)
    parts += [draw(points, x, y, COLOURS[i % len(COLOURS)]) for i, (_, points) in enumerate(lines) if points]
    return svg(parts, f"{y.label} by {x.label}") + legend([name for name, _ in lines])


def _polyline(points: Points, x: Axis, y: Axis, colour: str) -> str:
    path = " ".join(f"{x_at(x, px):.1f},{y_at(y, py):.1f}" for px, py in points)
    return f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>'


def _dots(points: Points, x: Axis, y: Axis, colour: str) -> str:
    places = ((x_at(x, px), y_at(y, py)) for px, py in points)
    return "".join(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="2.5" fill="{colour}"/>' for cx, cy in places)


def legend(names: Sequence[str]) -> str:
    """The legend of `curves`, as HTML below the plot; "" for fewer than two lines."""
    if len(names) < 2:
        return ""
    square = '<svg class="key" viewBox="0 0 1 1"><rect width="1" height="1" fill="{}"/></svg>'
    entries = (f"<li>{square.format(COLOURS[i % len(COLOURS)])}{escape(name)}</li>" for i, name in enumerate(names))
    return f"<ul>{''.join(entries)}</ul>"


def bars(values: dict[str, float], x_label: str, y_label: str) -> str:
    """An SVG chart with one vertical bar per entry, in order; the keys are the labels below the bars."""
    y = Axis.linear(y_label, list(values.values()))
    x = Axis(x_label, 0, max(len(values), 1), ticks=[(i + 0.5, name) for i, name in enumerate(values)])
    gap = 0.15 if len(values) < 40 else 0.02
    parts = frame(x, y)
    for i, value in enumerate(values.values()):
        left, right, top = x_at(x, i + gap), x_at(x, i + 1 - gap), y_at(y, value)
        size = f'width="{right - left:.1f}" height="{HEIGHT - BOTTOM - top:.1f}"'
        parts.append(f'<rect x="{left:.1f}" y="{top:.1f}" {size} fill="{COLOURS[0]}"/>')
    return svg(parts, f"{y_label} by {x_label}")


def heatmap(rows: Sequence[Sequence[float]], names: Sequence[str], x_label: str, y_label: str) -> str:
    """A square matrix of counts as SVG, such as a confusion matrix; a cell's shade is its share of the row's sum.

    Counts other than zero are also written as numbers; a count of zero has no cell. Names are cut to 10 characters.
    """
    cell, edge = max(14, min(42, 640 // max(len(names), 1))), 90
    side = edge + cell * len(names)
    middle = edge + cell * len(names) / 2
    parts = [text(middle, 14, x_label)]
    parts.append(text(13, middle, y_label, turn=f' transform="rotate(-90 13 {middle:.1f})"'))
    for i, name in enumerate(names):
        at = edge + cell * (i + 0.5)
        parts += [text(at, edge - 8, name[:10]), text(edge - 8, at + 4, name[:10], "end")]
    for i, row in enumerate(rows):
        parts += [
            _cell(edge + cell * j, edge + cell * i, cell, value, sum(row)) for j, value in enumerate(row) if value
        ]
    inside = "\n".join(parts)
    label = escape(f"{y_label} by {x_label}")
    style = f'style="max-width: {side}px"'
    return f'<svg viewBox="0 0 {side} {side}" role="img" aria-label="{label}" {style}>\n{inside}\n</svg>'


def _cell(x: float, y: float, size: float, value: float, whole: float) -> str:
    shade = f'fill="{COLOURS[0]}" fill-opacity="{0.08 + 0.8 * value / whole:.3f}"'
    square = f'<rect x="{x}" y="{y}" width="{size - 1}" height="{size - 1}" {shade}/>'
    return square + text(x + size / 2, y + size / 2 + 4, f"{value:g}")


def document(title: str, body: str) -> str:
    """A whole HTML page. `body` is HTML; `title` is plain text."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    inside = f"<h1>{escape(title)}</h1>\n{body}"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{inside}\n</body></html>\n'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table with one header row, `head`; cells are plain text, which is escaped."""
    lines = (f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>{''.join(lines)}</table>"


def figure(title: str, drawing: str) -> str:
    """An HTML figure with a title (plain text) above a drawing (HTML or SVG)."""
    return f"<figure><h2>{escape(title)}</h2>{drawing}</figure>"


@dataclass(frozen=True)
class Bar:
    """A horizontal bar, with its name to the left and `text` to the right of it."""

    name: str
    value: float
    text: str


def horizontal_bars(entries: Sequence[Bar], title: str, mark: float) -> str:
    """Horizontal bars as a separate SVG image, for many entries with long names.

    A vertical line is at the value `mark`; bars below it have another colour.
    """
    row, names, width = 18, 330, 900
    height = TOP + 26 + row * len(entries) + 10
    scale = (width - names - 60) / max([mark, *(entry.value for entry in entries)])
    parts = [text(names, TOP + 10, title, "start")]
    for i, entry in enumerate(entries):
        y = TOP + 26 + row * i
        colour = COLOURS[0] if entry.value >= mark else COLOURS[1]
        parts.append(text(names - 8, y + 11, entry.name, "end"))
        parts.append(
            f'<rect x="{names}" y="{y}" width="{entry.value * scale:.1f}" height="{row - 5}" fill="{colour}"/>'
        )
        parts.append(text(names + entry.value * scale + 5, y + 11, entry.text, "start"))
    at = names + mark * scale
    parts.append(f'<line x1="{at:.1f}" y1="{TOP + 20}" x2="{at:.1f}" y2="{height - 6}" stroke="#888"/>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
    style = "<style>text {font: 11px sans-serif; fill: #444}</style>"
    inside = "\n".join(parts)
    return f'{head} aria-label="{escape(title)}">\n{style}\n{inside}\n</svg>\n'
