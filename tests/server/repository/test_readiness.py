"""The versions that a starting server waits for before it is ready."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lathe.server.errors import Unavailable, UnknownModel
from lathe.server.repository.aliases import Aliases
from lathe.server.repository.catalog import Catalog
from lathe.server.repository.live_models import LiveModel
from lathe.server.repository.readiness import Readiness
from lathe.server.repository.reconciler import Reconciler
from lathe.server.repository.store import Origin
from lathe.server.types import MissingVersion
from tests.server.repository.world import World, copy_by_hand, run, toy, world

BAD = b"\x08nonsense"


def begin_readiness(w: World) -> Readiness:
    readiness = Readiness(w.rollout._models)
    readiness.begin()
    return readiness


async def wait_for_compilation(w: World) -> None:
    """Return when a compilation waits for the gate."""
    while "compile" not in w.stages.runs:  # noqa: ASYNC110 - the stages run in this loop
        await asyncio.sleep(0.001)


def test_a_live_version_that_fails_to_load_is_awaited_until_it_loads(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(3.0))
            await w.push(toy(5.0), "other")
        model = tmp_path / "m/1/model.onnx"
        good = model.read_bytes()
        model.write_bytes(BAD)
        async with world(tmp_path) as w:
            readiness = begin_readiness(w)
            assert readiness.missing_versions() == [MissingVersion("m", 1, "failed")]
            model.write_bytes(good)
            await w.watcher.poll()
            assert readiness.missing_versions() == []
            assert w.scale() == 3.0

    run(work())


def test_only_folders_present_at_the_start_are_awaited(tmp_path: Path) -> None:
    async def work() -> None:
        copy_by_hand(tmp_path, 1, BAD)
        async with world(tmp_path) as w:
            readiness = begin_readiness(w)
            copy_by_hand(tmp_path, 1, BAD, "later")
            await w.watcher.poll()
            assert readiness.missing_versions() == [MissingVersion("m", 1, "failed")]
            assert w.model("later").failures.keys() == {1}

    run(work())


def test_during_the_start_every_loading_version_is_named(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            readiness = Readiness(w.rollout._models)  # as before the end of the start
            w.stages.gate.clear()
            copy_by_hand(tmp_path, 1, toy())
            syncing = asyncio.create_task(w.watcher.poll())
            await wait_for_compilation(w)
            assert readiness.missing_versions() == [MissingVersion("m", 1, "compiling")]
            w.stages.gate.set()
            await syncing
            assert readiness.missing_versions() == []

    run(work())


def test_during_the_start_a_model_not_yet_read_is_unavailable(tmp_path: Path) -> None:
    """503 tells a client to retry; 404 would say that there is no such model."""

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


def test_during_the_start_a_model_is_not_shown_without_its_aliases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its versions are read first; an empty list of aliases would say that they do not exist."""
    seen: list[object] = []
    state = Reconciler._aliases

    async def asked_before(disk: Reconciler, model: LiveModel) -> Aliases:
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
        monkeypatch.setattr(Reconciler, "_aliases", asked_before)
        async with world(tmp_path) as w:
            assert seen[0] == []
            assert set(w.rollout.catalog.model("m").aliases.aliases) == {"live"}

    run(work())


def test_unloaded_and_never_live_versions_are_not_awaited(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(), without_alias=True)
            await w.push(toy(), "unloaded")
            await w.rollout.unload("unloaded")
            assert begin_readiness(w).missing_versions() == []
        async with world(tmp_path) as w:
            assert begin_readiness(w).missing_versions() == []

    run(work())


def test_a_version_made_live_by_another_server_is_awaited_only_if_it_fails(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path) as w, world(tmp_path) as other:
            await w.push(toy(2.0))
            await other.watcher.poll()
            readiness = begin_readiness(other)
            outcome = await w.push(toy(3.0))
            await w.rollout.set_alias("m", "live", outcome.version, Origin("test"))
            other.backend.refusals = 2
            other.stages.gate.clear()
            (tmp_path / ".cache/models").rename(tmp_path / "elsewhere")
            syncing = asyncio.create_task(other.watcher.poll())
            await wait_for_compilation(other)
            assert readiness.missing_versions() == []
            assert other.scale() == 2.0
            other.stages.gate.set()
            await syncing
            assert readiness.missing_versions() == [MissingVersion("m", 2, "failed")]
            assert other.scale() == 2.0

    run(work())
