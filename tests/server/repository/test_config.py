"""`config.toml`: changes apply without a restart; an invalid file is reported and changes nothing."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from lathe.server.api.v2.model_info import configuration
from lathe.server.batching.policy import BatchPolicy
from lathe.server.errors import Unavailable
from lathe.server.repository.model_config import BadConfig, read_config
from tests.server.repository.world import World, copy_by_hand, run, toy, world

WHOLE = """
max_batch_size = 4
latency_target_ms = 50

[dynamic_batching]
preferred_batch_size = [4, 2]
max_queue_delay_microseconds = 500
priority_levels = 3
default_priority_level = 2
starvation_ms = 200.0

[response_cache]
max_bytes = 1_000

[queue]
max_queue_size = 7
max_queue_bytes = 100_000
"""


def policy(w: World, version: str = "") -> BatchPolicy:
    return w.registry.resolve("m", version).batcher.policy


async def write(w: World, content: str) -> None:
    (w.root / "m" / "config.toml").write_text(content)
    await w.watcher.poll()


def test_a_configuration_applies_to_all_versions_until_its_file_is_removed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            assert policy(w) == BatchPolicy()
            await write(w, WHOLE)
            await w.push(toy(2.0))
            expected = BatchPolicy(4, (2, 4), 0.0005, 0.05, 3, 2, 0.2)
            assert policy(w) == policy(w, "2") == expected
            admission = w.registry.resolve("m").batcher.admission
            assert (admission.max_items, admission.max_bytes) == (7, 100_000)
            lookup = w.registry.resolve("m").lookup
            assert lookup is not None
            assert lookup.cache.max_bytes == 1_000
            (w.root / "m" / "config.toml").unlink()
            await w.watcher.poll()
            assert policy(w) == BatchPolicy()
            assert admission.max_items == 2048
            assert w.registry.resolve("m").lookup is None

        async with world(tmp_path) as w:
            await write(w, "max_batch_size = 2")
            assert policy(w).max_rows == 2

    run(scenario())


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("max_batch_size = -1", "max_batch_size: expected at least 0"),
        ("max_batch_size = '4'", "max_batch_size: expected a whole number"),
        ("max_batchsize = 4", "max_batchsize: there is no such key, did you mean `max_batch_size`?"),
        ("[dynamic_batching]\nmax_queue_delay_microseconds = -1", "dynamic_batching.max_queue_delay_microseconds"),
        ("[dynamic_batching]\npreferred_batch_size = [4]", "expected max_queue_delay_microseconds above 0"),
        (
            "[dynamic_batching]\npriority_levels = 2\ndefault_priority_level = 3",
            "dynamic_batching.default_priority_level: expected a level from 1 to priority_levels, 2, got 3",
        ),
        (
            "[dynamic_batching]\npriority_levels = 2",
            "dynamic_batching.default_priority_level: expected a level from 1 to priority_levels, 2, got 0",
        ),
        (
            "[dynamic_batching]\ndefault_priority_level = 1",
            "dynamic_batching.default_priority_level: expected 0 because priority_levels is 0, got 1",
        ),
        ("max_batch_size = ", "not TOML"),
        ("# " + "x" * 70_000, "at most 65536 bytes"),
        ("[label_filename]\ny = 'none.txt'", "label_filename.y: file 'none.txt': No such file or directory"),
        ("[label_filename]\ny = '../secret'", "label_filename.y: expected text that matches"),
        ("[label_filename]\ny = '1'", "label_filename.y: file '1': Is a directory"),
    ],
)
def test_an_invalid_configuration_is_reported_and_the_previous_one_stays(
    tmp_path: Path, content: str, named: str
) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            await write(w, "max_batch_size = 3")
            await write(w, content)
            assert policy(w).max_rows == 3
            assert named in w.rollout.catalog.model("m").config_error
            with pytest.raises(BadConfig):
                read_config(tmp_path / "m")
            await write(w, "max_batch_size = 3")
            assert w.rollout.catalog.model("m").config_error == ""

    run(scenario())


def test_versions_are_loaded_according_to_the_policy(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, keep_versions=2) as w:
            for scale in range(1, 6):
                await w.push(toy(float(scale)), promote=scale == 5)
            await w.loader.settle()
            versions = w.store.versions("m")
            assert versions == [1, 3, 4, 5]  # 5 is live, 1 was live before it, and two more are retained
            for content, held in (
                ("[version_policy]\nlatest = 2", {1, 4, 5}),
                ("[version_policy]\nall = true", {1, 3, 4, 5}),
                ("[version_policy]\nspecific = [3]", {1, 3, 5}),
                ("", {1, 5}),
            ):
                await write(w, content)
                await w.loader.settle()
                assert set(w.model("m").loaded) == held, content

    run(scenario())


def test_retention_keeps_specific_versions(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, keep_versions=1) as w:
            await w.push(toy(1.0))
            await w.push(toy(2.0))
            await write(w, "[version_policy]\nspecific = [2]")
            for scale in range(3, 7):
                await w.push(toy(float(scale)), promote=True)
            await w.loader.settle()
            assert w.store.versions("m") == [2, 4, 5, 6]

    run(scenario())


def test_compile_options_change_without_a_gap_in_service(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            await w.push(toy(2.0), promote=True)
            before, artifacts = w.registry.resolve("m"), w.loader.artifacts_in_use
            w.stages.gate.clear()
            changing = asyncio.create_task(write(w, "[compile]\nprecision = 'bfloat16'\nmax_batch = 64"))
            while w.stages.runs.count("compile") < 3:  # noqa: ASYNC110 - a thread makes it true
                await asyncio.sleep(0.001)
            assert w.registry.resolve("m") is before  # it answers until the other one is loaded
            w.stages.gate.set()
            await changing
            assert w.registry.resolve("m") is not before
            assert w.scale() == 2.0
            assert not w.loader.artifacts_in_use & artifacts
            assert w.stages.flags[-1][:4] == ["--max-batch", "64", "--precision", "bfloat16"]
            await write(w, "")
            assert w.loader.artifacts_in_use == artifacts  # the earlier artifacts are found in the cache
            assert w.stages.runs.count("compile") == 4

    run(scenario())


def test_failed_compilation_for_new_options_leaves_the_old_code(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            before = w.registry.resolve("m")
            w.backend.refusals = 2
            await write(w, "[compile]\nthreads = 1\nmax_batch = 4")
            assert w.registry.resolve("m") is before
            assert "version 1: the artifact does not load" in w.model("m").config_error

    run(scenario())


def test_a_version_that_cannot_be_built_again_is_reported_until_it_is(tmp_path: Path) -> None:
    """Its file is damaged: the old build answers, `config_error` says so, and the restored file is tried at once."""

    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            before, file = w.registry.resolve("m"), tmp_path / "m" / "1" / "model.onnx"
            content = file.read_bytes()
            file.write_bytes(content + b"?")
            await write(w, "[compile]\nmax_batch = 16")
            expected = "config.toml: version 1: file 'model.onnx' has sha256"
            assert w.rollout.catalog.model("m").config_error.startswith(expected)
            builds = len(w.stages.runs)
            await w.rollout.sync("m")
            assert w.rollout.catalog.model("m").config_error.startswith(expected)
            assert (w.registry.resolve("m"), len(w.stages.runs)) == (before, builds)  # nothing changed: no new attempt
            file.write_bytes(content)
            await w.watcher.poll()
            assert w.rollout.catalog.model("m").config_error == ""
            assert w.registry.resolve("m") is not before
            assert w.stages.flags[-1][:2] == ["--max-batch", "16"]

    run(scenario())


@pytest.mark.parametrize("cured_by", ["retry", "load call", "configuration"])
def test_a_version_that_could_not_be_built_again_is_built_later(tmp_path: Path, cured_by: str) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            before, stage = w.registry.resolve("m"), w.stages._stage

            def fails(*_: object) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            w.stages._stage = fails  # type: ignore[method-assign]
            await write(w, "[compile]\nmax_batch = 16")
            assert "version 1: compiling: the model repository's storage is full" in w.model("m").config_error
            w.stages._stage = stage  # type: ignore[method-assign]
            if cured_by == "retry":
                w.watcher._last_retry = -1e9
                await w.watcher.poll()
            elif cured_by == "load call":
                await w.rollout.load("m", {})
            else:
                await write(w, "[compile]\nmax_batch = 16\nthreads = 1")
            assert w.model("m").config_error == ""
            assert w.registry.resolve("m") is not before

    run(scenario())


def test_a_version_that_is_unloaded_while_another_is_built_again_stays_unloaded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            await write(w, "[version_policy]\nall = true")
            await w.push(toy(2.0))
            w.stages.gate.clear()
            content = "[version_policy]\nall = true\n[compile]\nmax_batch = 64"
            changing = asyncio.create_task(write(w, content))
            while w.stages.runs.count("compile") < 3:  # noqa: ASYNC110 - a thread makes it true
                await asyncio.sleep(0.001)
            await w.rollout.unload("m")
            w.stages.gate.set()
            await changing
            assert (w.model("m").loaded, w.model("m").config_error) == ({}, "")

    run(scenario())


def test_a_version_that_was_compiled_while_the_options_changed_is_built_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            w.stages.gate.clear()
            pushing = asyncio.create_task(w.push(toy(2.0), promote=True))
            while w.stages.runs.count("compile") < 2:  # noqa: ASYNC110 - a thread makes it true
                await asyncio.sleep(0.001)
            changing = asyncio.create_task(write(w, "[compile]\nmax_batch = 64"))
            while w.model("m").config.compile.max_batch != 64:  # noqa: ASYNC110 - a thread makes it true
                await asyncio.sleep(0.001)
            w.stages.gate.set()
            await asyncio.gather(pushing, changing)
            await w.watcher.poll()
            assert w.live() == 2
            assert w.stages.flags[-1][:2] == ["--max-batch", "64"]
            assert w.model("m").outdated_versions == []

    run(scenario())


@pytest.mark.parametrize("packs", [True, False])
def test_packing_is_compiled_or_the_reason_against_it_is_reported(tmp_path: Path, packs: bool) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0, shape=(-1, -1), packs=packs, packing_reason="as it is"))
            await write(w, "[compile]\npacking = 512\n[padding]\nmask = 'x'")
            assert "--packing 512" in " ".join(w.stages.flags[-1])
            error = "" if packs else "config.toml: compile.packing: version 1: as it is"
            assert w.model("m").config_error == error
            assert (w.registry.resolve("m").rules.padding is None) == packs

    run(scenario())


def test_padding_that_does_not_fit_a_version_is_reported_and_not_applied(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0, shape=(-1, -1)))
            await write(w, "[padding]\nmask = 'x'\noutputs = ['y']\nmultiple = 4")
            servable = w.registry.resolve("m")
            assert servable.rules.padding is not None
            assert servable.rules.padding.multiple == 4
            await w.push(toy(2.0, shape=(-1, 4)), promote=True, allow_signature_change=True)
            assert w.registry.resolve("m").rules.padding is None
            assert "padding: version 2: 'x': expected numbers, of any length along axis 1" in w.model("m").config_error

    run(scenario())


def test_a_batch_size_for_a_model_that_cannot_batch_is_reported(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0, batchable=False, batch_reason="node 'y' (CumSum) runs over the rows"))
            await write(w, "max_batch_size = 4\n[padding]\nmask = 'x'")
            error = w.model("m").config_error
            assert error.startswith("config.toml: max_batch_size: version 1: expected 1, or a model whose requests")
            assert "may share a batch, got 4: node 'y' (CumSum) runs over the rows" in error
            assert "; padding: version 1: " in error  # all errors, not only the last one
            await write(w, "max_batch_size = 1")
            assert w.model("m").config_error == ""
            await w.push(toy(2.0), promote=True)
            await write(w, "max_batch_size = 4\n[version_policy]\nspecific = [2]")
            assert w.registry.resolve("m").ref.version == 2

    run(scenario())


def test_a_batch_size_above_the_compiled_one_is_reported(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            compiled_for = w.registry.resolve("m").model.max_batch
            await write(w, f"max_batch_size = {compiled_for + 1}")
            assert w.model("m").config_error == (
                f"config.toml: max_batch_size: version 1: expected at most {compiled_for}, which it is compiled for, "
                f"or a larger compile.max_batch, got {compiled_for + 1}"
            )
            await write(w, f"max_batch_size = {compiled_for}")
            assert w.model("m").config_error == ""

    run(scenario())


def test_a_batch_size_of_zero_means_no_batch_dimension(tmp_path: Path) -> None:
    """Triton's max_batch_size = 0; a loaded version is loaded again, so that nothing remembers its batches."""

    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            batched = w.registry.resolve("m")
            assert batched.signature.group({"x": ("FP32", (3, 4))}).rows == 3
            await write(w, "max_batch_size = 0")
            alone = w.registry.resolve("m")
            assert alone is not batched
            assert alone.signature.group({"x": ("FP32", (3, 4))}).rows == 0
            config = configuration(alone)
            assert config["max_batch_size"] == 0
            assert config["input"][0]["dims"] == [-1, 4]
            assert "dynamic_batching" not in config
            assert "max_batch_size = 0" in config["parameters"]["batching"]["string_value"]
            await w.push(toy(2.0))
            assert configuration(w.registry.resolve("m", "2"))["max_batch_size"] == 0
            assert w.rollout.catalog.model("m").config_error == ""
            await write(w, "")
            assert configuration(w.registry.resolve("m"))["max_batch_size"] == 8

    run(scenario())


@pytest.mark.parametrize(("specific", "live"), [([1], 1), ([2, 1], 2), ([1, 9], 1), ([3], 3)])
def test_the_first_live_version_satisfies_the_policy(tmp_path: Path, specific: list[int], live: int) -> None:
    for version in (1, 2, 3):
        copy_by_hand(tmp_path, version, toy(float(version)))
    (tmp_path / "m" / "config.toml").write_text(f"version_policy.specific = {specific}")

    async def scenario() -> None:
        async with world(tmp_path) as w:
            assert w.live() == live
            assert w.scale() == float(live)
            assert set(w.model("m").aliases.aliases) == {"live"}

    run(scenario())


def test_a_version_outside_of_the_policy_does_not_go_live_by_itself(tmp_path: Path) -> None:
    copy_by_hand(tmp_path, 2, toy(2.0))
    (tmp_path / "m" / "config.toml").write_text("version_policy.specific = [1, 4]")

    async def scenario() -> None:
        async with world(tmp_path) as w:
            with pytest.raises(Unavailable, match="no version is live"):
                w.registry.resolve("m")
            assert (await w.push(toy(3.0))).version == 3
            assert "live" not in w.model("m").aliases.aliases
            await w.push(toy(4.0))
            assert w.scale() == 4.0
            await w.push(toy(5.0), promote=True)  # an explicit promotion is allowed
            assert w.scale() == 5.0

    run(scenario())


def test_labels_are_read_beside_the_configuration(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(1.0))
            labels = tmp_path / "m" / "names.txt"
            labels.write_bytes("cat\r\nd\u00f6g\n\nfox".encode())
            await write(w, "[label_filename]\ny = 'names.txt'")
            signature = w.registry.resolve("m", "").signature
            assert signature.labels == {"y": (b"cat", "d\u00f6g".encode(), b"", b"fox")}
            assert w.model("m").config_error == ""
            labels.write_bytes(b"\xff")
            await write(w, "[label_filename]\ny = 'names.txt' # again")
            assert "label_filename.y: file 'names.txt': expected UTF-8" in w.model("m").config_error
            assert signature.labels["y"][0] == b"cat"
            labels.write_text("wolf")
            await write(w, "[label_filename]\nz = 'names.txt'")
            assert "label_filename: version 1: expected names of outputs, some of ['y'], got ['z']" in (
                w.model("m").config_error
            )
            await write(w, "")
            assert signature.labels == {}

    run(scenario())
