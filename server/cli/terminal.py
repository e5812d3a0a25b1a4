"""Terminal output that all commands share: consoles, tables, times, updates, progress bars, errors in one line."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import count
from typing import Annotated

import typer
from rich.console import Console, ConsoleDimensions, RenderableType
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

Interval = Annotated[float, typer.Option(help="Wait this many seconds between two updates.", min=0.05)]
Rounds = Annotated[int | None, typer.Option(help="Stop after this number of updates. Default: until Ctrl-C.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]

WIDE = 100  # columns, from which on tables have their less important columns
_UNBOUNDED = 1 << 16  # columns; wider than any line, so that none is wrapped


class Output(Console):
    """A console that wraps text for a terminal only. In a pipe or file, lines are whole unless COLUMNS is set."""

    @property
    def size(self) -> ConsoleDimensions:
        if self.is_terminal:
            return super().size
        columns = os.environ.get("COLUMNS", "")
        return ConsoleDimensions(int(columns) if columns.isdigit() else _UNBOUNDED, 25)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size


console = Output(markup=False, highlight=False)
error_console = Output(stderr=True, markup=False, highlight=False)


def print_json(value: object) -> None:
    """Print a value as JSON."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def make_table(*columns: str | Column, title: str | None = None) -> Table:
    """Return an empty table that cuts no cell: in a narrow terminal a cell continues on further lines."""
    named = [Column(each) if isinstance(each, str) else each for each in columns]
    for column in named:
        column.overflow = "fold"
    return Table(*named, title=title, title_justify="left")


def filled_table(columns: Sequence[str | Column], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of rows, without the columns that are empty in all of them."""
    cells = list(rows)
    filled = [number for number in range(len(columns)) if not cells or any(row[number] for row in cells)]
    table = make_table(*(columns[number] for number in filled))
    for row in cells:
        table.add_row(*(row[number] for number in filled))
    return table


def whole_column(header: str) -> Column:
    """Return a column whose cells are arguments of other commands: they are never broken."""
    return Column(header, no_wrap=True)


def time_column(header: str) -> Column:
    """Return a column for `local_time`, which breaks only between date and time."""
    return Column(header, min_width=len("2026-01-31"))


def local_time(time: str | float | None) -> str:
    """Return a time as `2026-01-31 02:00:00` in this machine's time zone; empty for None and an empty text.

    `time` is a text in RFC 3339, or seconds since 1970.
    """
    if time in (None, ""):
        return ""
    moment = datetime.fromisoformat(time).astimezone() if isinstance(time, str) else datetime.fromtimestamp(time)
    return f"{moment:%Y-%m-%d %H:%M:%S}"


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print a line for each fact, with its title before it; texts begin in the same column."""
    lines = list(facts)
    width = max((len(title) for title, _ in lines), default=0)
    for title, text in lines:
        console.print(f"  {title:<{max(width, 9)}} {text}", soft_wrap=True)


@contextmanager
def live_view() -> Iterator[Callable[[RenderableType], None]]:
    """Yield a function that shows the present state: on a terminal in place of the one before, otherwise below it."""
    if not console.is_terminal:
        yield console.print
        return
    with Live(console=console, auto_refresh=False) as display:
        yield lambda shown: display.update(shown, refresh=True)


def ticks(interval: float, rounds: int | None) -> Iterator[int]:
    """Yield 0, 1, 2 ..., sleeping `interval` seconds before each; ends after `rounds` numbers if that is not None."""
    for number in count() if rounds is None else range(rounds):
        time.sleep(interval)
        yield number


@contextmanager
def transfer_progress(sending: str, waiting: str, first: str | None = None) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar for an upload, then a spinner until the server answers; nothing without a terminal.

    Yields a callback that takes the bytes sent so far and the bytes in all. The texts name the three phases: `first`
    before the first byte is sent, `sending` during the upload, `waiting` after the last byte.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(first or sending, total=None)

        def on_progress(done: int, total: int) -> None:
            phase = waiting if done == total else sending
            progress.update(task, completed=done, total=total, description=phase)

        yield on_progress


def fail(message: str) -> typer.Exit:
    """Print an error message on stderr, and return the exception to raise: exit with status 1."""
    error_console.print(f"error: {message}", style="red", soft_wrap=True)
    return typer.Exit(1)
