"""Pipelines in the repository: published, served, pinned to versions or following an alias."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from server.access.authority import Authority
from server.archive import archive_of, body_of
from server.canary.plan import CanaryPlan
from server.dataplane import DataPlane
from server.errors import Conflict, Unavailable, Unprocessable
from server.repository.store import Origin
from server.types import InferRequest
from tests.server.repository.world import World, run, toy, world

CHAIN = """
inputs = ["x"]
outputs = ["y"]

[[step]]
name = "first"
model = "two"
version = 1
inputs = {x = "x"}
outputs = {y = "middle"}

[[step]]
name = "second"
model = "three"
inputs = {x = "middle"}
outputs = {y = "y"}
"""


def packed(text: str, **files: bytes) -> bytes:
    body = archive_of({"pipeline.toml": [text.encode()]} | {name: [content] for name, content in files.items()})
    return b"".join(body.pieces())


async def ask(repo: World, model: str, version: str = "") -> float:
    plane = DataPlane(repo.registry, Authority("127.0.0.1", None))
    result = await plane.infer(InferRequest(model, {"x": np.ones((3, 4), np.float32)}, version))
    assert result.outputs["y"].shape == (3, 4)
    return float(result.outputs["y"][0, 0])


async def with_models(repo: World) -> None:
    await repo.push(toy(2.0), "two")
    await repo.push(toy(3.0), "three")
    await repo.push(packed(CHAIN), "chain")


def test_two_models_are_served_as_one(tmp_path: Path) -> None:
    """A step with a version stays with it, one without follows the alias."""

    async def scenario() -> None:
        async with world(tmp_path) as repo:
            await with_models(repo)
            assert await ask(repo, "chain") == 6.0
            await repo.push(toy(5.0), "two", promote=True)
            await repo.push(toy(7.0), "three", promote=True)
            assert await ask(repo, "chain") == 14.0

    run(scenario())


def test_a_pipeline_has_versions_and_goes_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as repo:
            await with_models(repo)
            await repo.push(packed(CHAIN.replace('model = "three"', 'model = "two"')), "chain", promote=True)
            assert (await ask(repo, "chain"), await ask(repo, "chain", "1")) == (4.0, 6.0)
            await repo.rollout.rollback("chain", "live", None, Origin("test"))
            assert await ask(repo, "chain") == 6.0

    run(scenario())


def test_a_restarted_server_loads_models_before_the_pipelines_that_need_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as repo:
            await with_models(repo)
            await repo.push(packed(OVER_CHAIN), "another")  # sorts before what it needs
            await repo.push(toy(5.0), "two", promote=True)
            await repo.push(toy(5.5), "two", promote=True)  # version 1 is wanted by nobody else
        async with world(tmp_path) as repo:
            assert (await ask(repo, "chain"), await ask(repo, "another")) == (6.0, 6.0)

    run(scenario())


OVER_CHAIN = """
inputs = ["x"]
outputs = ["y"]
step = [{name = "all", model = "chain", inputs = {x = "x"}, outputs = {y = "y"}}]
"""


def test_what_a_pipeline_needs_is_neither_deleted_nor_collected_nor_unloaded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, keep_versions=1) as repo:
            await with_models(repo)
            for scale in (5.0, 6.0, 7.0, 8.0):
                await repo.push(toy(scale), "two", promote=True)
            await repo.loader.settle()
            assert repo.store.versions("two") == [1, 3, 4, 5]  # 2 was spare
            with pytest.raises(Conflict, match="version 1 of model 'two' is a step of pipeline chain:1"):
                await repo.rollout.delete("two", 1, Origin("test"))
            with pytest.raises(Conflict, match="steps of chain:1"):
                await repo.rollout.unload("two")
            assert await ask(repo, "chain") == 6.0
            assert 1 in repo.model("two").loaded
            await repo.rollout.unload("chain")
            await repo.loader.settle()
            assert 1 not in repo.model("two").loaded  # nobody needs it in memory any more
            await repo.rollout.unload("two")

    run(scenario())


def test_following_an_unloaded_model_is_said(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as repo:
            await with_models(repo)
            await repo.rollout.unload("three")
            with pytest.raises(Unavailable, match=r"step 'second': model 'three'.* is not loaded: it was unloaded"):
                await ask(repo, "chain")
            await repo.rollout.load("three", {})
            assert await ask(repo, "chain") == 6.0

    run(scenario())


def test_a_model_that_comes_to_fit_no_more_is_said(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as repo:
            await with_models(repo)
            await repo.push(toy(3.0, shape=(-1, 5)), "three", promote=True, allow_signature_change=True)
            with pytest.raises(Unavailable, match="three:2 takes or gives other tensors"):
                await ask(repo, "chain")

    run(scenario())


def test_a_circle_is_refused_however_it_comes_about(tmp_path: Path) -> None:
    to_b, to_a = (OVER_CHAIN.replace('"chain"', name) for name in ('"b"', '"a"'))

    async def scenario() -> None:
        async with world(tmp_path) as repo:
            for name in ("a", "b"):
                await repo.push(toy(2.0), name)
            with pytest.raises(Unprocessable, match="step 'all': a:1 leads back to pipeline 'a'"):
                await repo.push(packed(to_a), "a")
            await repo.push(packed(to_b), "a")  # not live yet, so nothing leads back
            await repo.push(packed(to_a), "b")
            for name in ("a", "b"):
                await repo.rollout.set_alias(name, "live", 2, Origin("test"))
            with pytest.raises(Unavailable, match="leads back to pipeline"):
                await ask(repo, "a")
            await repo.rollout.rollback("b", "live", None, Origin("test"))
            assert await ask(repo, "a") == 2.0

    run(scenario())


BAD = {
    "not TOML": ("inputs = [", "pipeline.toml: not TOML"),
    "a model nobody has": (CHAIN.replace('"three"', '"nobody"'), "step 'second': unknown model 'nobody'"),
    "a version nobody has": (CHAIN.replace("version = 1", "version = 9"), "step 'first': model 'two' has no version 9"),
    "an alias nobody has": (
        CHAIN.replace("version = 1", 'alias = "gold"'),
        "step 'first': model 'two' has no version 'gold'",
    ),
    "an unknown tensor": (CHAIN.replace('{x = "middle"}', '{x = "center"}'), "tensor 'center' is used, but neither"),
    "an unknown input": (CHAIN.replace('{x = "middle"}', '{z = "middle"}'), r"expected inputs \['x'\], got \['z'\]"),
    "an unknown output": (
        CHAIN.replace('{y = "middle"}', '{z = "middle"}'),
        r"expected outputs among \['y'\], got \['z'\]",
    ),
    "a circle of steps": (CHAIN.replace('inputs = {x = "x"}', 'inputs = {x = "y"}'), "input 'x' is used by no step"),
    "two origins": (CHAIN.replace('"middle"}\n\n', '"y"}\n\n'), "tensor 'y' has more than one origin"),
    "an idle step": (CHAIN.replace('{x = "middle"}', '{x = "x"}'), "step 'first': nothing uses its outputs"),
    "other types": (CHAIN.replace('"three"', '"wide"'), r"expected FP32\[-1, 5\], tensor 'middle' is FP32\[-1, 4\]"),
    "an unknown builtin": (
        CHAIN.replace('model = "three"', 'builtin = "magic"'),
        "step 'second': builtin: expected one of decode_image,",
    ),
    "an unknown option": (
        CHAIN.replace('model = "three"', 'builtin = "label"\noptions = {best = 1}'),
        "options.best: there is no such key",
    ),
    "a file that is not there": (
        CHAIN.replace('model = "three"', 'builtin = "label"'),
        "the version has no file 'labels.txt'",
    ),
    "a file elsewhere": (
        CHAIN.replace('model = "three"', 'builtin = "label"\noptions = {file = "../a"}'),
        "the version has no file",
    ),
    "options of a model": (CHAIN.replace("version = 1", "version = 1\noptions = {a = 1}"), "options are for what is"),
    "both": (CHAIN.replace("version = 1", 'version = 1\nalias = "live"'), "expected version or alias, not both"),
    "nothing": (CHAIN.replace('model = "three"', ""), "expected either model or builtin"),
    "a step twice": (CHAIN.replace('"second"', '"first"'), "step 'first' is there twice"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_pipeline_is_refused_and_says_why(tmp_path: Path, case: str) -> None:
    text, message = BAD[case]

    async def scenario() -> None:
        async with world(tmp_path) as repo:
            await repo.push(toy(2.0), "two")
            await repo.push(toy(3.0), "three")
            await repo.push(toy(3.0, shape=(-1, 5)), "wide")
            with pytest.raises(Unprocessable, match=message):
                await repo.push(packed(text), "chain")
            assert repo.leftovers() == []
            assert not +repo.model("two").pinned

    run(scenario())


def test_a_pipeline_copied_in_before_its_model_waits_for_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as repo:
            await repo.push(toy(2.0), "two")
            folder = tmp_path / "chain" / "1"
            folder.mkdir(parents=True)
            (folder / "pipeline.toml").write_text(CHAIN)
            await repo.rollout.sync("chain")
            assert "unknown model 'three'" in repo.model("chain").status(1).reason
            await repo.push(toy(3.0), "three")
            assert repo.rollout.forgive_passing() == ["chain"]
            await repo.rollout.sync("chain")
            assert await ask(repo, "chain") == 6.0

    run(scenario())


def test_a_pipeline_is_tried_as_a_canary_and_follows_the_canaries_of_its_models(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as repo:
            await with_models(repo)
            await repo.push(toy(4.0), "three")
            await repo.rollout.trials.start("three", CanaryPlan(2, weight=0.2, promote=False), Origin("test"))
            assert sorted([await ask(repo, "chain") for _ in range(10)]) == [*[6.0] * 8, 8.0, 8.0]
            await repo.rollout.trials.cancel("three", Origin("test"))
            await repo.push(packed(CHAIN.replace('model = "three"', 'model = "two"')), "chain")
            await repo.rollout.trials.start("chain", CanaryPlan(2, weight=0.2, promote=False), Origin("test"))
            assert sorted([await ask(repo, "chain") for _ in range(10)]) == [4.0, 4.0, *[6.0] * 8]

    run(scenario())


def test_a_pushed_pipeline_brings_the_files_that_its_steps_name(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("a\nb\n")
    (tmp_path / "notes.txt").write_text("not for anybody")
    (tmp_path / "pipeline.toml").write_text(
        CHAIN.replace('model = "three"', 'builtin = "label"\noptions = {file = "labels.txt"}')
    )
    body = body_of(tmp_path / "pipeline.toml")
    with tarfile.open(fileobj=io.BytesIO(b"".join(body.pieces()))) as archive:
        assert archive.getnames() == ["pipeline.toml", "labels.txt"]
