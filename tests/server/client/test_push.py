"""`push` without PyTorch: scikit-learn's estimators compared with their own predictions, and ONNX in all its forms.

Also everything that is refused. tests/exporters/test_push.py pushes PyTorch's models."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from sklearn import cluster, datasets, ensemble, feature_extraction, linear_model, pipeline, preprocessing, svm

import lathe
from lathe import nn
from lathe.server.client import AsyncClient, Client, ClientError
from lathe.server.client.exporting import Options, export_model
from tests.server.cli.running import run_lathe
from tests.server.cli.test_cli import server_process

pytestmark = pytest.mark.timeout(600)
IRIS = datasets.load_iris()
X = IRIS.data.astype(np.float32)
NAMES = IRIS.target_names[IRIS.target]
TEXTS = ["the cat sat", "on the mat, the dog", "dog and cat", "nothing here"] * 3


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with server_process(tmp_path_factory.mktemp("repo"), tmp_path_factory.mktemp("cache")) as (_, url):
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Client]:
    with Client(url) as connected:
        yield connected


# -- scikit-learn -----------------------------------------------------------------------------------------------------

CLASSIFIERS = {
    "forest": ensemble.RandomForestClassifier(10, random_state=0),
    "scaled": pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.LogisticRegression()),
}


@pytest.mark.parametrize("kind", CLASSIFIERS)
@pytest.mark.sample(2)
def test_a_classifier_returns_labels_and_probabilities(kind: str, client: Client) -> None:
    model = CLASSIFIERS[kind].fit(X, NAMES)
    assert client.push(kind, model).live
    answer = client.infer(kind, {"X": X})
    assert [label.decode() for label in answer["label"]] == model.predict(X).tolist()
    np.testing.assert_allclose(answer["probabilities"], model.predict_proba(X), 1e-4, 1e-5)
    assert client.describe(kind)["inputs"] == [{"name": "X", "datatype": "FP32", "shape": [-1, 4]}]
    assert client.config(kind)["max_batch_size"] > 1


@pytest.mark.parametrize(
    ("model", "ask"),
    [
        (linear_model.Ridge(), "predict"),
        (svm.LinearSVC(), "predict"),  # a classifier whose converter never makes maps
        (preprocessing.StandardScaler(), "transform"),
        (ensemble.IsolationForest(n_estimators=10, random_state=0), "predict"),
        (cluster.KMeans(3, random_state=0, n_init=1), "predict"),
    ],
    ids=lambda given: type(given).__name__ if not isinstance(given, str) else given,
)
@pytest.mark.sample(5)
def test_other_estimators_predict_alike(model: Any, ask: str, client: Client) -> None:
    model.fit(X, IRIS.target)
    name = type(model).__name__.lower()
    client.push(name, model)
    got = next(iter(client.infer(name, {"X": X}).outputs.values()))
    expected = getattr(model, ask)(X)
    np.testing.assert_allclose(got.reshape(expected.shape), expected, 1e-3, 1e-4)


def test_an_example_determines_types_and_text_columns(client: Client) -> None:
    wide = linear_model.LinearRegression().fit(IRIS.data, IRIS.target)
    client.push("wide", wide, IRIS.data[:1])
    assert client.describe("wide")["inputs"][0]["datatype"] == "FP64"
    got = client.infer("wide", {"X": IRIS.data})["variable"]
    np.testing.assert_allclose(got[:, 0], wide.predict(IRIS.data), 1e-6)

    texts = pipeline.make_pipeline(feature_extraction.text.CountVectorizer(), linear_model.LogisticRegression())
    texts.fit(TEXTS, [0, 1, 2, 3] * 3)
    with pytest.raises(ClientError, match=r"content: Pipeline has no n_features_in_; give an example"):
        client.push("texts", texts)
    client.push("texts", texts, TEXTS[:1])
    got = client.infer("texts", {"X": np.array(TEXTS, object)})["label"]
    assert got.tolist() == texts.predict(TEXTS).tolist()


def test_both_clients_push_in_one_call(url: str) -> None:
    model = linear_model.LinearRegression().fit(X, IRIS.target)

    async def push() -> Any:
        async with AsyncClient(url) as client:
            for _ in range(2):
                assert (await client.push("asyncio", model, metadata={"by": "asyncio"}, key="once")).version == 1
            return (await client.infer("asyncio", {"X": X[:3]}))["variable"]

    np.testing.assert_allclose(asyncio.run(push())[:, 0], model.predict(X[:3]), 1e-4)


def test_the_same_estimator_is_exported_to_the_same_file() -> None:
    """Otherwise the repetition of a push with its idempotency key would be refused."""
    for model in (*CLASSIFIERS.values(), linear_model.Ridge(), preprocessing.StandardScaler()):
        model.fit(X, IRIS.target)
        digests = []
        for _ in range(2):
            with export_model(model, Options()) as body:
                digests.append(body.sha256())
        assert digests[0] == digests[1], model


# -- ONNX
# ---------------------------------------------------------------------------------------------------------------


def doubled() -> lathe.Graph:
    return nn.trace(lambda x: x + x, {"x": "float32[n,4]"}, ["y"])


def test_onnx_in_every_form_is_the_same_upload(tmp_path: Path) -> None:
    data = lathe.export(doubled())
    (tmp_path / "model.onnx").write_bytes(data)
    forms = (data, tmp_path / "model.onnx", str(tmp_path / "model.onnx"), onnx.load_from_string(data), doubled())
    for form in forms:
        with export_model(form, Options()) as body:
            sent = b"".join(body.pieces())
        assert onnx.load_from_string(sent) == onnx.load_from_string(data), type(form)


def test_weights_in_other_files_are_uploaded(tmp_path: Path) -> None:
    model = onnx.load_from_string(lathe.export(nn.trace(nn.Linear(64, 64), {"x": "float32[n,64]"})))
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    with export_model(tmp_path / "model.onnx", Options()) as body:
        assert body.content_type == "application/x-tar"
        assert body.size > 64 * 64 * 4


# -- refusals
# -----------------------------------------------------------------------------------------------------------


def torch_archive(path: Path, member: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{path.stem}/{member}", "x")
    return path


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def numpy_archive(path: Path) -> Path:
    np.savez(path, x=np.zeros(3), y=np.zeros(3))
    return path


def pickled(path: Path, protocol: int) -> Path:
    path.write_bytes(pickle.dumps(linear_model.Ridge().fit(X, IRIS.target), protocol=protocol))
    return path


REFUSED: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "a number": (lambda _: 7, {}, "content: expected an ONNX file (path, bytes or onnx.ModelProto), a pipeline.toml"),
    "a function": (lambda _: doubled, {}, "or a lathe.Graph, got builtins.function"),
    "a class": (lambda _: linear_model.Ridge, {}, "got the class sklearn.linear_model._ridge.Ridge, not an object"),
    "a module": (lambda _: nn.Linear(2, 2), {}, "Linear: trace it first, lathe.nn.trace(model, "),
    "not fitted": (lambda _: linear_model.Ridge(), {}, "content: This Ridge instance is not fitted yet."),
    "no converter": (lambda _: cluster.DBSCAN().fit(X), {}, "content: skl2onnx: "),
    "an option": (lambda _: doubled(), {"example": X}, "example: does not apply to a lathe.Graph"),
    "other names": (lambda _: linear_model.Ridge().fit(X, X), {"input_names": ["x"]}, "input_names: does not apply"),
    "a Python": (lambda _: b"onnx", {"python": "python3"}, "python: does not apply to the bytes of an ONNX file"),
    "a dataset": (
        lambda to: numpy_archive(to / "iris.npz"),
        {},
        "iris.npz: is a NumPy archive (.npz); expected an ONNX file, an exported program of PyTorch (.pt2), or a "
        "pipeline.toml",
    ),
    "gzip": (lambda to: written(to / "m.gz", b"\x1f\x8b\x08"), {}, "m.gz: is a gzip stream; expected an ONNX file"),
    "a recipe": (lambda to: written(to / "recipe.toml", b"epochs = 1"), {}, "recipe.toml: is a TOML file of"),
    "torch.save": (lambda to: torch_archive(to / "m.pt", "data.pkl"), {}, "m.pt: holds pickled objects (torch.save)"),
    "a pickle": (lambda to: pickled(to / "m.pkl", 2), {}, "m.pkl: is a pickle; load it in Python, and push the model"),
    "a new pickle": (lambda to: pickled(to / "m.pkl", 5), {}, "m.pkl: is a pickle"),
    "no torch": (lambda to: torch_archive(to / "m.pt2", "archive_format"), {}, "has no torch (No module named"),
    "no Python": (
        lambda to: torch_archive(to / "m.pt2", "archive_format"),
        {"python": "/none/python"},
        "python /none/python: No such file or directory",
    ),
    "no program": (
        lambda to: torch_archive(to / "m.pt2", "archive_format"),
        {"python": "/bin/false"},
        "m.pt2: its Python ended with 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_value_that_cannot_be_pushed_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    make, options, complaint = REFUSED[case]
    with Client("http://127.0.0.1:9") as client, pytest.raises(ClientError) as refused:  # no request is sent
        client.push("m", make(tmp_path), **options)
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_converter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skl2onnx", None)
    model = linear_model.Ridge().fit(X, IRIS.target)
    with Client("http://127.0.0.1:9") as client, pytest.raises(ClientError, match="pip install skl2onnx"):
        client.push("m", model)


def test_a_missing_file_is_refused() -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(FileNotFoundError, match=r"none\.onnx"):
        client.push("m", "none.onnx")


def test_pushing_onnx_imports_no_framework(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(lathe.export(doubled()))
    script = """
import sys
from lathe.server.client import Client, ClientError
try:
    Client("http://127.0.0.1:9").push("m", sys.argv[1])
except ClientError as error:
    assert "no server answers" in str(error), error
assert not {"torch", "sklearn", "skl2onnx", "onnxscript"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script, tmp_path / "m.onnx"], check=True)


@pytest.mark.slow
def test_the_command_line_names_the_missing_package(tmp_path: Path) -> None:
    program = torch_archive(tmp_path / "m.pt2", "archive_format")
    said = run_lathe("push", "m", str(program), "--url", "http://127.0.0.1:9", fails=True)
    assert said == (
        f"error: {program}: a .pt2 file needs torch and onnxscript, and {sys.executable} has no torch (No module named "
        "'torch')\n"
    )
    said = run_lathe("push", "m", str(program), "--python", "/none", "--url", "http://127.0.0.1:9", fails=True)
    assert said == "error: python /none: No such file or directory\n"
