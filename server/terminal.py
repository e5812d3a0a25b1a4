"""What all commands share: the consoles, the server's address, errors as one line and an exit status."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, ConsoleDimensions
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from server.client import Client

DEFAULT_URL = "http://127.0.0.1:8080"
Url = Annotated[str, typer.Option(help="The server.", envvar="LATHE_URL")]
Interval = Annotated[float, typer.Option(help="Seconds between two looks.", min=0.05)]
Rounds = Annotated[int | None, typer.Option(help="How many times to look; until interrupted without it.")]

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


@contextmanager
def connected(url: str) -> Iterator[Client]:
    """A client of the server, with the API key in ``LATHE_KEY``; what goes wrong with it ends the command."""
    from server.client import Client, ClientError

    try:
        with Client(url, api_key=os.environ.get("LATHE_KEY")) as client:
            yield client
    except ClientError as error:
        raise fail(str(error)) from error


def looks(interval: float, rounds: int | None) -> Iterator[int]:
    """Count looks at what changes, ``interval`` seconds before each; ``rounds`` of them, or without end."""
    for number in count() if rounds is None else range(rounds):
        time.sleep(interval)
        yield number


@contextmanager
def transfer(sending: str, waiting: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for bytes that go to the server, told how many of how many have gone; then a wait for its answer."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(sending, total=None)

        def sent(done: int, total: int) -> None:
            step = waiting if done == total else sending
            progress.update(task, completed=done, total=total, description=step)

        yield sent


def fail(message: str) -> typer.Exit:
    """Say what is wrong and return what to raise."""
    complaints.print(f"error: {message}", style="red", soft_wrap=True)
    return typer.Exit(1)
