"""Changes while a version is compiled and loaded: the sources, the model's state, the version itself."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lathe.server.errors import NotFound, Unavailable, Unprocessable
from lathe.server.repository import builder
from lathe.server.repository.lifecycle import State
from lathe.server.repository.live_models import LiveModel
from lathe.server.repository.reconciler import Reconciler
from lathe.server.repository.store import Origin, Outcome
from tests.server.repository.world import files, run, toy, world


def test_an_upgrade_under_a_running_server_asks_for_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code compiled from other sources cannot be loaded here; it is discarded, and the loaded versions serve on."""

    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            artifacts = files(tmp_path / ".cache" / "models")
            monkeypatch.setattr(builder, "compiler_digest", lambda: "newer")
            for content in (toy(2.0), b"\x08nonsense"):
                with pytest.raises(Unavailable, match="restart the server"):
                    await w.push(content, promote=True)
            assert (w.live(), w.scale(), w.store.versions("m")) == (1, 1.0, [1])
            assert (w.leftovers(), files(tmp_path / ".cache" / "models")) == ([], artifacts)
            assert (await w.push(toy(1.0))).version == 2  # compiled before: it does not need the new sources

    run(scenario())


def test_a_version_deleted_while_it_is_loaded_does_not_return(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            await w.push(toy(2.0))
            await w.rollout.unload("m")
            await w.loader.settle()
            shutil.rmtree(tmp_path / ".cache" / "models")
            w.stages.gate.clear()
            loading = asyncio.create_task(w.rollout.load("m", {}))
            await asyncio.sleep(0.05)
            await w.rollout.delete("m", 2, Origin())
            w.stages.gate.set()
            await loading
            assert [(e.version, e.status.state) for e in w.rollout.index()] == [(1, State.READY)]
            with pytest.raises(NotFound):
                w.registry.resolve("m", "2")

    run(scenario())


@pytest.mark.parametrize("publishing", [False, True])
def test_a_model_unloaded_while_it_is_loaded_stays_unloaded(publishing: bool, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            if not publishing:
                await w.rollout.unload("m")
                await w.loader.settle()
                shutil.rmtree(tmp_path / ".cache" / "models")
            w.stages.gate.clear()
            work = asyncio.create_task(w.push(toy(2.0), promote=True) if publishing else w.rollout.load("m", {}))
            await asyncio.sleep(0.05)
            await w.rollout.unload("m")
            w.stages.gate.set()
            await asyncio.gather(work, return_exceptions=True)
            await w.loader.settle()
            assert w.backend.open_models == 0
            with pytest.raises(Unavailable, match="unloaded"):
                w.registry.resolve("m")
            await w.rollout.load("m", {})
            assert w.scale() == (2.0 if publishing else 1.0)

    run(scenario())


def test_a_sync_loads_nothing_after_an_unload_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync that had begun before the call once loaded every version again, and then unloaded it."""

    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            await w.push(toy(2.0))
            loads = len(w.backend.loads)

            async def unload_meanwhile(_: Reconciler, model: LiveModel) -> list[int]:
                await w.rollout.unload(model.name)
                return []

            monkeypatch.setattr(Reconciler, "_versions_to_adopt", unload_meanwhile)
            await w.rollout.sync("m")
            await w.loader.settle()
            assert len(w.backend.loads) == loads and w.backend.open_models == 0

    run(scenario())


def test_statistics_of_a_deleted_version_are_removed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            await w.push(toy(2.0))
            book = w.book
            assert [page.ref.version for page in book.all()] == [1, 2]
            assert all(page.load_seconds > 0 for page in book.all())
            await w.rollout.delete("m", 2, Origin())
            assert [page.ref.version for page in book.all()] == [1]

    run(scenario())


def test_a_version_seen_by_the_watcher_while_it_is_published_is_published_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the durable write and the change in memory every poll of the disk sees the folder."""

    async def scenario() -> None:
        async with world(tmp_path) as w:
            loop, publish = asyncio.get_running_loop(), w.store.publish

            def slow(*arguments: Any) -> Outcome:
                outcome = publish(*arguments)
                asyncio.run_coroutine_threadsafe(w.loader.ensure(w.model("m"), outcome.version), loop).result(10)
                return outcome

            monkeypatch.setattr(w.store, "publish", slow)
            assert (await w.push(toy(2.0))).version == 1
            assert (w.live(), w.scale(), w.backend.open_models) == (1, 2.0, 1)

    run(scenario())


@pytest.mark.parametrize("seen", [State.FAILED, State.DRAINING, State.UNLOADED])
def test_a_version_seen_and_dropped_by_the_watcher_is_still_published(
    seen: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watcher could not load it a second time (for lack of memory, say), or did not want it and unloaded it."""

    async def scenario() -> None:
        async with world(tmp_path) as w:
            loop, publish = asyncio.get_running_loop(), w.store.publish

            async def look(version: int) -> None:
                model = w.model("m")
                w.backend.refusals = 9 if seen is State.FAILED else 0
                with contextlib.suppress(Unprocessable):
                    await w.loader.ensure(model, version)
                    leaving = w.loader.let_go(model, version)
                    if seen is State.UNLOADED:
                        await leaving
                w.backend.refusals = 0
                assert model.status(version).state is seen

            def slow(*arguments: Any) -> Outcome:
                outcome = publish(*arguments)
                asyncio.run_coroutine_threadsafe(look(outcome.version), loop).result(10)
                return outcome

            monkeypatch.setattr(w.store, "publish", slow)
            assert (await w.push(toy(2.0))).version == 1
            await w.rollout.sync("m")
            assert (w.live(), w.scale(), w.backend.open_models) == (1, 2.0, 1)
            assert [(e.version, e.status.state) for e in w.rollout.index()] == [(1, State.READY)]

    run(scenario())


@pytest.mark.parametrize("which", ["a list of versions", "aliases"])
def test_a_version_published_while_the_watcher_reads_the_disk_stays(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watcher's view of the disk is older than the version."""

    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            await w.loader.settle()
            loop, meanwhile = asyncio.get_running_loop(), list[Future[Any]]()

            def run_beside(work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
                if not meanwhile:
                    meanwhile.append(asyncio.run_coroutine_threadsafe(work(), loop))
                    wait(meanwhile, timeout=0.5)

            def versions_then_publish(name: str, plain: Any = w.store.versions) -> list[int]:
                found: list[int] = plain(name)
                run_beside(lambda: w.push(toy(2.0), promote=True))
                return found

            def sync_then_rename(source: Path, target: Path, plain: Any = w.store._fs.rename) -> None:
                if target.name == "aliases.json":
                    run_beside(lambda: w.rollout.sync("m", lambda *_: False))
                plain(source, target)

            let_go = Mock(wraps=w.loader.let_go)
            monkeypatch.setattr(w.loader, "let_go", let_go)
            if which == "aliases":
                monkeypatch.setattr(w.store._fs, "rename", sync_then_rename)
                await w.push(toy(2.0))
            else:
                monkeypatch.setattr(w.store, "versions", versions_then_publish)
                await w.rollout.sync("m")
            await asyncio.wrap_future(meanwhile[0])
            await w.loader.settle()
            assert (w.live(), let_go.call_count) == (1 if which == "aliases" else 2, 0)
            assert [(e.version, e.status.state) for e in w.rollout.index()] == [(1, State.READY), (2, State.READY)]

    run(scenario())


@pytest.mark.parametrize("is_good", [True, False])
def test_no_older_version_answers_while_the_aliased_one_is_loading(tmp_path: Path, is_good: bool) -> None:
    """The alias was moved and acknowledged before a restart, so no answer may come from an older version.

    That holds even if the older one is loaded first. It answers only if the alias's version cannot be loaded."""

    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            artifacts = tmp_path / ".cache" / "models"
            kept = set(artifacts.iterdir())
            await w.push(toy(2.0), promote=True)
            await w.rollout.unload("m")
            await w.loader.settle()
            for artifact in set(artifacts.iterdir()) - kept:
                shutil.rmtree(artifact)
            w.stages.gate.clear()
            compilations = w.stages.runs.count("compile")
            loading = asyncio.create_task(w.rollout.load("m", {}))
            while w.stages.runs.count("compile") == compilations:  # noqa: ASYNC110 - the stages run in this loop
                await asyncio.sleep(0.001)
            await w.rollout.set_alias("m", "blue", 1, Origin("test"))
            assert w.scale("blue") == 1.0
            with pytest.raises(Unavailable, match="version 2 is compiling"):
                w.scale()
            w.backend.refusals = 0 if is_good else 1
            w.stages.gate.set()
            await loading
            assert w.scale() == (2.0 if is_good else 1.0)

    run(scenario())


@pytest.mark.parametrize("seen_at", [1, 3])
def test_a_list_leaves_out_versions_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen_at: int
) -> None:
    """Such a list was once refused as a whole (404), or contained the version without its digest."""

    async def scenario() -> None:
        async with world(tmp_path) as w:
            for scale in (1.0, 2.0, 3.0):
                await w.push(toy(scale))
            loop, gone = asyncio.get_running_loop(), threading.Event()
            delete, manifest = w.store.delete, w.rollout.catalog._disk.manifest
            deleting: list[Future[Outcome]] = []

            def delete_slowly(*arguments: Any) -> Outcome:
                outcome = delete(*arguments)
                gone.set()  # not yet visible anywhere
                time.sleep(0.1)
                return outcome

            def look(model: Any, version: int) -> Any:
                if version == seen_at:
                    deleting.append(asyncio.run_coroutine_threadsafe(w.rollout.delete("m", 3, Origin()), loop))
                    assert gone.wait(20)
                    if version == 1:
                        deleting[0].result(20)  # the list reads version 3 later
                return manifest(model, version)

            monkeypatch.setattr(w.store, "delete", delete_slowly)
            monkeypatch.setattr(w.rollout.catalog._disk, "manifest", look)
            listed = await w.rollout.catalog.versions("m")
            assert [(info.version, info.manifest is not None) for info in listed] == [(1, True), (2, True)]
            assert (await asyncio.wrap_future(deleting[0])).version == 3

    run(scenario())
