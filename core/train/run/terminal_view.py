"""Shows a training in the terminal: progress bar, loss, metrics, throughput, time left and curves.

A hyper-parameter search is shown by its trials, a compression by its stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_UNTRAINED = "skipped", "repeated"  # states of trials (trials.py) that count among no number of trials

_HEIGHT = 8  # lines per curve
_BARS = " ▁▂▃▄▅▆▇█"


@dataclass
class StepRate:
    """The rate of steps in this process, without compilation, to estimate the time left."""

    first: tuple[int, float] | None = None  # number of a step, and seconds of training until its end
    last: tuple[int, float] = (0, 0.0)

    def note(self, step: int, seconds: float) -> None:
        self.first = self.first or (step, seconds)
        self.last = (step, seconds)

    def remaining(self, total: int) -> float | None:
        """The estimated seconds until step `total`; None before `note` was called for two different steps."""
        if self.first is None or self.last[0] <= self.first[0]:
            return None
        (before, began), (step, seconds) = self.first, self.last
        return (total - step) * (seconds - began) / (step - before)


@dataclass
class SearchProgress:
    """The state of a search according to its events so far: its trials by number."""

    total: int
    trials: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    pace: StepRate = field(default_factory=StepRate)

    @property
    def place(self) -> str:
        return f"trial {self.ended}/{self.total}"

    @property
    def ended(self) -> int:
        """The number of trials that have ended, without those that were never trained."""
        return sum(trial["state"] not in _UNTRAINED for trial in self.trials.values())

    @property
    def outcome(self) -> str:
        """In one line, the numbers of trials that are not complete, and the best trial so far with its merit."""
        states = [trial["state"] for trial in self.trials.values()]
        parts = [f"{states.count(state)} {state}" for state in ("pruned", "failed", *_UNTRAINED) if state in states]
        complete = [
            trial for trial in self.trials.values() if trial["state"] == "complete" and trial["merit"] is not None
        ]
        if complete:
            best = max(complete, key=lambda trial: (trial["merit"], -trial["trial"]))
            parts.append(f"best {best['merit']:.4f} by trial {best['trial']} ({_settings(best['values'])})")
        return "  ".join(parts)

    def see(self, values: Mapping[str, Any]) -> None:
        self.trials[values["trial"]] = values
        self.pace.note(self.ended, values["seconds"])


def trial_line(values: Mapping[str, Any]) -> str:
    """One line about a trial that has ended: its state, merit, settings and error."""
    merit = "" if values["merit"] is None else f" {values['merit']:.4f}"
    why = f": {values['error']}" if values["error"] else ""
    return f"trial {values['trial']} {values['state']}{merit}  {_settings(values['values'])}{why}"


def _settings(values: Mapping[str, Any]) -> str:
    texts = (f"{value:.4g}" if isinstance(value, float) else f"{value}" for value in values.values())
    return " ".join(f"{path}={text}" for path, text in zip(values, texts, strict=True))


@dataclass(frozen=True)
class StageProgress:
    """The stage of a compression: its name, and how many of its parts have ended."""

    name: str
    ended: int
    total: int


@dataclass
class TrainingProgress:
    """The state of a training according to its events so far."""

    total: int = 0  # steps
    epochs: int = 0
    step: int = 0
    epoch: int = 0
    numbers: dict[str, float] = field(default_factory=dict)  # the latest loss, rate, throughput and metrics
    losses: list[tuple[int, float]] = field(default_factory=list)
    metric_points: list[tuple[int, float]] = field(default_factory=list)
    judge: str = "loss"
    pace: StepRate = field(default_factory=StepRate)
    search: SearchProgress | None = None  # of a hyper-parameter search, which does not use the other fields
    stage: StageProgress | None = None  # of a compression, likewise

    @property
    def place(self) -> str:
        return f"epoch {self.epoch}/{self.epochs}"

    @property
    def epoch_line(self) -> str:
        """One line about the present epoch, with the latest numbers."""
        return f"{self.place}  {_numbers(self.numbers)}"

    def see(self, kind: str, values: Mapping[str, Any]) -> None:
        match kind:
            case "started" if "trials" in values:
                self.search = SearchProgress(values["trials"], self.search.trials if self.search else {})
            case "started":
                self.epochs, self.judge = values["epochs"], values["judge"]
                self.total = self.epochs * values["steps_per_epoch"]
            case "trial" if self.search:
                self.search.see(values)
            case "stage":
                self.stage = StageProgress(values["stage"], values["ended"], values["total"])
            case "resumed":
                self.step, self.epoch, self.pace = values["step"], values["epoch"], StepRate()
                self.losses = [point for point in self.losses if point[0] <= self.step]
                self.metric_points = [point for point in self.metric_points if point[0] <= self.step]
            case "step":
                self._on_step(values)
            case "epoch":
                self._on_epoch(values)

    def _on_step(self, values: Mapping[str, Any]) -> None:
        self.step, self.epoch = values["step"], values["epoch"]
        names = ("loss", "rate", "rows_per_second", "loss_scale", "skipped")
        self.numbers |= {name: values[name] for name in names if values.get(name) is not None}
        self.losses.append((self.step, values["loss"]))
        self.pace.note(self.step, values["seconds"])

    def _on_epoch(self, values: Mapping[str, Any]) -> None:
        self.epoch = values["epoch"]
        self.pace.note(values["step"], values["seconds"])
        validation = values.get("validation") or {}
        shown_metrics = {"loss", self.judge} & validation.keys()
        self.numbers |= {f"validation {name}": validation[name] for name in sorted(shown_metrics)}
        if self.judge in validation:
            self.metric_points.append((values["step"], validation[self.judge]))


class TrainingView:
    """Shows events as they arrive: on a terminal in a block that is redrawn, otherwise as one line per epoch.

    Trials of a search, stages of a compression, and the events `log` and `failed`, get a line each in both cases.
    """

    def __init__(self, console: Console, curves: bool = False) -> None:
        self.standing = TrainingProgress()
        self._console = console
        self._curves = curves
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=8, transient=True)

    def see(self, kind: str, values: Mapping[str, Any]) -> None:
        """Show an event of this kind with these values."""
        self.standing.see(kind, values)
        if kind in ("log", "failed"):
            self._console.print(values.get("message") or f"failed: {values.get('error')}", soft_wrap=True)
        elif kind == "stage" and not values["ended"]:
            self._console.print(values["stage"], soft_wrap=True)
        elif kind == "trial":
            self._console.print(trial_line(values), soft_wrap=True)
        elif kind == "epoch" and not self._console.is_terminal:
            self._console.print(self.standing.epoch_line, soft_wrap=True)

    def render(self) -> RenderableType:
        standing = self.standing
        if tried := standing.search:
            bar = ProgressBar(total=max(tried.total, 1), completed=tried.ended)
            return Group(_line(tried.place, bar, eta(tried.pace.remaining(tried.total))), _text(tried.outcome))
        if stage := standing.stage:
            bar = ProgressBar(total=stage.total or None, completed=stage.ended, pulse=not stage.ended)
            return _line(stage.name, bar, "")
        if not standing.step:
            return _line("compiling", ProgressBar(total=None, pulse=True), "")
        bar = ProgressBar(total=max(standing.total, 1), completed=standing.step)
        line = _line(standing.place, bar, eta(standing.pace.remaining(standing.total)))
        parts: list[RenderableType] = [line, _text(_numbers(standing.numbers))]
        if self._curves:
            parts += self._curve("loss", standing.losses)
            parts += self._curve(f"validation {standing.judge}", standing.metric_points)
        return Group(*parts)

    def _curve(self, name: str, points: Sequence[tuple[int, float]]) -> list[Text]:
        if len(points) < 2:
            return []
        width = max(self._console.width - 12, 10)
        return [Text(name, style="bold"), *(Text(line) for line in curve([y for _, y in points], width))]

    def __enter__(self) -> TrainingView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.stop()


def _line(*cells: RenderableType) -> Table:
    """A row of cells, of which the second (the bar) takes the remaining width."""
    line = Table.grid(padding=(0, 2), expand=True)
    for ratio in (None, 1, None):
        line.add_column(ratio=ratio, no_wrap=True)
    line.add_row(*cells)
    return line


def _text(content: str) -> Text:
    return Text(content, overflow="ellipsis", no_wrap=True)


def eta(seconds: float | None) -> str:
    """The time left for humans: `4 s left`, `2:05 left`, `1:02:03 left`; empty for None."""
    if seconds is None:
        return ""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02} left"
    return f"{minutes}:{rest:02} left" if minutes else f"{rest} s left"


def curve(values: Sequence[float], width: int, height: int = _HEIGHT) -> list[str]:
    """A bar chart as `height` lines of block characters, the newest value on the right; `values` is not empty.

    Values are averaged to at most `width` bars. Labels before the first and the last line give the highest and the
    lowest bar.
    """
    columns = _downsample(values, width)
    low, high = min(columns), max(columns)
    scale = 8 * height / ((high - low) or 1.0)
    levels = [max(round((value - low) * scale), 1) for value in columns]
    lines = []
    for row in reversed(range(height)):
        label = f"{high:9.4g} " if row == height - 1 else f"{low:9.4g} " if row == 0 else " " * 10
        lines.append(label + "".join(_BARS[min(max(level - 8 * row, 0), 8)] for level in levels))
    return lines


def _downsample(values: Sequence[float], width: int) -> list[float]:
    """At most `width` numbers: means of neighbours if there are more values."""
    count = min(len(values), width)
    edges = [len(values) * i // count for i in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def _numbers(numbers: Mapping[str, float]) -> str:
    texts = {
        "rows_per_second": "{:,.0f} rows/s", "rate": "rate {:.2e}", "loss_scale": "loss scale {:g}",
        "skipped": "{} skipped",
    }  # fmt: skip
    return "  ".join(texts.get(name, f"{name} {{:.4f}}").format(value) for name, value in numbers.items())
