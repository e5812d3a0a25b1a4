"""What all commands share: the consoles, the server's address, errors as one line and an exit status."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from server.client import Client

DEFAULT_URL = "http://127.0.0.1:8080"
Url = Annotated[str, typer.Option(help="The server.", envvar="LATHE_URL")]

console = Console(markup=False, highlight=False)
complaints = Console(stderr=True, markup=False, highlight=False)


@contextmanager
def connected(url: str) -> Iterator[Client]:
    """A client of the server, with the API key in ``LATHE_KEY``; what goes wrong with it ends the command."""
    from server.client import Client, ClientError

    try:
        with Client(url, api_key=os.environ.get("LATHE_KEY")) as client:
            yield client
    except ClientError as error:
        raise fail(str(error)) from error


def fail(message: str) -> typer.Exit:
    """Say what is wrong and return what to raise."""
    complaints.print(f"error: {message}", style="red", soft_wrap=True)
    return typer.Exit(1)
