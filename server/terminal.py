"""What all commands share: the consoles, looks at what changes, errors as one line and an exit status."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Annotated

import typer
from rich.console import Console, ConsoleDimensions
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Interval = Annotated[float, typer.Option(help="Seconds between two updates.", min=0.05)]
Rounds = Annotated[int | None, typer.Option(help="Number of updates. Default: until Ctrl-C.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]

_UNBOUNDED = 1 << 16


class Output(Console):
    """Wraps text for a terminal. In a pipe or a file every line stays whole, unless COLUMNS says how wide they are."""

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
complaints = Output(stderr=True, markup=False, highlight=False)


def print_json(value: object) -> None:
    """Print a value as JSON."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def looks(interval: float, rounds: int | None) -> Iterator[int]:
    """Count looks at what changes, ``interval`` seconds before each; ``rounds`` of them, or without end."""
    for number in count() if rounds is None else range(rounds):
        time.sleep(interval)
        yield number


@contextmanager
def transfer(sending: str, waiting: str, first: str | None = None) -> Iterator[Callable[[int, int], None]]:
    """A bar for bytes that go to the server, told how many of how many have gone; then a wait for its answer.

    ``first``: what happens before the first byte goes."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(first or sending, total=None)

        def sent(done: int, total: int) -> None:
            step = waiting if done == total else sending
            progress.update(task, completed=done, total=total, description=step)

        yield sent


def fail(message: str) -> typer.Exit:
    """Say what is wrong and return what to raise."""
    complaints.print(f"error: {message}", style="red", soft_wrap=True)
    return typer.Exit(1)
