"""Commands about files: the content of model and data files, a job's report, the cache of compiled code."""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_iris

import lathe
from lathe.core.byte_sizes import format_bytes
from lathe.core.compiler.options import PRECISIONS, make_options
from lathe.core.errors import UnsupportedError
from lathe.core.frontends import model_facts
from lathe.core.runtime.artifact.store import open_store
from lathe.server.access.keys import make_key, write_keys
from lathe.server.access.scopes import Scope
from lathe.server.client import Client
from lathe.server.environment import read_settings
from tests.server.cli.running import PROJECT, run_lathe
from tests.server.jobs.world import fake_jobs
from tests.server.repository.world import toy
from tests.server.service import Service, service, until

DIGITS = PROJECT / "model_repo" / "digits" / "2" / "model.onnx"


# models


def conv_and_gemm(path: Path) -> None:
    """A convolution [8,3,3,3] of 16x16 pixels, followed by a product with [2048,10]."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.random((8, 3, 3, 3), np.float32), "m": rng.random((2048, 10), np.float32)}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Flatten", ["c"], ["f"]),
        helper.make_node("Gemm", ["f", "m"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def test_inspect_shows_size_opset_parameters_and_operations(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    conv_and_gemm(path)
    # 2 * 8*16*16 * 3*3*3 and 2 * 2048*10, and one for each number that Flatten passes on
    assert model_facts.count_flops(lathe.load(path)) == 110592 + 40960 + 2048
    said = run_lathe("inspect", str(path))
    assert f"\n{format_bytes(path.stat().st_size)}, opset 17, 20,696 parameters, 154 kFLOP for batch 1\n" in said


def test_the_count_agrees_with_the_work_of_the_compiled_kernels() -> None:
    graph = lathe.load(DIGITS)
    with lathe.compile(DIGITS, threads=1, new_shapes="wait") as session:
        measured = session.profile({"image": np.zeros((1, 1, 8, 8), np.float32)}, 1)
    work = model_facts.count_flops(graph)
    assert work is not None and 0.8 < sum(node.flops for node in measured.nodes) / work < 1.25


def test_weights_beside_the_file_count(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    conv_and_gemm(path)
    whole = path.stat().st_size
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="m.data", size_threshold=0)
    assert model_facts.file_facts(path).size > whole > path.stat().st_size
    assert model_facts.count_parameters(lathe.load(path)) == 20_696


def test_data_of_constants_and_bodies_beside_the_file_count(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20]> g (bool c, float[2] x) => (float[2] y) {
        a = Constant <value = float[2] {1, 2}> ()
        y = If (c) <then_branch = t () => (float[2] u) <float[2] b = {3, 4}> { u = Add (a, b) },
                    else_branch = e () => (float[2] v) { v = Add (a, x) }>
    }""")
    tensors = [model.graph.node[0].attribute[0].t, model.graph.node[1].attribute[0].g.initializer[0]]
    for number, tensor in enumerate(tensors):
        tensor.raw_data = onnx.numpy_helper.to_array(tensor).tobytes()
        tensor.ClearField("float_data")
        onnx.external_data_helper.set_external_data(tensor, f"{number}.bin")
        (tmp_path / f"{number}.bin").write_bytes(tensor.raw_data)
        tensor.ClearField("raw_data")
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    lathe.load(path)
    assert model_facts.file_facts(path).size == path.stat().st_size + 16


def test_work_that_depends_on_the_data_is_not_guessed(tmp_path: Path) -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["i"]), helper.make_node("Cast", ["i"], ["y"], to=TensorProto.FLOAT)]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", [4]), ("y", None)))
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y]), opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, tmp_path / "m.onnx")
    assert "FLOPs that depend on the run" in run_lathe("inspect", str(tmp_path / "m.onnx"))


def test_help_and_error_list_the_same_precisions() -> None:
    with pytest.raises(UnsupportedError) as refused:
        make_options(precision="int8")
    expected = str(refused.value).partition("expected ")[2]
    assert all(name in expected for name in PRECISIONS)
    for command in ("compile", "kernels"):
        assert expected in " ".join(run_lathe(command, "--help").replace("│", " ").split())


# data


def test_describe_shows_the_data_as_training_reads_them(tmp_path: Path) -> None:
    iris = load_iris()
    lines = [",".join(map(str, [*row, kind])) for row, kind in zip(iris.data, iris.target, strict=True)]
    (tmp_path / "iris.csv").write_text("\n".join(["a,b,c,d,target", *lines]))
    said = run_lathe("datasets", "describe", str(tmp_path / "iris.csv"))
    assert "150 rows, csv" in said and "3 classes: 0, 1, 2" in said and "target: target" in said
    found = json.loads(run_lathe("datasets", "describe", str(tmp_path / "iris.csv"), "--json"))
    assert (found["rows"], found["format"], found["problems"]) == (150, "csv", [])


def test_a_file_of_an_unknown_format_is_not_read_as_csv(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('epochs = 1\nmodel = {architecture = "mlp"}\noptimizer = {kind = "adam"}\n')
    # no server listens there: the file is refused before
    (tmp_path / "notes.rst").write_text("Notes, without a table\n")
    notes, url = str(tmp_path / "notes.rst"), "http://127.0.0.1:9"
    for command in (
        ("train", str(recipe), "--data", notes, "--out", str(tmp_path / "out")),
        ("train", str(recipe), "--data", notes, "--url", url),
        ("datasets", "describe", notes),
        ("datasets", "push", "d", notes, "--url", url),
    ):
        said = run_lathe(*command, fails=True)
        assert "notes.rst: unknown format, expected NumPy arrays (.npz), IDX files, CSV" in said
        assert "a .rst file as CSV" in said


# reports


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[tuple[Service, str]]:
    key, shown = make_key("bot", Scope, ["*"], 0, None)
    write_keys(tmp_path / "keys.json", [key])
    with service(tmp_path / "repo", make_jobs=fake_jobs, keys_file=tmp_path / "keys.json") as running:
        yield running, shown


def test_a_report_of_a_server_with_keys_opens_in_a_browser(
    keyed: tuple[Service, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, key = keyed
    opened: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) is None)
    with Client(running.url, api_key=key) as client:
        job = client.submit_job({"steps": 1, "model": toy(3.0).decode()}, "digits").id
        until(lambda: client.job(job).finished is not None)
    asked = ("jobs", "report", job, "--url", running.url, "--api-key", key)
    assert run_lathe(*asked, "--open") == f"wrote {job}.html\n"
    assert opened == [(tmp_path / f"{job}.html").as_uri()]
    assert Path(f"{job}.html").read_text() == "<h1>report</h1>"
    run_lathe(*asked, "-o", str(tmp_path / "other.html"))
    assert (tmp_path / "other.html").exists() and len(opened) == 1
    assert "No such file or directory" in run_lathe(*asked, "-o", "/nowhere/x.html", fails=True)


# the cache


@pytest.mark.parametrize("name", ["LATHE_CACHE_DIR", "LATHE_CACHE"])
def test_the_compiler_and_the_server_understand_both_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("LATHE_CACHE_DIR", "LATHE_CACHE"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, str(tmp_path / "cache"))
    store = open_store(None)
    assert store is not None and store.root == tmp_path / "cache"
    assert read_settings({}).cache_folder == tmp_path / "cache"


def test_the_documented_variable_of_the_cache_has_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATHE_CACHE_DIR", str(tmp_path / "new"))
    monkeypatch.setenv("LATHE_CACHE", str(tmp_path / "old"))
    store = open_store(None)
    assert store is not None and store.root == tmp_path / "new"
    assert read_settings({}).cache_folder == tmp_path / "new"
    assert read_settings({"cache_dir": tmp_path / "option"}).cache_folder == tmp_path / "option"
