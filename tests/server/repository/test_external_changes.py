"""External changes to the repository: copied folders, other servers, faults, a read-only mount."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lathe.server.canary.plan import CanaryPlan
from lathe.server.errors import ServerError, Unavailable
from lathe.server.repository.aliases import DamagedDocument
from lathe.server.repository.fs import Fs
from lathe.server.repository.journal import Journal
from lathe.server.repository.lifecycle import State, Status
from lathe.server.repository.store import Origin, Outcome
from tests.server.repository.fake_fs import CountingFs, FailingFs, ReadOnlyFs
from tests.server.repository.world import World, copy_by_hand, run, toy, world

NOBODY = Origin()


async def until(condition: Callable[[], bool], w: World) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        await w.watcher.poll()
        await asyncio.sleep(0.01)


def test_folders_copied_before_the_start_are_adopted_and_the_highest_is_live(tmp_path: Path) -> None:
    async def scenario() -> None:
        copy_by_hand(tmp_path, 1, toy(1.0))
        copy_by_hand(tmp_path, 7, toy(7.0))
        async with world(tmp_path) as w:
            assert (w.live(), w.rollout.catalog.model("m").versions) == (7, (1, 7))
            manifest = w.store.manifest("m", 7)
            assert manifest is not None
            assert manifest.signature is not None
            assert (await w.push(toy(8.0))).version == 8

    run(scenario())


def test_a_folder_copied_while_serving_is_adopted_when_it_stops_changing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, settle=0.3) as w:
            await w.push(toy(1.0))
            folder = copy_by_hand(tmp_path, 2, toy(2.0)[:-1])  # the copy is not complete
            for _ in range(3):
                await w.watcher.poll()
            assert w.store.manifest("m", 2) is None
            (folder / "model.onnx").write_bytes(toy(2.0))
            await until(lambda: w.store.manifest("m", 2) is not None, w)
            assert (w.live(), w.scale("2")) == (1, 2.0)

    run(scenario())


def test_a_load_call_adopts_a_folder_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, settle=60.0) as w:
            copy_by_hand(tmp_path, 3, toy(3.0))
            await w.rollout.load("m", {})
            assert w.live() == 3

    run(scenario())


def test_a_folder_that_does_not_parse_is_reported_and_retried_on_change(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            folder = copy_by_hand(tmp_path, 2, b"\x08nonsense")
            await until(lambda: w.rollout.index()[-1].status.state is State.FAILED, w)
            assert "no operator 'Bad'" in w.rollout.index()[-1].status.reason
            stages = len(w.stages.runs)
            await w.watcher.poll()
            assert len(w.stages.runs) == stages, "nothing changed, so nothing is tried"
            (folder / "model.onnx").write_bytes(toy(2.0))
            await until(lambda: w.store.manifest("m", 2) is not None, w)
            assert w.live() == 1

    run(scenario())


def test_a_version_with_links_or_folders_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        outside = tmp_path / "outside"
        outside.write_bytes(toy(1.0))
        repo = tmp_path / "repo"
        (repo / "linked" / "1").mkdir(parents=True)
        (repo / "linked" / "1" / "model.onnx").symlink_to(outside)
        (repo / "m").mkdir()
        copy_by_hand(tmp_path, 5, toy(5.0), "elsewhere")
        (repo / "m" / "5").symlink_to(tmp_path / "elsewhere" / "5")
        copy_by_hand(repo, 1, toy(1.0), "nested")
        (repo / "nested" / "1" / "folder").mkdir()
        async with world(repo) as w:
            assert [(e.name, e.status.state) for e in w.rollout.index()] == [
                ("linked", State.FAILED),
                ("nested", State.FAILED),
            ]
            assert all("plain files" in entry.status.reason for entry in w.rollout.index())

    run(scenario())


def test_two_servers_on_one_repository_see_each_others_changes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as one, world(tmp_path) as two:
            await one.push(toy(1.0))
            await until(lambda: two.registry.find("m") is not None and two.live() == 1, two)
            await two.push(toy(2.0), promote=True)
            await until(lambda: one.live() == 2, one)
            await one.rollout.rollback("m", "live", None, NOBODY)
            await until(lambda: two.live() == 1, two)
            await two.rollout.delete("m", 2, NOBODY)
            await until(lambda: one.rollout.catalog.model("m").versions == (1,), one)

    run(scenario())


def test_a_rollback_takes_changes_of_other_servers_into_account(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as one, world(tmp_path) as two:
            for scale in (1.0, 2.0, 3.0):
                await one.push(toy(scale), promote=True)
            await two.watcher.poll()
            await one.rollout.rollback("m", "live", None, NOBODY)
            await two.rollout.rollback("m", "live", None, NOBODY)  # it still showed version 3
            assert two.live() == 1

    run(scenario())


def test_a_model_folder_removed_by_hand_is_no_longer_served(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            shutil.rmtree(tmp_path / "m")
            await w.watcher.poll()
            assert (w.rollout.index(), w.registry.find("m")) == ([], None)
            assert (await w.push(toy(2.0))).version == 2, "numbers are never used again"

    run(scenario())


@pytest.mark.parametrize("position", [0, 5, -1])
def test_a_flipped_byte_is_found_before_loading_and_the_old_version_serves(position: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            await w.push(toy(2.0))
            await w.rollout.unload("m")
            flip(tmp_path / "m" / "2" / "model.onnx", position)
            await w.rollout.load("m", {})
            assert w.rollout.index()[1].status.state is State.FAILED
            with pytest.raises(ServerError, match=r"'model\.onnx' has sha256"):
                await w.rollout.set_alias("m", "live", 2, NOBODY)
            assert w.live() == 1

    run(scenario())


def test_if_the_live_version_is_damaged_at_the_start_the_last_good_one_serves(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            await w.push(toy(2.0), promote=True)
        flip(tmp_path / "m" / "2" / "model.onnx", 3)
        async with world(tmp_path) as w:
            assert w.live() == 1
            info = w.rollout.catalog.model("m")
            assert (info.aliases.version("live"), info.answering["live"]) == (2, 1)

    run(scenario())


def test_a_damaged_compiled_model_is_found_and_compiled_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(2.0))
            await w.rollout.unload("m")
            await w.loader.settle()
            artifact = w.backend.loads[0]
            for name in ("toy.json", "digests.json"):
                for position in range(0, (artifact / name).stat().st_size, 7):
                    flip(artifact / name, position)
                    assert w.cache.find(artifact.name) is None
                    await w.rollout.load("m", {})
                    await w.rollout.unload("m")
                    await w.loader.settle()
            (artifact / "extra.so").write_bytes(b"code")
            assert w.cache.find(artifact.name) is None

    run(scenario())


def test_an_artifact_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(2.0))
            artifact = w.backend.loads[0]
            (artifact / "toy.json").chmod(0o666)
            assert w.cache.find(artifact.name) is None

    run(scenario())


def test_an_artifact_that_cannot_be_loaded_is_compiled_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(2.0))
            await w.rollout.unload("m")
            w.backend.refusals, before = 1, len(w.stages.runs)
            await w.rollout.load("m", {})
            assert (w.live(), w.stages.runs[before:]) == (1, ["parse", "compile"])

    run(scenario())


def test_the_cache_keeps_artifacts_in_use(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            for scale in (1.0, 2.0, 3.0):
                await w.push(toy(scale), promote=True)
            await w.loader.settle()
            w.cache._max_bytes = 0
            w.cache.collect(w.loader.artifacts_in_use)
            kept = set((tmp_path / ".cache" / "models").iterdir())
            assert kept == w.loader.artifacts_in_use
            assert len(kept) == 2

    run(scenario())


def test_a_read_only_repository_is_served(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            await w.push(toy(2.0), promote=True)
        copy_by_hand(tmp_path, 4, toy(4.0), "fresh")
        async with world(tmp_path, ReadOnlyFs()) as w:
            assert (w.live(), w.live("fresh")) == (2, 4)
            for refused in (
                w.push(toy(3.0)),
                w.rollout.rollback("m", "live", None, NOBODY),
                w.rollout.delete("m", 1, NOBODY),
            ):
                with pytest.raises(Unavailable, match="Read-only file system"):
                    await refused
            await w.watcher.poll()
            await w.rollout.load("fresh", {})
            assert (w.live(), w.live("fresh")) == (2, 4)

    run(scenario())


def steps_of_a_publish(root: Path) -> int:
    """The number of changes to the disk that one publication makes."""

    async def scenario() -> int:
        fs = CountingFs()
        async with world(root, fs) as w:
            await w.push(toy(1.0))
            before = fs.step
            await w.push(toy(2.0), promote=True)
            return fs.step - before

    return run(scenario())


def is_answered_correctly(answer: object, status: int) -> bool:
    """Whether an upload that meets a failure was answered correctly; a failure to clean up is no failure."""
    if isinstance(answer, ServerError):
        return answer.http_status == status and "/" not in answer.message.replace("Input/output", "")
    return isinstance(answer, Outcome) and answer.version == 2


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("number", "status"), [(errno.ENOSPC, 507), (errno.EFBIG, 507), (errno.EDQUOT, 507), (errno.EIO, 503)]
)
def test_a_failing_disk_refuses_the_upload_and_the_server_continues(number: int, status: int, tmp_path: Path) -> None:
    async def scenario(step: int) -> None:
        fs = FailingFs(0, number)
        async with world(tmp_path / str(step), fs) as w:
            await w.push(toy(1.0))
            fs.at = fs.step + step
            answer = await asyncio.gather(w.push(toy(2.0), promote=True), return_exceptions=True)
            fs.at = None
            assert is_answered_correctly(answer[0], status)
            assert w.scale() == float(w.live())
            third = await w.push(toy(3.0), promote=True)
            assert third.version in (2, 3)
            assert w.live() == third.version
            log = [record.version for record in w.store.audit("m") if record.action == "publish"]
            assert len(log) == len(set(log)), "a number was given twice"
        assert w.leftovers() == []

    for step in range(1, steps_of_a_publish(tmp_path / "count") + 1):
        run(scenario(step))


def test_damaged_aliases_are_not_overwritten(tmp_path: Path) -> None:
    async def scenario() -> None:
        copy_by_hand(tmp_path, 1, toy(1.0))
        (tmp_path / "m" / "aliases.json").write_text('{"schema": 1, "aliases": ')
        copy_by_hand(tmp_path, 1, toy(1.0), "good")
        async with world(tmp_path) as w:
            assert w.live("good") == 1
            with pytest.raises(Unavailable):
                w.registry.resolve("m")
            assert (tmp_path / "m" / "aliases.json").read_text().endswith('"aliases": ')

    run(scenario())


def test_changes_of_a_model_with_damaged_records_are_refused(tmp_path: Path) -> None:
    """Each call names the damage; none is an unexpected error, and none overwrites the file."""

    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            await w.push(toy(2.0))
            (tmp_path / "m" / "aliases.json").write_text("?")
            (tmp_path / ".lathe" / "log" / "m.log").unlink()
            calls = [
                lambda: w.rollout.set_alias("m", "live", 2, NOBODY),
                lambda: w.rollout.set_alias("m", "blue", 2, NOBODY),
                lambda: w.rollout.delete("m", 2, NOBODY),
                lambda: w.rollout.trials.start("m", CanaryPlan(2, 0.1), NOBODY),
                lambda: w.push(toy(3.0)),
            ]
            for call in calls:
                with pytest.raises(Unavailable, match=r"^writing: aliases\.json of model 'm': not JSON"):
                    await call()
            assert w.live() == 1
            assert (tmp_path / "m" / "aliases.json").read_text() == "?"

    run(scenario())


def test_a_log_that_changes_while_it_is_read_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            monkeypatch.setattr(Journal, "snapshot", lambda self: _raise(DamagedDocument("journal: m.log changed")))
            with pytest.raises(Unavailable, match=r"^reading the log: journal: m\.log changed"):
                await w.rollout.catalog.audit("m")

    run(scenario())


def _raise(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize("content", [b"?", b"{}", None], ids=["no JSON", "no manifest", "a folder"])
def test_a_version_whose_manifest_is_damaged_answers_on(tmp_path: Path, content: bytes | None) -> None:
    """The other versions are adopted all the same, and a restored manifest is read."""

    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            before, path = w.registry.resolve("m"), tmp_path / "m" / "1" / "manifest.json"
            good = path.read_bytes()
            path.unlink()
            if content is None:
                path.mkdir()
            else:
                path.write_bytes(content)
            copy_by_hand(tmp_path, 2, toy(2.0))
            await w.watcher.poll()
            assert w.registry.resolve("m") is before
            assert w.store.state("m").high_water == 2
            (await asyncio.to_thread(path.rmdir)) if content is None else path.unlink()
            path.write_bytes(good)
            await w.watcher.poll()
            assert (w.registry.resolve("m"), w.model("m").failures) == (before, {})
            assert w.model("m").unadopted == set()

    run(scenario())


def test_a_copied_version_that_cannot_be_recorded_is_tried_again(tmp_path: Path) -> None:
    """It loads, but the disk is full when it is adopted: the other versions and models are synced all the same."""
    failing, fs = threading.Event(), Fs()

    class Full(Fs):
        def append(self, path: Path) -> int:
            if failing.is_set():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return fs.append(path)

    async def scenario() -> None:
        async with world(tmp_path, Full()) as w:
            await w.push(toy(1.0))
            failing.set()
            for version in (2, 3):
                copy_by_hand(tmp_path, version, toy(float(version)))
            await w.watcher.poll()
            await w.loader.settle()
            states = {entry.version: entry.status for entry in w.rollout.index()}
            assert {version: status.state for version, status in states.items()} == {
                1: State.READY, 2: State.FAILED, 3: State.FAILED,
            }  # fmt: skip
            assert "storage is full" in states[2].reason
            failing.clear()
            w.watcher._last_retry = -1e9
            await w.watcher.poll()
            assert w.store.state("m").high_water == 3
            await w.rollout.set_alias("m", "live", 3, NOBODY)
            assert w.scale() == 3.0

    run(scenario())


def test_file_names_in_a_manifest_are_validated_when_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
        document = json.loads((tmp_path / "m" / "1" / "manifest.json").read_text())
        document["files"]["../../secret"] = document["files"]["model.onnx"]
        (tmp_path / "m" / "1" / "manifest.json").write_text(json.dumps(document))
        async with world(tmp_path) as w:
            (entry,) = w.rollout.index()
            assert entry.status.state is State.FAILED
            assert "file name '../../secret' is not allowed" in entry.status.reason

    run(scenario())


def flip(file: Path, position: int) -> None:
    """Change one byte."""
    content = bytearray(file.read_bytes())
    content[position] ^= 0x10
    file.write_bytes(content)


def test_all_models_of_a_lost_device_are_closed_before_they_are_reloaded(tmp_path: Path) -> None:
    """The backend reopens a device only when no model holds anything of it."""

    async def scenario() -> None:
        async with world(tmp_path) as w:
            for name in ("a", "b", "other"):
                await w.push(toy(3.0), name)
            before = {name: w.registry.resolve(name) for name in ("a", "b", "other")}
            for name in ("a", "b"):
                before[name].model.devices, before[name].model.lost = ("cuda:0",), "cuda:0 was lost"  # type: ignore[attr-defined]
            w.backend.open_lost = 2
            loads = len(w.backend.loads)
            await w.watcher.poll()
            after = {name: w.registry.resolve(name) for name in before}
            assert [name for name in before if before[name] is not after[name]] == ["a", "b"]
            assert len(w.backend.loads) == loads + 2 and w.backend.open_models == 3
            assert {entry.status.state for entry in w.rollout.index()} == {State.READY}
            await w.watcher.poll()
            assert len(w.backend.loads) == loads + 2

    run(scenario())


def test_a_device_that_stays_lost_is_reported_and_retried(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(3.0))
            model = w.registry.resolve("m").model
            model.devices, model.lost = ("cuda:0",), "cuda:0 was lost"  # type: ignore[attr-defined]
            w.backend.open_lost = 2  # another user of the device still holds something of it
            await w.watcher.poll()
            (entry,) = w.rollout.index()
            assert entry.status == Status(State.FAILED, "models that ran on the device are not closed")
            w.backend.open_lost = 0
            assert w.rollout.clear_transient_failures() == ["m"]
            await w.rollout.sync("m")
            assert w.scale() == 3.0

    run(scenario())
