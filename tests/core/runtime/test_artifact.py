"""Artifacts load without compiling; damaged, foreign or mismatching ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import lathe
from lathe.core.compiler import code_cache, pipeline
from lathe.core.compiler import compile as compile_module
from lathe.core.errors import ArtifactError
from lathe.core.frontends import content_digest
from lathe.core.frontends.export import export
from lathe.core.runtime.artifact import artifact
from lathe.core.runtime.artifact.bundle import Bundle, write_bundle
from lathe.core.runtime.artifact.store import open_store
from tests.core.runtime import graphs


def made(folder: Path, graph: lathe.Graph | None = None) -> Path:
    options = pipeline.make_options("cpu", "float32", 1, 8, True, folder / "cache")
    folder.mkdir(exist_ok=True)
    compile_module.compile_to(folder / "model.lathe", graph or graphs.mlp(), options)
    return folder / "model.lathe"


def test_a_loaded_artifact_answers_like_its_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path)

    def refuse(*_: object) -> bytes:
        raise AssertionError("loading compiled something")

    monkeypatch.setattr(pipeline, "object_for", refuse)
    x = {"x": np.random.default_rng(0).standard_normal((5, 20), np.float32)}
    with lathe.load_compiled(folder, threads=1) as session:
        np.testing.assert_allclose(
            session.run(x)["add_2"], lathe.interpret(graphs.mlp(), x)["add_2"], rtol=2e-5, atol=2e-5
        )
        assert session.batching.batchable and session.max_batch == 8


def test_equal_inputs_give_equal_artifacts(tmp_path: Path) -> None:
    first, second = made(tmp_path / "a"), made(tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()


def test_a_model_compiled_per_shape_is_stored_as_its_graph(tmp_path: Path) -> None:
    folder = made(tmp_path, graphs.sequence())
    x = {"x": np.random.default_rng(0).standard_normal((2, 9, 8), np.float32)}
    with lathe.load_compiled(folder, threads=1, cache_dir=tmp_path / "cache") as session:
        got = next(iter(session.run(x).values()))
    np.testing.assert_allclose(got, next(iter(lathe.interpret(graphs.sequence(), x).values())), rtol=2e-5)


def test_shapes_that_were_compiled_before_are_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path, graphs.sequence())
    builds: list[object] = []
    build = pipeline.build
    monkeypatch.setattr(pipeline, "build", lambda *arguments: builds.append(arguments) or build(*arguments))
    for length, so_far in ((9, 1), (9, 1), (5, 2), (9, 2)):
        x = {"x": np.random.default_rng(length).standard_normal((2, length, 8), np.float32)}
        with lathe.load_compiled(folder, threads=1, cache_dir=tmp_path / "cache") as session:
            (got,) = session.run(x).values()
        (want,) = lathe.interpret(graphs.sequence(), x).values()
        np.testing.assert_allclose(got, want, rtol=2e-5)
        assert len(builds) == so_far
    for kept in (tmp_path / "cache" / "models").iterdir():
        kept.write_bytes(kept.read_bytes()[:-1])
    with lathe.load_compiled(folder, threads=1, cache_dir=tmp_path / "cache") as session:
        session.run(x)
    assert len(builds) == 3


@pytest.mark.parametrize("fact", ["compiler", "target", "schema"])
def test_artifacts_of_another_version_or_machine_are_refused(tmp_path: Path, fact: str) -> None:
    path = made(tmp_path)
    with Bundle(path) as bundle:
        sections = {name: [bytes(bundle.section(name))] for name in ("code", "weights")}
        write_bundle(path, {**bundle.facts, fact: "other"}, sections)
    with pytest.raises(ArtifactError, match=f"made for {fact} 'other', this is .*; compile it again"):
        lathe.load_compiled(path)


def test_damaged_code_is_never_linked(tmp_path: Path) -> None:
    path = made(tmp_path)
    with Bundle(path) as bundle:
        code = bytes(bundle.section("code"))
    content = path.read_bytes()
    at = content.index(code)
    path.write_bytes(content[: at + 100] + bytes([content[at + 100] ^ 1]) + content[at + 101 :])
    with pytest.raises(ArtifactError, match="section 'code'"):
        lathe.load_compiled(path)


@pytest.mark.parametrize("graph", [graphs.mlp, graphs.sequence], ids=["code", "graph"])
def test_malformed_text_of_a_graph_is_an_error_of_the_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graph: Callable[[], lathe.Graph]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(artifact, "print_graph", lambda *_: "graph @")
        path = made(tmp_path, graph())
    with pytest.raises(ArtifactError, match="is malformed: IR text line 1: expected a name"):
        lathe.load_compiled(path)


def test_a_second_compile_of_a_file_loads_the_first_ones_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = export(graphs.mlp())
    (tmp_path / "mlp.onnx").write_bytes(model)
    x = {"x": np.random.default_rng(0).standard_normal((5, 20), np.float32)}
    want = lathe.interpret(graphs.mlp(), x)["add_2"]
    cache = {"threads": 1, "cache_dir": tmp_path / "cache"}
    with lathe.compile(tmp_path / "mlp.onnx", **cache) as session:  # type: ignore[arg-type]
        np.testing.assert_allclose(session.run(x)["add_2"], want, rtol=2e-5, atol=2e-5)
    (kept,) = (tmp_path / "cache" / "models").iterdir()

    builds: list[object] = []
    build = pipeline.build
    monkeypatch.setattr(pipeline, "build", lambda *arguments: builds.append(arguments) or build(*arguments))
    lathe.compile(model, **cache).close()  # type: ignore[arg-type]
    assert builds == []
    kept.write_bytes(kept.read_bytes()[:-1])
    with lathe.compile(model, **cache) as session:  # type: ignore[arg-type]
        np.testing.assert_allclose(session.run(x)["add_2"], want, rtol=2e-5, atol=2e-5)
    assert len(builds) == 1
    lathe.compile(model, max_batch=4, **cache).close()  # type: ignore[arg-type]
    assert len(builds) == 2


def test_a_file_that_changes_during_lookup_is_cached_by_its_new_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, before, after = tmp_path / "model.onnx", export(graphs.mlp()), export(graphs.mlp(seed=1))
    path.write_bytes(before)
    content = content_digest.content_of_file

    def changing(file: Path) -> content_digest.ModelContent:
        found = content(file)
        file.write_bytes(after)
        return found

    monkeypatch.setattr(compile_module, "content_of_file", changing)
    with lathe.compile(path, threads=1, cache_dir=tmp_path / "cache", tune="off") as session:
        x = {"x": np.random.default_rng(0).standard_normal((5, 20), np.float32)}
        want = lathe.interpret(lathe.load(after), x)["add_2"]
        np.testing.assert_allclose(session.run(x)["add_2"], want, rtol=2e-5, atol=2e-5)
    (kept,) = (tmp_path / "cache" / "models").iterdir()
    options = pipeline.make_options(threads=1)
    assert kept.stem == code_cache.model_key(after, options) != code_cache.model_key(before, options)


def test_names_of_external_files_are_found_across_read_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_digest, "_CHUNK", 128)
    path, name = tmp_path / "model.onnx", b"\x0a\x08location"
    for start in range(100, 160):
        data = bytes(start) + name + bytes(40)
        path.write_bytes(data)
        assert (
            content_digest.content_of_file(path) == content_digest.content_of_bytes(data)
            and content_digest.content_of_file(path).may_have_external_data
        )
    path.write_bytes(bytes(300))
    assert not content_digest.content_of_file(path).may_have_external_data


def test_a_full_disk_only_prevents_caching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifact, "save", full)
    x = {"x": np.random.default_rng(0).standard_normal((5, 20), np.float32)}
    with lathe.compile(export(graphs.mlp()), threads=1, cache_dir=tmp_path) as session:
        np.testing.assert_allclose(
            session.run(x)["add_2"], lathe.interpret(graphs.mlp(), x)["add_2"], rtol=2e-5, atol=2e-5
        )


def test_state_starts_from_its_initial_value(tmp_path: Path) -> None:
    one = {"x": np.ones(4, np.float32)}
    with lathe.load_compiled(made(tmp_path, graphs.counter()), threads=1) as session:
        totals = [next(iter(session.run(one).values()))[0] for _ in range(3)]
    assert totals == [1, 2, 3]


def test_runs_use_at_most_the_threads_the_plan_has_scratch_for(tmp_path: Path) -> None:
    graph = graphs.convolution()
    folder = made(tmp_path, graph)  # for one thread
    x = {"x": np.random.default_rng(0).standard_normal((4, 16, 32, 32), np.float32)}
    with lathe.load_compiled(folder, threads=3) as session:
        assert session.profile(x).threads == 1
        for name, want in lathe.interpret(graph, x).items():
            np.testing.assert_allclose(session.run(x)[name], want, rtol=1e-3, atol=1e-3)


def test_a_folder_of_models_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    models.chmod(0o777)
    with pytest.raises(ArtifactError, match="models can be written by other users"):
        open_store(str(tmp_path))
