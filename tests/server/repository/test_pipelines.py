"""Pipelines in the repository: published, served, pinned to versions or following an alias."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lathe.core.errors import ModelError
from lathe.server.access.authority import Authority
from lathe.server.archive import archive_of, body_of
from lathe.server.canary.plan import CanaryPlan
from lathe.server.errors import Conflict, Unavailable, Unprocessable
from lathe.server.jobs.parent_models import RepositoryParents
from lathe.server.pipelines.definition import parse_definition
from lathe.server.repository.store import Origin
from lathe.server.repository.tar_unpacker import TarUnpacker
from lathe.server.serving.dataplane import DataPlane
from lathe.server.types import InferRequest
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


def test_a_pipeline_of_two_models_is_served_as_one_model(tmp_path: Path) -> None:
    """A step with a version is pinned to it, one without follows the alias."""

    async def scenario() -> None:
        async with world(tmp_path) as repo:
            await with_models(repo)
            assert await ask(repo, "chain") == 6.0
            await repo.push(toy(5.0), "two", promote=True)
            await repo.push(toy(7.0), "three", promote=True)
            assert await ask(repo, "chain") == 14.0

    run(scenario())


def test_no_job_reads_a_pipeline(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as repo:
            await with_models(repo)
            parents = RepositoryParents(repo.rollout.catalog, repo.store)
            assert (await parents.pin("two", "live")).version == 1
            with pytest.raises(Unprocessable, match="version 1 of model 'chain' has no ONNX model, which a job"):
                await parents.pin("chain", "live")

    run(scenario())


def test_a_pipeline_has_versions_and_can_be_rolled_back(tmp_path: Path) -> None:
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
            await repo.push(packed(OVER_CHAIN), "another")  # sorts before the models it needs
            await repo.push(toy(5.0), "two", promote=True)
            await repo.push(toy(5.5), "two", promote=True)  # only the pipeline needs version 1
        async with world(tmp_path) as repo:
            assert (await ask(repo, "chain"), await ask(repo, "another")) == (6.0, 6.0)

    run(scenario())


OVER_CHAIN = """
inputs = ["x"]
outputs = ["y"]
step = [{name = "all", model = "chain", inputs = {x = "x"}, outputs = {y = "y"}}]
"""


def test_models_that_a_pipeline_needs_are_not_deleted_or_unloaded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, keep_versions=1) as repo:
            await with_models(repo)
            for scale in (5.0, 6.0, 7.0, 8.0):
                await repo.push(toy(scale), "two", promote=True)
            await repo.loader.settle()
            assert repo.store.versions("two") == [1, 3, 4, 5]  # version 2 was not needed
            with pytest.raises(Conflict, match="version 1 of model 'two' is a step of pipeline chain:1"):
                await repo.rollout.delete("two", 1, Origin("test"))
            with pytest.raises(Conflict, match="steps of chain:1"):
                await repo.rollout.unload("two")
            assert await ask(repo, "chain") == 6.0
            assert 1 in repo.model("two").loaded
            await repo.rollout.unload("chain")
            await repo.loader.settle()
            assert 1 not in repo.model("two").loaded  # no pipeline needs it in memory any more
            await repo.rollout.unload("two")

    run(scenario())


def test_a_step_that_follows_an_unloaded_model_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as repo:
            await with_models(repo)
            await repo.rollout.unload("three")
            with pytest.raises(Unavailable, match=r"step 'second': model 'three'.* is not loaded: it was unloaded"):
                await ask(repo, "chain")
            await repo.rollout.load("three", {})
            assert await ask(repo, "chain") == 6.0

    run(scenario())


def test_a_model_that_no_longer_fits_the_pipeline_is_reported(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as repo:
            await with_models(repo)
            await repo.push(toy(3.0, shape=(-1, 5)), "three", promote=True, allow_signature_change=True)
            with pytest.raises(Unavailable, match="three:2 has other inputs or outputs"):
                await ask(repo, "chain")

    run(scenario())


def test_a_cycle_of_pipelines_is_refused_however_it_arises(tmp_path: Path) -> None:
    to_b, to_a = (OVER_CHAIN.replace('"chain"', name) for name in ('"b"', '"a"'))

    async def scenario() -> None:
        async with world(tmp_path) as repo:
            for name in ("a", "b"):
                await repo.push(toy(2.0), name)
            with pytest.raises(Unprocessable, match="step 'all': a:1 leads back to pipeline 'a'"):
                await repo.push(packed(to_a), "a")
            await repo.push(packed(to_b), "a")  # not live yet, so there is no cycle
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
    "an unknown model": (CHAIN.replace('"three"', '"nobody"'), "step 'second': unknown model 'nobody'"),
    "an unknown version": (CHAIN.replace("version = 1", "version = 9"), "step 'first': model 'two' has no version 9"),
    "an unknown alias": (
        CHAIN.replace("version = 1", 'alias = "gold"'),
        "step 'first': model 'two' has no version 'gold'",
    ),
    "an unknown tensor": (CHAIN.replace('{x = "middle"}', '{x = "center"}'), "tensor 'center' is used, but neither"),
    "an unknown input": (CHAIN.replace('{x = "middle"}', '{z = "middle"}'), r"expected inputs \['x'\], got \['z'\]"),
    "an unknown output": (
        CHAIN.replace('{y = "middle"}', '{z = "middle"}'),
        r"expected outputs among \['y'\], got \['z'\]",
    ),
    "a cycle of steps": (CHAIN.replace('inputs = {x = "x"}', 'inputs = {x = "y"}'), "input 'x' is used by no step"),
    "two origins": (CHAIN.replace('"middle"}\n\n', '"y"}\n\n'), "tensor 'y' is made more than once"),
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
        "file 'labels.txt': expected a regular file in the version's folder, got none",
    ),
    "a file elsewhere": (
        CHAIN.replace('model = "three"', 'builtin = "label"\noptions = {file = "../a"}'),
        "file '../a': expected a regular file in the version's folder, got none",
    ),
    "options of a model": (CHAIN.replace("version = 1", "version = 1\noptions = {a = 1}"), "options are for a builtin"),
    "both": (CHAIN.replace("version = 1", 'version = 1\nalias = "live"'), "expected version or alias, not both"),
    "nothing": (CHAIN.replace('model = "three"', ""), "expected either model or builtin"),
    "a step twice": (CHAIN.replace('"second"', '"first"'), "step 'first' is defined twice"),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", BAD)
def test_an_invalid_pipeline_is_refused_with_the_reason(tmp_path: Path, case: str) -> None:
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


def test_a_pipeline_copied_before_its_model_waits_for_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as repo:
            await repo.push(toy(2.0), "two")
            folder = tmp_path / "chain" / "1"
            folder.mkdir(parents=True)
            (folder / "pipeline.toml").write_text(CHAIN)
            await repo.rollout.sync("chain")
            assert "unknown model 'three'" in repo.model("chain").status(1).reason
            await repo.push(toy(3.0), "three")
            assert repo.rollout.clear_transient_failures() == ["chain"]
            await repo.rollout.sync("chain")
            assert await ask(repo, "chain") == 6.0

    run(scenario())


def test_a_pipeline_can_be_a_canary_and_follows_the_canaries_of_its_models(tmp_path: Path) -> None:
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


def test_a_pushed_pipeline_includes_the_files_that_its_steps_name(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("a\nb\n")
    (tmp_path / "notes.txt").write_text("not for anybody")
    (tmp_path / "pipeline.toml").write_text(
        CHAIN.replace('model = "three"', 'builtin = "label"\noptions = {file = "labels.txt"}')
    )
    body = body_of(tmp_path / "pipeline.toml")
    with tarfile.open(fileobj=io.BytesIO(b"".join(body.pieces()))) as archive:
        assert archive.getnames() == ["pipeline.toml", "labels.txt"]


@pytest.mark.parametrize(
    "name", ["sub/v.txt", "../v.txt", "/etc/v.txt", "", ".", "v\u00e9.txt", "n" * 101, "v.txt\n", "v 1"]
)
def test_a_file_that_a_version_cannot_have_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    step = f'builtin = "label"\noptions = {{file = {json.dumps(name)}}}'
    (tmp_path / "pipeline.toml").write_text(CHAIN.replace('model = "three"', step))
    with pytest.raises(ModelError, match=r"pipeline.toml: options.file: expected the name of a file beside .*, got '"):
        body_of(tmp_path / "pipeline.toml")


@pytest.mark.parametrize("name", ["v.txt", "n" * 100])
def test_names_of_files_arrive_whole(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("a\n")
    step = f'builtin = "label"\noptions = {{file = "{name}"}}'
    (tmp_path / "pipeline.toml").write_text(CHAIN.replace('model = "three"', step))
    created = dict[str, Any]()
    unpacker = TarUnpacker(lambda found: created.setdefault(found, io.BytesIO()), 1 << 20)
    unpacker.write(b"".join(body_of(tmp_path / "pipeline.toml").pieces()))
    unpacker.finish()
    assert list(created) == ["pipeline.toml", name]


def test_a_pushed_pipeline_includes_the_default_files_of_its_steps(tmp_path: Path) -> None:
    labels = CHAIN.replace('model = "three"', 'builtin = "label"').replace('{y = "y"}', '{labels = "y"}')
    labels = labels.replace('{x = "middle"}', '{scores = "middle"}')
    (tmp_path / "labels.txt").write_text("a\nb\nc\nd\n")
    (tmp_path / "pipeline.toml").write_text(labels)

    async def scenario() -> None:
        async with world(tmp_path / "repo") as repo:
            await repo.push(toy(2.0), "two")
            await repo.push(b"".join(body_of(tmp_path / "pipeline.toml").pieces()), "named")
            plane = DataPlane(repo.registry, Authority("127.0.0.1", None))
            x = np.array([[1, 4, 2, 3]], np.float32)
            assert (await plane.infer(InferRequest("named", {"x": x}))).outputs["y"].tolist() == [[b"b"]]

    run(scenario())


@pytest.mark.parametrize(
    ("step", "files"),
    [
        ('builtin = "tokenize"', {"tokenizer.json"}),
        ('builtin = "label"', {"labels.txt"}),
        ('builtin = "label"\noptions = {top = 2}', {"labels.txt"}),
        ('builtin = "label"\noptions = {file = "names.txt"}', {"names.txt"}),
        ('builtin = "softmax"', set()),
        ('model = "label"', set()),
    ],
)
def test_the_files_of_a_definition_are_those_that_its_steps_read(step: str, files: set[str]) -> None:
    text = f'[[step]]\nname = "one"\n{step}\ninputs = {{a = "x"}}\noutputs = {{b = "y"}}'
    assert parse_definition(f'inputs = ["x"]\noutputs = ["y"]\n{text}'.encode()).files == files
