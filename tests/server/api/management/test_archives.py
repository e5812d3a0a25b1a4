"""Models with external weights: packed by the client, unpacked by the server, served like any other model."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from lathe.core.errors import ModelError
from lathe.server.app import create_app
from lathe.server.archive import body_of
from lathe.server.client import ApiError, Client
from lathe.server.serve import make_server
from lathe.server.settings import Settings
from tests.server.server_thread import in_a_thread, until

WEIGHT = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(3, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("archives") / "repo"
    root.mkdir()
    return root


@pytest.fixture(scope="module")
def client(repo: Path) -> Iterator[Client]:
    """A client of a server with the real compiler and an empty repository."""
    with serving(repo) as connected:
        yield connected


@contextmanager
def serving(repo: Path, *, strict: bool = True) -> Iterator[Client]:
    """A server in a thread, and a client of it; if `strict`, it is ready once all models are loaded."""
    settings = Settings(
        port=0,
        model_repo=repo,
        threads=1,
        drain_timeout=2,
        max_upload=1 << 20,
        poll_interval=0.1,
        settle_time=0.2,
        strict_readiness=strict,
    )
    with (
        in_a_thread(make_server(create_app(settings), settings)) as port,
        Client(f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        until(client.ready)
        yield client


def write_model(folder: Path, location: str = "data/w.bin", scale: float = 1.0) -> Path:
    """A matrix product whose weight is in another file."""
    tensor = numpy_helper.from_array(WEIGHT * np.float32(scale), "w")
    data = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    tensor.external_data.add(key="offset", value="16")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [tensor],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path = folder / "net.onnx"
    path.write_bytes(model.SerializeToString())
    if not location.startswith(("/", "..")):
        (folder / location).parent.mkdir(exist_ok=True)
        (folder / location).write_bytes(b"\7" * 16 + data + b"what no tensor refers to")
    return path


def test_weights_beside_the_file_are_uploaded(client: Client, repo: Path, tmp_path: Path) -> None:
    published = client.upload("folded", write_model(tmp_path), key="once")
    assert published.live
    answer = client.infer("folded", {"x": X})
    np.testing.assert_allclose(answer.outputs["y"], X @ WEIGHT, 1e-5, 1e-6)
    folder = repo / "folded" / "1"
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "model.onnx", "weights.bin"]
    assert (folder / "weights.bin").read_bytes() == WEIGHT.tobytes()
    manifest = client.version("folded", 1).manifest
    assert manifest is not None
    assert sorted(manifest["files"]) == ["model.onnx", "weights.bin"]
    onnx.load(folder / "model.onnx")  # any tool finds the weights
    assert client.upload("folded", tmp_path / "net.onnx", key="once").replayed


@pytest.mark.slow
def test_other_weights_are_another_content(client: Client, tmp_path: Path) -> None:
    """The model files of both are equal, byte for byte."""
    first = client.upload("twice", write_model(tmp_path))
    second = client.upload("twice", write_model(tmp_path, scale=2), promote=True)
    assert first.digest != second.digest
    np.testing.assert_allclose(client.infer("twice", {"x": X}).outputs["y"], X @ (2 * WEIGHT), 1e-5, 1e-6)
    np.testing.assert_allclose(client.infer("twice", {"x": X}, 1).outputs["y"], X @ WEIGHT, 1e-5, 1e-6)


@pytest.mark.slow
def test_a_folder_copied_by_hand_may_contain_weights(client: Client, repo: Path, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    path = write_model(tmp_path / "1", "w.bin")
    path.rename(path.with_name("model.onnx"))
    (repo / "copied").mkdir()
    shutil.copytree(tmp_path / "1", repo / "copied" / "1")
    until(lambda: "copied" in [model.name for model in client.models()] and client.model("copied").ready)
    np.testing.assert_allclose(client.infer("copied", {"x": X}).outputs["y"], X @ WEIGHT, 1e-5, 1e-6)


@pytest.mark.parametrize("location", ["../w.bin", "/etc/passwd", "missing.bin"])
def test_files_outside_of_the_models_folder_are_not_sent(client: Client, location: str, tmp_path: Path) -> None:
    path = write_model(tmp_path, location if location != "missing.bin" else "w.bin")
    if location == "missing.bin":
        (tmp_path / "w.bin").unlink()
    with pytest.raises(ModelError, match="tensor 'w': its data lies"):
        client.upload("elsewhere", path)
    assert "elsewhere" not in [model.name for model in client.models()]


@pytest.mark.slow
def test_the_server_reads_only_files_of_the_archive(client: Client, tmp_path: Path) -> None:
    """It reads only a version's own files, and only those that came in an archive."""
    model = write_model(tmp_path, "w.bin").read_bytes()
    with pytest.raises(ApiError, match="has external data") as alone:
        client.upload("trust", model)
    assert alone.value.status == 422
    for location in ("/etc/passwd", "../../1/weights.bin", "weights.bin"):
        lying = write_model(tmp_path, location).read_bytes() if location != "weights.bin" else model
        with pytest.raises(ApiError, match="its data lies") as refused:
            client.upload("trust", packed({"model.onnx": lying, "more.bin": b"x" * 500}))
        assert refused.value.status == 422
    with pytest.raises(ApiError, match=r"'\.\./model\.onnx'") as name:
        client.upload("trust", packed({"../model.onnx": model}))
    assert name.value.status == 400
    with pytest.raises(ApiError, match="most that may be uploaded") as large:
        client.upload("trust", packed({"model.onnx": model, "w.bin": bytes(2 << 20)}))
    assert large.value.status == 413


def packed(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as file:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.mark.slow
def test_a_version_of_several_files_is_loaded_again(repo: Path, client: Client, tmp_path: Path) -> None:
    """Another server over the same repository checks both files and serves them; with damaged weights it does not."""
    client.upload("again", write_model(tmp_path))
    copy = tmp_path / "repo"
    shutil.copytree(repo / "again", copy / "again")
    with serving(copy) as other:
        np.testing.assert_allclose(other.infer("again", {"x": X}).outputs["y"], X @ WEIGHT, 1e-5, 1e-6)
    weights = copy / "again" / "1" / "weights.bin"
    weights.write_bytes(bytes(weights.stat().st_size))
    (copy / "digits").mkdir()
    shutil.copytree(Path(__file__).parents[4] / "model_repo" / "digits" / "1", copy / "digits" / "1")
    with serving(copy, strict=False) as third:
        with pytest.raises(ApiError):
            third.infer("again", {"x": X})
        (version,) = third.versions("again")
        assert "weights.bin" in version.reason


def test_a_plain_model_is_sent_as_it_is(tmp_path: Path) -> None:
    for content in (b"hello world", (Path(__file__).parents[4] / "model_repo/digits/1/model.onnx").read_bytes()):
        (tmp_path / "model.onnx").write_bytes(content)
        body = body_of(tmp_path / "model.onnx")
        assert body.content_type == "application/octet-stream"
        assert b"".join(body.pieces()) == content
