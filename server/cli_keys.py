"""``lathe keys add | list | revoke``: the file that ``LATHE_KEYS_FILE`` names."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from server.access.keys import DamagedKeys, Key, make_key, read_keys, write_keys
from server.access.scopes import Scope
from server.cli_group import Commands
from server.repository.lock import FileLock
from server.terminal import complaints, console, fail

app = Commands("Manage API keys. A running server follows changes of the file.")

KeysFile = Annotated[
    Path, typer.Option("--file", help="The file of keys; `lathe keys add` makes it.", envvar="LATHE_KEYS_FILE")
]
_DAY = 86_400


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="Who uses the key; the audit log shows this name.")],
    scope: Annotated[
        list[Scope], typer.Option(metavar="SCOPE", help="What the key permits; repeat the option for several.")
    ],
    file: KeysFile,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Limit the key to these models (* and ? match any text); repeat for several. Default: all."),
    ] = None,
    days: Annotated[float | None, typer.Option(help="Days until the key expires. Default: never.", min=0)] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Rows per second it may send for inference. Default: LATHE_CLIENT_RATE.", min=1e-6),
    ] = None,
    burst: Annotated[
        float | None, typer.Option(help="Rows it may send at once, with --rate. Default: those of one second.", min=1)
    ] = None,
) -> None:
    """Make a key and print it. It is printed this once; the file holds only its digest.

    Scopes: infer (run models), read (lists, metrics), write (push, delete, load), promote (promote, roll back,
    canaries), train (datasets, jobs), admin (logging, tracing). Show a key with --api-key or LATHE_KEY.

    \b
    Examples:
      lathe keys add app --scope infer --file keys.json
      lathe keys add ci --scope read --scope write --scope promote --file keys.json --days 90
      lathe serve --keys-file keys.json
    """
    if burst is not None and rate is None:
        raise fail("--burst: expected --rate with it")
    now = int(time.time())
    expires = None if days is None else now + int(days * _DAY)
    with _changing(file) as keys:
        key, shown = make_key(name, scope, model or ["*"], now, expires, (rate, burst))
        keys[key.id] = key
    complaints.print(f"key {key.id} for {name}; it will not be shown again:")
    console.print(shown, soft_wrap=True)


@app.command("list")
def list_keys(file: KeysFile) -> None:
    """List the keys: who has one, what it permits, when it expires."""
    table = Table("id", "name", "scopes", "models", "created", "expires", "rows/s")
    for key in _read(file).values():
        expires = _date(key.expires) if key.expires is not None else "never"
        rate = "" if key.rate is None else f"{key.rate:g}"
        scopes, models = " ".join(sorted(key.scopes)), " ".join(key.models)
        table.add_row(key.id, key.name, scopes, models, _date(key.created), expires, rate)
    console.print(table)


@app.command()
def revoke(
    identity: Annotated[str, typer.Argument(metavar="ID", help="The key's id, from `lathe keys list`.")], file: KeysFile
) -> None:
    """Revoke a key: the server refuses it from then on."""
    with _changing(file) as keys:
        if identity not in keys:
            raise fail(f"key {identity!r}: there is none of that id in {file}")
        key = keys.pop(identity)
    console.print(f"key {key.id} for {key.name} does not work any more")


@contextmanager
def _changing(file: Path) -> Iterator[dict[str, Key]]:
    """The keys, to be changed; written if nothing is raised."""
    with FileLock(file.with_name(f".{file.name}.lock"), timeout=10.0).held():
        keys = _read(file) if file.exists() else {}
        yield keys
        write_keys(file, keys.values())


def _read(file: Path) -> dict[str, Key]:
    try:
        return dict(read_keys(file).keys)
    except FileNotFoundError as error:
        raise fail(f"{file}: there is no such file; `lathe keys add` makes it") from error
    except (OSError, DamagedKeys) as error:
        raise fail(f"{file}: {error}") from error


def _date(seconds: int) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M")
