"""Artifacts: load without compiling, refuse what is damaged, foreign or made for something else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

import core
from core import compiler
from core.errors import ArtifactError
from core.runtime import artifact
from tests.core.runtime import graphs


def made(folder: Path, graph: core.Graph | None = None) -> Path:
    options = compiler.make_options("cpu", "float32", 1, 8, True, folder / "cache")
    compiler.compile_to(folder / "artifact", graph or graphs.mlp(), options)
    return folder / "artifact"


def test_a_loaded_artifact_answers_like_the_session_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path)

    def refuse(*_: object) -> bytes:
        raise AssertionError("loading compiled something")

    monkeypatch.setattr(compiler, "object_for", refuse)
    x = {"x": np.random.default_rng(0).standard_normal((5, 20), np.float32)}
    with core.load_compiled(folder, threads=1) as session:
        np.testing.assert_allclose(
            session.run(x)["add_2"], core.interpret(graphs.mlp(), x)["add_2"], rtol=2e-5, atol=2e-5
        )
        assert session.batching.batchable and session.max_batch == 8


def test_equal_inputs_give_equal_artifacts(tmp_path: Path) -> None:
    first, second = made(tmp_path / "a"), made(tmp_path / "b")
    for path in sorted(first.iterdir()):
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name


def test_a_model_compiled_per_shape_travels_as_its_graph(tmp_path: Path) -> None:
    folder = made(tmp_path, graphs.sequence())
    x = {"x": np.random.default_rng(0).standard_normal((2, 9, 8), np.float32)}
    with core.load_compiled(folder, threads=1, cache_dir=tmp_path / "cache") as session:
        got = next(iter(session.run(x).values()))
    np.testing.assert_allclose(got, next(iter(core.interpret(graphs.sequence(), x).values())), rtol=2e-5)


@pytest.mark.parametrize("name", ["artifact.json", "code.bin", "weights.bin", "fallbacks.lir"])
def test_any_flipped_byte_is_found(tmp_path: Path, name: str) -> None:
    folder = made(tmp_path)
    path = folder / name
    content = bytearray(path.read_bytes())
    for at in range(0, len(content), max(1, len(content) // 7)):
        damaged = bytearray(content)
        damaged[at] ^= 0x20 if name == "artifact.json" else 0xFF
        path.write_bytes(damaged)
        if name == "artifact.json" and _same_meaning(content, damaged):
            continue
        with pytest.raises(ArtifactError):
            core.load_compiled(folder, threads=1)


def _same_meaning(content: bytes, damaged: bytes) -> bool:
    """Whether the flip only hit white space, or a text for people."""
    try:
        return _essence(json.loads(content)) == _essence(json.loads(damaged))
    except ValueError:
        return False


def _essence(index: dict[str, object]) -> object:
    return {key: index.get(key) for key in ("schema", "target", "compiler", "files", "code")}


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = made(tmp_path)
    (folder / "code.bin").unlink()
    with pytest.raises(ArtifactError, match=r"code\.bin is missing"):
        core.load_compiled(folder)


def test_files_that_others_could_write_are_refused(tmp_path: Path) -> None:
    folder = made(tmp_path)
    os.chmod(folder / "code.bin", 0o666)
    with pytest.raises(ArtifactError, match="can be written by other users"):
        core.load_compiled(folder)


def test_an_artifact_of_another_version_says_so(tmp_path: Path) -> None:
    folder = made(tmp_path)
    index = json.loads((folder / "artifact.json").read_text())
    (folder / "artifact.json").write_text(json.dumps({**index, "compiler": "older"}))
    with pytest.raises(ArtifactError, match="compile it again"):
        core.load_compiled(folder)


def test_saving_over_an_artifact_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path)
    with pytest.raises(FileExistsError):
        artifact.save(folder, None, {}, graphs.mlp())  # type: ignore[arg-type]


def test_state_starts_from_its_initial_value(tmp_path: Path) -> None:
    one = {"x": np.ones(4, np.float32)}
    with core.load_compiled(made(tmp_path, graphs.counter()), threads=1) as session:
        totals = [next(iter(session.run(one).values()))[0] for _ in range(3)]
    assert totals == [1, 2, 3]


def test_no_more_threads_take_part_than_the_plan_has_scratch_for(tmp_path: Path) -> None:
    graph = graphs.convolution()
    folder = made(tmp_path, graph)  # for one thread
    x = {"x": np.random.default_rng(0).standard_normal((4, 16, 32, 32), np.float32)}
    with core.load_compiled(folder, threads=3) as session:
        assert session.profile(x).threads == 1
        for name, want in core.interpret(graph, x).items():
            np.testing.assert_allclose(session.run(x)[name], want, rtol=1e-3, atol=1e-3)
