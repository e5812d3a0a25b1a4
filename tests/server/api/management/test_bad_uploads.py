"""Bad models against the whole server with its real compiler: a clear 4xx, nothing written, still serving."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from lathe.server.app import create_app
from lathe.server.client import ApiError, Client
from lathe.server.serve import make_server
from lathe.server.settings import Settings
from loadtest.text_bodies import varint
from tests.server.server_thread import in_a_thread, until

DIGITS = Path(__file__).parents[4] / "model_repo" / "digits"
IMAGE = np.zeros((1, 1, 8, 8), np.float32)


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("service") / "repo"
    shutil.copytree(DIGITS / "1", root / "digits" / "1")
    return root


@pytest.fixture(scope="module")
def client(repo: Path) -> Iterator[Client]:
    """A client of a server with the bundled small model."""
    settings = Settings(port=0, model_repo=repo, threads=1, drain_timeout=2, child_timeout=20, child_memory=1 << 30)
    server = make_server(create_app(settings), settings)
    with in_a_thread(server) as port, Client(f"http://127.0.0.1:{port}", timeout=60) as connected:
        until(connected.ready)
        yield connected


def graph(*nodes: onnx.NodeProto, **constants: np.ndarray) -> onnx.ModelProto:
    """A model from x [n, 4] to y."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    y = onnx.ValueInfoProto(name="y")
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    return helper.make_model(
        helper.make_graph(list(nodes), "g", [x], [y], initializers), opset_imports=[helper.make_opsetid("", 17)]
    )


def with_external_data() -> bytes:
    proto = graph(helper.make_node("Add", ["x", "b"], ["y"]), b=np.zeros(4, np.float32))
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../../etc/passwd")
    return proto.SerializeToString()


def with_too_few_bytes() -> bytes:
    proto = graph(helper.make_node("Add", ["x", "b"], ["y"]), b=np.zeros(4, np.float32))
    proto.graph.initializer[0].dims[0] = 1 << 40
    return proto.SerializeToString()


def deep() -> bytes:
    """Protobuf nested 10,000 deep: graphs in attributes of nodes in graphs, as bytes."""
    body = b""
    for _ in range(10_000):
        for tag in (b"\x32", b"\x2a", b"\x0a"):  # attribute.g, node.attribute, graph.node
            body = tag + varint(len(body)) + body
    return b"\x08\x08" + b"\x3a" + varint(len(body)) + body


def duplicate_input() -> bytes:
    proto = graph(helper.make_node("Relu", ["x"], ["y"]))
    proto.graph.input.append(proto.graph.input[0])
    return proto.SerializeToString()


def complex_input() -> bytes:
    proto = graph(helper.make_node("Identity", ["x"], ["y"]))
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.COMPLEX64
    return proto.SerializeToString()


def nodes(*described: tuple[str, list[str], str], domain: str = "", **constants: np.ndarray) -> bytes:
    """A model of nodes given as operator, inputs and output."""
    made = [helper.make_node(op, inputs, [output], domain=domain) for op, inputs, output in described]
    return graph(*made, **constants).SerializeToString()


ADD_HUGE = [("ConstantOfShape", ["s"], "c"), ("Add", ["x", "c"], "y")]
BAD: dict[str, tuple[bytes, set[int], str]] = {  # the file, the possible statuses, a word of the message
    "noise": (b"\x08" + bytes(range(1, 200)), {422}, ""),
    "truncated": ((DIGITS / "2" / "model.onnx").read_bytes()[:50_000], {422}, ""),
    "text": (b"hello world", {422}, ""),
    "pickle": (pickle.dumps({"weights": [1, 2, 3]}), {415}, "pickle"),
    "old pickle": (pickle.dumps({"weights": [1, 2, 3]}, protocol=0), {422}, ""),
    "external data": (with_external_data(), {422}, "expected its data inside the file"),
    "nested": (deep(), {422}, ""),
    "too few bytes": (with_too_few_bytes(), {422}, "b"),
    "unknown operator": (nodes(("Frobnicate", ["x"], "y")), {422}, "Frobnicate"),
    "foreign domain": (nodes(("Gelu", ["x"], "y"), domain="my.ops"), {422}, "my.ops"),
    "cycle": (nodes(("Add", ["x", "b"], "a"), ("Relu", ["a"], "b"), ("Relu", ["b"], "y")), {422}, ""),
    "shapes that do not fit": (nodes(("MatMul", ["x", "w"], "y"), w=np.zeros((5, 3), np.float32)), {422}, "MatMul"),
    "twice the same input": (duplicate_input(), {422}, "x"),
    "a type that the protocol lacks": (complex_input(), {422}, ""),
    "huge result": (nodes(*ADD_HUGE, s=np.array([1 << 20, 1 << 20, 4])), {413, 422}, ""),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_model_is_refused_clearly_and_the_server_continues(name: str, client: Client, repo: Path) -> None:
    content, statuses, word = BAD[name]
    with pytest.raises(ApiError) as refused:
        client.upload("digits", content, promote=True)
    error = refused.value
    assert error.status in statuses, str(error)
    assert word in str(error)
    for leak in (str(repo), "/tmp", ".py", "Traceback", "0x"):
        assert leak not in str(error)
    assert client.infer("digits", {"image": IMAGE}).version == 1
    assert client.model("digits").versions == [1]
    assert [model.name for model in client.models()] == ["digits"]
    assert not list(repo.glob(".lathe/staging/*/*/*"))


def test_a_bad_first_version_creates_no_model(client: Client, repo: Path) -> None:
    with pytest.raises(ApiError):
        client.upload("fresh", b"hello world")
    assert not (repo / "fresh").exists()
    with pytest.raises(ApiError) as missing:
        client.model("fresh")
    assert missing.value.status == 404
