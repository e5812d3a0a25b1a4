"""Versions are published, go live, are rolled back and are deleted."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path

import pytest

from lathe.server.errors import BadRequest, Conflict, NotFound, TooLarge, Unavailable, Unprocessable, UnsupportedMedia
from lathe.server.pipelines.definition import Definition
from lathe.server.repository.aliases import Aliases
from lathe.server.repository.lifecycle import State
from lathe.server.repository.rollout import Baseline, LiveVersionChanged
from lathe.server.repository.store import Origin
from lathe.server.types import ModelRef
from tests.server.repository.world import World, files, run, toy, world

NOBODY = Origin()


async def push_three_versions(w: World) -> None:
    """Versions 1, 2, 3, each live in turn."""
    for scale in (1.0, 2.0, 3.0):
        await w.push(toy(scale), promote=True)


def test_the_first_version_goes_live_and_later_ones_only_on_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            assert (await w.push(toy(1.0))).version == 1
            assert (await w.push(toy(2.0))).version == 2
            assert (w.live(), w.scale(), w.scale("2")) == (1, 1.0, 2.0)
            assert (await w.push(toy(3.0), promote=True)).version == 3
            assert (w.live(), w.scale()) == (3, 3.0)

    run(scenario())


def test_rollback_follows_the_history_or_goes_to_a_given_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await push_three_versions(w)
            walk = []
            for to in (None, None, 3, 1):
                await w.rollout.rollback("m", "live", to, NOBODY)
                walk.append(w.live())
            assert walk == [2, 1, 3, 1]
            with pytest.raises(Conflict, match="first of the history"):
                await w.rollout.rollback("m", "live", None, NOBODY)
            with pytest.raises(Conflict, match="not in the history"):
                await w.rollout.rollback("m", "live", 9, NOBODY)
            assert w.live() == 1

    run(scenario())


def test_a_rollback_loads_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await push_three_versions(w)
            await w.loader.settle()
            loads = len(w.backend.loads)
            await w.rollout.rollback("m", "live", None, NOBODY)
            assert len(w.backend.loads) == loads

    run(scenario())


def test_a_move_after_a_rollback_drops_the_newer_history(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await push_three_versions(w)
            await w.rollout.rollback("m", "live", 1, NOBODY)
            await w.rollout.set_alias("m", "live", 3, NOBODY)
            await w.rollout.rollback("m", "live", None, NOBODY)
            assert w.live() == 1

    run(scenario())


def test_only_aliases_their_previous_and_the_newest_versions_stay_loaded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await push_three_versions(w)
            await w.push(toy(4.0))
            await w.rollout.set_alias("m", "canary", 1, NOBODY)
            await w.rollout.set_alias("m", "canary", 4, NOBODY)
            await w.loader.settle()
            assert {servable.ref.version for servable in w.registry.servables()} == {1, 2, 3, 4}
            await w.rollout.set_alias("m", "canary", 3, NOBODY)
            await w.loader.settle()
            assert {servable.ref.version for servable in w.registry.servables()} == {2, 3, 4}
            assert w.rollout.catalog.index()[0].status.state is State.UNLOADED
            with pytest.raises(Unavailable, match="version 1 is unloaded"):
                w.registry.resolve("m", "1")

    run(scenario())


def test_a_change_of_inputs_or_outputs_needs_permission(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            with pytest.raises(Conflict, match=r"FP32\[-1, 4\].*became.*FP32\[-1, 5\].*allow_signature_change"):
                await w.push(toy(2.0, (-1, 5)), promote=True)
            assert w.rollout.catalog.model("m").versions == (1,)
            assert (await w.push(toy(2.0, (-1, 5)))).version == 2
            with pytest.raises(Conflict, match="allow_signature_change"):
                await w.rollout.set_alias("m", "live", 2, NOBODY)
            await w.rollout.set_alias("m", "live", 2, NOBODY, allow_signature_change=True)
            assert w.live() == 2
            assert w.leftovers() == []

    run(scenario())


def test_a_bad_model_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            with pytest.raises(Unprocessable, match="no operator 'Bad'"):
                await w.push(b"\x08nonsense", promote=True)
            with pytest.raises(Unprocessable, match="does not load"):
                await w.push(toy(2.0, do="refuse to load"), promote=True)
            assert w.live() == 1
            assert (w.store.versions("m"), w.leftovers()) == ([1], [])
            with pytest.raises(Unprocessable):
                await w.push(b"\x08nonsense", "other")
            assert [model.name for model in w.rollout.catalog.models()] == ["m"]

    run(scenario())


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", BadRequest, "empty"),
        (b"PK\x03\x04rest", UnsupportedMedia, "zip archive"),
        (b"\x1f\x8b\x08rest", UnsupportedMedia, "gzip"),
        (b"\x80\x04\x95rest", UnsupportedMedia, "pickle"),
        (b"--boundary\r\n", UnsupportedMedia, "multipart"),
        (b"\x08" * 2001, TooLarge, "larger than 2000 bytes"),
    ],
)
def test_a_file_that_is_no_model_is_refused(
    content: bytes, error: type[Exception], message: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with world(tmp_path, max_upload=2000) as w:
            with pytest.raises(error, match=message):
                await w.push(content)
            assert (w.rollout.catalog.models(), w.leftovers()) == ([], [])

    run(scenario())


def test_a_wrong_digest_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            with pytest.raises(BadRequest, match="Content-Digest says"):
                await w.push(toy(), sha256="0" * 64)
            assert w.leftovers() == []

    run(scenario())


def test_a_repeated_upload_with_its_key_makes_no_second_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            first = await w.push(toy(1.0), key="abc")
            again = await w.push(toy(1.0), key="abc")
            assert (first.version, again.version, again.replayed) == (1, 1, True)
            with pytest.raises(Unprocessable, match="another request"):
                await w.push(toy(2.0), key="abc")
            await w.push(toy(2.0), promote=True)
            for _ in range(2):
                await w.rollout.rollback("m", "live", None, Origin("", "back"))
            assert (w.live(), w.store.versions("m")) == (1, [1, 2])

    run(scenario())


def test_idempotency_keys_are_separate_for_each_caller(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            made = [
                (await w.push_as(origin, toy(scale))).version
                for scale, origin in enumerate(
                    (
                        Origin("ann", "abc", space="key:1"),
                        Origin("ann", "abc", space="key:2"),
                        Origin("", "abc"),
                        Origin("ann", "abc", space="job"),
                    ),
                    1,
                )
            ]
            assert made == [1, 2, 3, 4]
            again = await w.push_as(Origin("ann", "abc", space="key:2"), toy(2))
            assert (again.version, again.replayed) == (2, True)
            with pytest.raises(Unprocessable, match="'abc' was used before"):
                await w.push_as(Origin("ann", "abc", space="key:2"), toy(9))

    run(scenario())


def test_idempotency_keys_of_old_entries_belong_to_callers_of_that_name(tmp_path: Path) -> None:
    """Earlier releases wrote keys without the caller's identity; keys of jobs began with `job-`."""

    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push_as(Origin("ann", "abc"), toy(1))
            await w.push_as(Origin("ann", "job-12"), toy(2))
            for origin, scale, version in (
                (Origin("ann", "abc", space="key:1"), 1, 1),
                (Origin("ann", "12", space="job"), 2, 2),
                (Origin("bob", "abc", space="key:2"), 1, 3),
                (Origin("ann", "abc", space="key:3"), 9, 4),  # another request: as if there were no entry
                (Origin("ann", "job-12", space="job"), 2, 5),
            ):
                assert (await w.push_as(origin, toy(scale))).version == version, origin

    run(scenario())


def test_two_concurrent_uploads_with_one_key_make_one_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            outcomes = await asyncio.gather(*(w.push(toy(1.0), key="abc") for _ in range(4)))
            assert [outcome.version for outcome in outcomes] == [1, 1, 1, 1]
            assert sum(outcome.replayed for outcome in outcomes) == 3

    run(scenario())


def test_a_running_compilation_does_not_delay_a_rollback(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await push_three_versions(w)
            w.stages.gate.clear()
            slow = asyncio.create_task(w.push(toy(4.0), promote=True))
            await asyncio.sleep(0.05)
            await asyncio.wait_for(w.rollout.rollback("m", "live", None, NOBODY), 5)
            assert w.live() == 2
            w.stages.gate.set()
            await slow
            assert w.live() == 4

    run(scenario())


def test_an_upload_cancelled_halfway_leaves_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.stages.gate.clear()
            upload = asyncio.create_task(w.push(toy(1.0)))
            await asyncio.sleep(0.05)
            upload.cancel()
            w.stages.gate.set()
            await w.loader.settle()
            assert (w.live(), w.leftovers()) == (1, [])

    run(scenario())


def test_a_version_with_an_alias_is_not_deleted_and_numbers_are_never_reused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await push_three_versions(w)
            with pytest.raises(Conflict, match="'live' names"):
                await w.rollout.delete("m", 3, NOBODY)
            await w.rollout.delete("m", 2, NOBODY)
            with pytest.raises(NotFound):
                await w.rollout.delete("m", 2, NOBODY)
            with pytest.raises(NotFound, match="'2'"):
                w.registry.resolve("m", "2")
            await w.rollout.rollback("m", "live", None, NOBODY)
            assert w.live() == 1
            await w.rollout.delete("m", 3, NOBODY)
            assert (await w.push(toy(4.0))).version == 4
            assert w.leftovers() == []

    run(scenario())


async def four_of_which_one_has_to_compile(w: World) -> None:
    """Versions 1 (live) to 4; only version 4 is in the cache."""
    for scale in (1.0, 2.0, 3.0):
        await w.push(toy(scale))
    shutil.rmtree(w.root / ".cache" / "models")
    await w.push(toy(4.0))
    await w.loader.settle()


async def until_loading(w: World, version: int) -> None:
    while version not in w.model("m").loading:  # noqa: ASYNC110 - nothing there would set an event
        await asyncio.sleep(0.001)


def test_retention_keeps_a_version_that_is_being_promoted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, keep_versions=3) as w:
            await four_of_which_one_has_to_compile(w)
            w.stages.gate.clear()
            promotion = asyncio.create_task(w.rollout.set_alias("m", "live", 2, NOBODY))
            await until_loading(w, 2)
            await w.push(toy(4.0))  # compiled before
            await w.rollout._housekeeping.tidy(w.model("m"))
            w.stages.gate.set()
            assert (await promotion).version == 2
            await w.loader.settle()
            assert (w.live(), w.store.versions("m")) == (2, [1, 2, 3, 4, 5])

    run(scenario())


def test_retention_checks_again_before_it_deletes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, keep_versions=3) as w:
            await four_of_which_one_has_to_compile(w)
            found, begun, go_on = w.store.pipelines, threading.Event(), threading.Event()

            def pipelines() -> dict[ModelRef, Definition]:
                begun.set()
                go_on.wait(10.0)
                return found()

            w.store.pipelines = pipelines  # type: ignore[method-assign]
            w.stages.gate.clear()
            await w.push(toy(4.0))
            assert await asyncio.to_thread(begun.wait, 10.0)  # version 2 is one too many
            promotion = asyncio.create_task(w.rollout.set_alias("m", "live", 2, NOBODY))
            await until_loading(w, 2)
            go_on.set()
            await asyncio.sleep(0.1)
            w.stages.gate.set()
            assert (await promotion).version == 2
            await w.loader.settle()
            assert (w.live(), 2 in w.store.versions("m")) == (2, True)

    run(scenario())


def test_retention_deletes_the_oldest_versions_that_are_not_needed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, keep_versions=2) as w:
            await push_three_versions(w)
            await w.rollout.set_alias("m", "pinned", 1, NOBODY)
            for scale in (4.0, 5.0, 6.0, 7.0):
                await w.push(toy(scale))
            await w.loader.settle()
            assert w.store.versions("m") == [1, 2, 3, 6, 7]
            assert [r.version for r in await w.rollout.catalog.audit("m") if r.action == "delete"] == [4, 5]

    run(scenario())


def test_unload_and_load(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await push_three_versions(w)
            await w.rollout.unload("m")
            await w.loader.settle()
            assert w.backend.open_models == 0
            with pytest.raises(Unavailable, match="unloaded"):
                w.registry.resolve("m")
            with pytest.raises(Conflict, match="load it first"):
                await w.push(toy(4.0))
            await w.rollout.load("m", {})
            assert w.live() == 3
            for missing in (w.rollout.load("none", {}), w.rollout.unload("none")):
                with pytest.raises(NotFound, match="none"):
                    await missing

    run(scenario())


@pytest.mark.parametrize("parameter", ["file:1/model.onnx", "file:../../x", "config"])
def test_parameters_of_a_load_call_are_refused(parameter: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            before = files(tmp_path)
            with pytest.raises(Exception, match="not supported") as raised:
                await w.rollout.load("m", {parameter: "aGVsbG8="})
            assert getattr(raised.value, "http_status", None) == 501
            assert files(tmp_path) == before

    run(scenario())


def test_a_restart_finds_everything_and_compiles_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await push_three_versions(w)
            await w.rollout.rollback("m", "live", None, NOBODY)
        async with world(tmp_path) as w:
            assert (w.live(), w.scale(), w.stages.runs) == (2, 2.0, [])
            await w.rollout.rollback("m", "live", None, NOBODY)
            assert w.live() == 1

    run(scenario())


def test_the_audit_log_records_actions_and_actors(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await push_three_versions(w)
            await w.rollout.rollback("m", "live", None, Origin("alice"))
            records = await w.rollout.catalog.audit("m")
            assert [(r.action, r.version, r.actor) for r in records] == [
                ("publish", 1, "test"),
                ("publish", 2, "test"),
                ("publish", 3, "test"),
                ("rollback", 2, "alice"),
            ]

    run(scenario())


def test_a_history_keeps_its_position_when_a_version_is_deleted() -> None:
    state = Aliases()
    for version in (1, 2, 1, 3):
        state = state.moved("live", version)

    alias = state.without_version(2).get("live")

    assert (alias.history, alias.version, alias.previous) == ((1, 3), 3, 1)


def test_a_withheld_version_gets_no_alias_even_if_it_is_the_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            outcome = await w.push(toy(1.0), without_alias=True, reason="accuracy is 0.5")
            assert (outcome.version, outcome.record.state.aliases) == (1, {})
            (record,) = await w.rollout.catalog.audit("m")
            assert (record.action, record.reason) == ("publish", "accuracy is 0.5")
        async with world(tmp_path) as w:
            assert not w.rollout.catalog.model("m").ready
            assert (await w.push(toy(2.0))).version == 2
            assert w.live() == 2

    run(scenario())


def test_a_version_compared_with_one_that_is_no_longer_live_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0), compared=Baseline(None))
            await w.push(toy(2.0), promote=True, compared=Baseline(1), key="k")
            with pytest.raises(LiveVersionChanged, match="version 2 has gone live meanwhile"):
                await w.push(toy(3.0), promote=True, compared=Baseline(1))
            assert (w.live(), w.store.versions("m"), w.leftovers()) == (2, [1, 2], [])
            assert (await w.push(toy(2.0), promote=True, compared=Baseline(1), key="k")).replayed

    run(scenario())
