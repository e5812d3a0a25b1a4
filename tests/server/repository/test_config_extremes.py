"""Extreme numbers and odd documents in `config.toml`: each is applied or reported, and requests are answered on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import BaseModel

from lathe.server.batching.entry import Entry, Outcome
from lathe.server.errors import Internal, ServerError
from lathe.server.repository.model_config import BadConfig, ModelConfig, read_config
from tests.server.repository.world import World, run, toy, world

VALUES = [
    "0", "1", "-1", "2", "1e-320", "1e-300", "1e300", "1e308", "inf", "-inf", "nan", "1.0", "9223372036854775807",
    "0x" + "f" * 5000, "9" * 5000, "true", "'1'", "[1]",
]  # fmt: skip
BESIDE = {  # other keys without which a key is refused, or has no effect
    "dynamic_batching.preferred_batch_size": "dynamic_batching.max_queue_delay_microseconds = 10",
    "dynamic_batching.priority_levels": "dynamic_batching.default_priority_level = 1",
    "dynamic_batching.default_priority_level": "dynamic_batching.priority_levels = 16",
    "dynamic_batching.starvation_ms": "dynamic_batching = {priority_levels = 2, default_priority_level = 1}",
    "queue.delay_interval_ms": "queue.delay_target_ms = 1",
    "client_quota.burst": "client_quota.rate = 1",
}
ENDLESS = {"dynamic_batching.max_queue_delay_microseconds"}  # requests wait as long as it says


def numeric(kind: type[BaseModel] = ModelConfig, above: str = "") -> Iterator[str]:
    """The keys that take numbers."""
    for name, field in kind.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        for each in kinds:
            if isinstance(each, type) and issubclass(each, BaseModel):
                yield from numeric(each, f"{above}{name}.")
        if {int, float} & {*kinds, *(inner for each in kinds for inner in get_args(each))}:
            yield f"{above}{name}"


async def ask(w: World, client: str, count: int = 1) -> Outcome | None:
    """One request's outcome; the error that refuses it; None if it is not answered within a second."""
    servable = w.registry.resolve("m")
    answered: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    inputs = {"x": np.ones((count, 4), np.float32)}
    entry = Entry(inputs, servable.signature.group_of(inputs), answered.set_result)
    entry.client = client
    try:
        if servable.rules.quotas is not None:
            servable.rules.quotas.take(client, count, asyncio.get_running_loop().time())
        servable.submit(entry)
        return await asyncio.wait_for(asyncio.shield(answered), 1.0)
    except ServerError as error:
        return error
    except TimeoutError:
        servable.cancel(entry)
        return None


@pytest.mark.sample(5)
@pytest.mark.parametrize("key", sorted(set(numeric())))
def test_no_number_breaks_a_model(tmp_path: Path, key: str) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(2.0))
            for value in VALUES:
                (tmp_path / "m" / "config.toml").write_text(f"{BESIDE.get(key, '')}\n{key} = {value}\n")
                await w.watcher.poll()
                for outcome in await asyncio.gather(*(ask(w, client, rows) for client in "ab" for rows in (1, 3, 9))):
                    assert outcome is not None or key in ENDLESS, value
                    if isinstance(outcome, dict):
                        assert outcome["y"][0, 0] == 2.0
                    elif outcome is not None:
                        assert isinstance(outcome, ServerError) and not isinstance(outcome, Internal), value
                        assert 0 <= (outcome.retry_after or 0) < 1e9, value
            (tmp_path / "m" / "config.toml").unlink()
            await w.watcher.poll()
            assert isinstance(await ask(w, "a"), dict)

    run(scenario())


def fifo(path: Path) -> None:
    os.mkfifo(path)


DOCUMENTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nested": (lambda path: path.write_text("a = " + "[" * 5000), "nested too deeply"),
    "many digits": (lambda path: path.write_text("max_batch_size = " + "9" * 5000), "not TOML: Exceeds the limit"),
    "many hexadecimal digits": (
        lambda path: path.write_text("max_batch_size = 0x" + "f" * 5000),
        "max_batch_size: expected at most 4096, got a number of 20000 bits",
    ),
    "a pipe": (fifo, "not a plain file"),
    "a folder": (lambda path: path.mkdir(), "Is a directory"),
    "a loop": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    "no text": (lambda path: path.write_bytes(b"\xff"), "not TOML: 'utf-8' codec can't decode"),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_file_that_is_no_configuration_is_reported(tmp_path: Path, name: str) -> None:
    make, reason = DOCUMENTS[name]

    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(2.0))
            make(tmp_path / "m" / "config.toml")
            await asyncio.wait_for(w.watcher.poll(), 10)
            assert reason in w.model("m").config_error
            assert isinstance(await ask(w, "a"), dict)

    run(scenario())


@pytest.mark.parametrize("file", ["labels.txt", "aliases.json", "manifest.json"])
def test_a_pipe_in_place_of_another_file_does_not_block(tmp_path: Path, file: str) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(2.0))
            path = tmp_path / "m" / ("1/manifest.json" if file == "manifest.json" else file)
            path.unlink(missing_ok=True)
            os.mkfifo(path)
            if file == "labels.txt":
                (tmp_path / "m" / "config.toml").write_text("label_filename = {y = 'labels.txt'}")
                with pytest.raises(BadConfig, match="not a plain file"):
                    read_config(tmp_path / "m")
            with pytest.raises(OSError, match="not a plain file") if file == "aliases.json" else nullcontext():
                await asyncio.wait_for(w.watcher.poll(), 10)
            assert isinstance(await ask(w, "a"), dict)

    run(asyncio.wait_for(scenario(), 30))
