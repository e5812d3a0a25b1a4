"""`lathe keys add | list | revoke`: manages the file of API keys (LATHE_KEYS_FILE)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from lathe.server.access.keys import DamagedKeys, Key, make_key, read_keys, write_keys
from lathe.server.access.quotas import LEAST_RATE
from lathe.server.access.scopes import Scope
from lathe.server.cli.command_group import Commands
from lathe.server.cli.terminal import console, error_console, fail, filled_table, local_time, time_column, whole_column
from lathe.server.errors import Unavailable
from lathe.server.repository.file_lock import FileLock

app = Commands("Manage API keys. A running server reloads the file when it changes.")

KeysFile = Annotated[
    Path,
    typer.Option("--file", help="Use this file of keys; `lathe keys add` creates it.", envvar="LATHE_KEYS_FILE"),
]
_DAY = 86_400
_LOCK_TIMEOUT = 10.0  # seconds
_MOST_DAYS = 36_500


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="The name of the key's user, as the audit log shows it.")],
    scope: Annotated[
        list[Scope], typer.Option(metavar="SCOPE", help="Grant this scope; repeat the option for several.")
    ],
    file: KeysFile,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Limit the key to this model, or pattern with * and ?; repeat for several. Default: all."),
    ] = None,
    days: Annotated[
        float | None, typer.Option(help="Let the key expire after this many days. Default: never.", min=0)
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Limit inference to this many rows per second. Default: LATHE_CLIENT_RATE.", min=LEAST_RATE),
    ] = None,
    burst: Annotated[
        float | None,
        typer.Option(help="With --rate: allow bursts of this many rows. Default: the rows of one second.", min=1),
    ] = None,
    token_rate: Annotated[
        float | None,
        typer.Option(
            help="Limit language models to this many tokens per second, of prompts and of generated texts. Default: "
            "LATHE_CLIENT_TOKEN_RATE.",
            min=LEAST_RATE,
        ),
    ] = None,
    token_burst: Annotated[
        float | None,
        typer.Option(
            help="With --token-rate: allow bursts of this many tokens. Default: the tokens of one minute.", min=1
        ),
    ] = None,
) -> None:
    """Create an API key and print it. It is shown only once; the file stores its digest.

    Scopes: infer (run models, read their inputs and outputs), read (lists, versions, metrics, settings), write (push,
    delete, load), promote (promote, roll back, canaries), train (datasets, jobs), admin (settings of logging and
    tracing, shared memory, jobs of other owners). No scope includes another. Clients send a key with --api-key or
    LATHE_KEY.

    \b
    Examples:
      lathe keys add app --scope infer --file keys.json
      lathe keys add ci --scope read --scope write --file keys.json --days 90
      lathe serve --keys-file keys.json
    """
    if burst is not None and rate is None:
        raise fail("--burst: expected --rate with it")
    if token_burst is not None and token_rate is None:
        raise fail("--token-burst: expected --token-rate with it")
    if days is not None and days > _MOST_DAYS:
        raise fail(f"--days: expected at most {_MOST_DAYS}, got {days:g}")
    now = int(time.time())
    expires = None if days is None else now + int(days * _DAY)
    with _edit_keys(file) as keys:
        quotas = (rate, burst), (token_rate, token_burst)
        key, secret = make_key(name, scope, model or ["*"], now, expires, *quotas)
        keys[key.id] = key
    error_console.print(f"key {key.id} for {name}; it will not be shown again:")
    console.print(secret, soft_wrap=True)


@app.command("list")
def list_keys(file: KeysFile) -> None:
    """List the keys with their names, scopes, models and expiry dates."""
    times, rates = (time_column("created"), time_column("expires")), ("rows/s", "tokens/s")
    columns = (whole_column("id"), "name", "scopes", "models", *times, *rates)
    console.print(filled_table(columns, map(_key_cells, _read(file).values())))


@app.command()
def revoke(
    identity: Annotated[str, typer.Argument(metavar="ID", help="The id of the key, as `lathe keys list` shows it.")],
    file: KeysFile,
) -> None:
    """Revoke a key: the server refuses it once it has reloaded the file."""
    with _edit_keys(file) as keys:
        if identity not in keys:
            raise fail(f"key {identity!r}: there is no key with this id in {file}{_ids_of(identity, keys)}")
        key = keys.pop(identity)
    console.print(f"key {key.id} for {key.name} is revoked")


def _key_cells(key: Key) -> tuple[str, ...]:
    expires = local_time(key.expires) if key.expires is not None else "never"
    rates = ("" if each is None else f"{each:g}" for each in (key.rate, key.token_rate))
    scopes, models = " ".join(sorted(key.scopes)), " ".join(key.models)
    return key.id, key.name, scopes, models, local_time(key.created), expires, *rates


def _ids_of(name: str, keys: Mapping[str, Key]) -> str:
    """Return the ids of the keys with a name, to append to an error; empty if there are none."""
    ids = [key.id for key in keys.values() if key.name == name]
    return f"; the id of {name!r} is {' or '.join(ids)}" if ids else ""


@contextmanager
def _edit_keys(file: Path) -> Iterator[dict[str, Key]]:
    """Yield the keys by id under the file's lock, and write them back unless the body raises.

    A file that cannot be locked, read or written ends the command.
    """
    try:
        with FileLock(file.with_name(f".{file.name}.lock"), _LOCK_TIMEOUT, "the file of keys").hold():
            keys = _read(file) if file.exists() else {}
            yield keys
            write_keys(file, keys.values())
    except OSError as error:
        raise fail(f"{file}: it cannot be written: {error.strerror or error}") from error
    except Unavailable as error:
        raise fail(f"{file}: {error.message}") from error


def _read(file: Path) -> dict[str, Key]:
    try:
        return dict(read_keys(file).keys)
    except FileNotFoundError as error:
        raise fail(f"{file}: there is no such file; `lathe keys add` creates it") from error
    except OSError as error:
        raise fail(f"{file}: {error.strerror or error}") from error
    except DamagedKeys as error:
        raise fail(f"{file}: {error}") from error
