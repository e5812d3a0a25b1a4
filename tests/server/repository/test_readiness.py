"""What a server waits for before it wants callers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from server.errors import Unavailable, UnknownModel
from server.repository.aliases import Aliases
from server.repository.catalog import Catalog
from server.repository.diskside import DiskSide
from server.repository.live import LiveModel
from server.repository.readiness import Readiness
from server.repository.store import Origin
from server.types import Awaited
from tests.server.repository.world import World, copy_by_hand, run, toy, world

BAD = b"\x08nonsense"


def started(w: World) -> Readiness:
    readiness = Readiness(w.rollout._models)
    readiness.begin()
    return readiness


async def compiling(w: World) -> None:
    """Return once a compilation waits for the gate."""
    while "compile" not in w.stages.runs:  # noqa: ASYNC110 - the stages run in this loop
        await asyncio.sleep(0.001)


def test_a_live_version_that_cannot_be_loaded_is_waited_for_until_it_can(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(3.0))
            await w.push(toy(5.0), "other")
        model = tmp_path / "m/1/model.onnx"
        good = model.read_bytes()
        model.write_bytes(BAD)
        async with world(tmp_path) as w:
            readiness = started(w)
            assert readiness.awaited() == [Awaited("m", 1, "failed")]
            model.write_bytes(good)
            await w.watcher.poll()
            assert readiness.awaited() == []
            assert w.scale() == 3.0

    run(work())


def test_a_folder_that_was_there_at_the_start_is_waited_for_and_one_that_came_later_is_not(tmp_path: Path) -> None:
    async def work() -> None:
        copy_by_hand(tmp_path, 1, BAD)
        async with world(tmp_path) as w:
            readiness = started(w)
            copy_by_hand(tmp_path, 1, BAD, "later")
            await w.watcher.poll()
            assert readiness.awaited() == [Awaited("m", 1, "failed")]
            assert w.model("later").failures.keys() == {1}

    run(work())


def test_while_the_server_starts_all_that_is_loaded_is_named(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            readiness = Readiness(w.rollout._models)  # as before the end of a start
            w.stages.gate.clear()
            copy_by_hand(tmp_path, 1, toy())
            syncing = asyncio.create_task(w.watcher.poll())
            await compiling(w)
            assert readiness.awaited() == [Awaited("m", 1, "compiling")]
            w.stages.gate.set()
            await syncing
            assert readiness.awaited() == []

    run(work())


def test_during_a_start_a_model_that_was_not_looked_at_yet_is_not_unknown(tmp_path: Path) -> None:
    """503 tells a client to come back; 404 would tell it that there is no such model."""

    async def work() -> None:
        async with world(tmp_path) as w:
            copy_by_hand(tmp_path, 1, toy(3.0))
            await w.rollout.open()
            for ask in (w.scale, lambda: w.rollout._models.known("m")):
                with pytest.raises(Unavailable, match="'m' is not known yet: the server is starting"):
                    ask()
            await w.watcher.start()
            assert w.scale() == 3.0
            for ask in (lambda: w.scale(name="no"), lambda: w.rollout._models.known("no")):
                with pytest.raises(UnknownModel):
                    ask()

    run(work())


def test_during_a_start_nobody_is_told_of_a_model_without_its_aliases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its versions are known first; a list of no aliases would say that they are gone."""
    seen: list[object] = []
    state = DiskSide._state

    async def asked_before(disk: DiskSide, model: LiveModel) -> Aliases:
        catalog = Catalog(disk._store, disk._models, disk)
        seen.append(catalog.models())
        with pytest.raises(Unavailable, match="'m' is not known yet: the server is starting"):
            catalog.model("m")
        with pytest.raises(Unavailable, match="'m' is not known yet: the server is starting"):
            await catalog.version("m", 1)
        return await state(disk, model)

    async def work() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(3.0))
        monkeypatch.setattr(DiskSide, "_state", asked_before)
        async with world(tmp_path) as w:
            assert seen[0] == []
            assert set(w.rollout.catalog.model("m").aliases.aliases) == {"live"}

    run(work())


def test_what_was_unloaded_or_never_went_live_is_not_waited_for(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(), withheld=True)
            await w.push(toy(), "unloaded")
            await w.rollout.unload("unloaded")
            assert started(w).awaited() == []
        async with world(tmp_path) as w:
            assert started(w).awaited() == []

    run(work())


def test_a_version_that_another_server_made_live_is_waited_for_only_if_it_fails(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w, world(tmp_path) as other:
            await w.push(toy(2.0))
            await other.watcher.poll()
            readiness = started(other)
            outcome = await w.push(toy(3.0))
            await w.rollout.set_alias("m", "live", outcome.version, Origin("test"))
            other.backend.refusals = 2
            other.stages.gate.clear()
            (tmp_path / ".cache/models").rename(tmp_path / "elsewhere")
            syncing = asyncio.create_task(other.watcher.poll())
            await compiling(other)
            assert readiness.awaited() == []
            assert other.scale() == 2.0
            other.stages.gate.set()
            await syncing
            assert readiness.awaited() == [Awaited("m", 2, "failed")]
            assert other.scale() == 2.0

    run(work())
