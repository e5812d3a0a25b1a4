"""The output of `lathe push` about a new version, and of `lathe infer`, against a server of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.server.cli.running import PROJECT, run_lathe
from tests.server.cli.test_cli import server_process
from tests.server.repository.world import toy
from tests.server.service import service

pytestmark = pytest.mark.timeout(600)
SMALL = PROJECT / "model_repo" / "digits" / "1" / "model.onnx"


def doubling(path: Path, rows: int | str) -> Path:
    """Write a model that doubles rows of four numbers."""
    kinds = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", kinds[:1], kinds[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    repo = tmp_path_factory.mktemp("repo")
    with server_process(repo, tmp_path_factory.mktemp("cache")) as (_, url):
        yield url


def output_fields(said: str) -> dict[str, str]:
    """The value of each line of a push's output, by its name."""
    rows = [line.split(None, 1) for line in said.splitlines() if line.startswith("  ")]
    return {name: text.strip() for name, text in rows}


@pytest.mark.slow
def test_push_describes_the_version_and_what_to_type_next(url: str, tmp_path: Path) -> None:
    model = doubling(tmp_path / "free.onnx", "n")
    said = run_lathe("push", "free", str(model), "--url", url)
    assert said.startswith("free version 1 is ready, live\n")
    assert output_fields(said) == {
        "inputs": "x FP32[-1, 4]",
        "outputs": "y FP32[-1, 4]",
        "size": f"{model.stat().st_size} bytes",
        "batches": "up to 32 rows",
        "ask": f"POST {url}/v2/models/free/infer",
        "example": f"lathe infer free --url {url}",
    }
    again = run_lathe("push", "free", str(model), env={"LATHE_URL": url})
    assert again.startswith("free version 2 is ready, not live yet\n")
    found = output_fields(again)
    assert found["note"] == "the same bytes as version 1"
    assert found["ask"] == f"POST {url}/v2/models/free/versions/2/infer"
    for name in ("example", "next"):  # both are commands that work unchanged
        assert found[name].startswith("lathe ")
        assert "version 2" in run_lathe(*found[name].split()[1:])
    assert "version 2" in run_lathe("infer", "free", "--url", url)


def test_push_says_why_a_model_does_not_batch_and_what_to_do(url: str, tmp_path: Path) -> None:
    said = run_lathe("push", "fixed", str(doubling(tmp_path / "fixed.onnx", 1)), "--url", url)
    batches = output_fields(said)["batches"]
    assert batches.startswith("no: ")
    assert batches.endswith("; export it with a symbolic leading dimension of x (torch.onnx.export: dynamic_shapes)")


def test_an_idempotency_key_is_not_an_api_key(url: str, tmp_path: Path) -> None:
    model = str(doubling(tmp_path / "once.onnx", "n"))
    first, second = (run_lathe("push", "once", model, "--url", url, "--idempotency-key", "build-7") for _ in range(2))
    assert first.splitlines()[0] == second.splitlines()[0] == "once version 1 is ready, live"
    assert "No such option: --key" in run_lathe(
        "push", "once", model, "--key", "lathe_secret", "--url", url, fails=True
    )


def test_a_refused_file_is_one_line(url: str, tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"\x08\x07no model")
    said = run_lathe("push", "bad", str(tmp_path / "bad.onnx"), "--url", url, fails=True)
    assert said.startswith("error: ") and said.count("\n") == 1


@pytest.fixture(scope="module")
def digits(url: str) -> str:
    run_lathe("push", "digits", str(SMALL), "--url", url)
    return url


@pytest.mark.slow
def test_infer_reads_inputs_from_three_kinds_of_files(digits: str, tmp_path: Path) -> None:
    document = PROJECT / "docs" / "digit.json"
    image = np.array(json.loads(document.read_text())["inputs"][0]["data"], np.float32).reshape(1, 1, 8, 8)
    np.save(tmp_path / "in.npy", image)
    np.savez(tmp_path / "in.npz", image=image)
    written = tmp_path / "out.npz"
    answers = []
    for file in (document, tmp_path / "in.npy", tmp_path / "in.npz"):
        shown = run_lathe("infer", "digits", "--inputs", str(file), "--url", digits, "-o", str(written))
        assert "[1, 10]" in shown and "answered by digits version 1" in shown
        answers.append(np.load(written)["probabilities"])
    assert answers[0].argmax() == 6  # version 1 reads this five as a six
    np.testing.assert_array_equal(answers[0], answers[1])
    np.testing.assert_array_equal(answers[0], answers[2])
    shown = json.loads(run_lathe("infer", "digits", "-i", str(document), "--json", "--url", digits))
    np.testing.assert_allclose(shown["outputs"]["probabilities"], answers[0])
    assert shown["version"] == 1
    assert "random numbers; answered by digits version 1" in run_lathe("infer", "digits", "--url", digits)
    assert "answered by digits version 1" in run_lathe("infer", "digits", "--version", "live", "--url", digits)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "Expecting property name"),
        ("[]", 'expected an object with "inputs"'),
        (
            '{"inputs": [{"name": "image"}]}',
            "inputs[0]: expected name, shape, datatype and data; missing: shape, datatype, data",
        ),
        (
            '{"inputs": [{"name": "i", "shape": [1], "datatype": "F", "data": [1]}]}',
            "inputs[0].datatype: expected one of BOOL, UINT8,",
        ),
        ('{"inputs": [{"name": "i", "shape": [2], "datatype": "FP32", "data": [1]}]}', "cannot reshape"),
        ('{"inputs": [7]}', "inputs[0]: expected an object"),
    ],
)
def test_unreadable_inputs_are_one_line(content: str, expected: str, digits: str, tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text(content)
    said = run_lathe("infer", "digits", "-i", str(tmp_path / "in.json"), "--url", digits, fails=True)
    assert said.startswith(f"error: --inputs {tmp_path}/in.json: ") and said.count("\n") == 1
    assert expected in said


def test_inputs_of_the_wrong_kind_are_refused_by_the_server(digits: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", wrong=np.zeros((1, 1, 8, 8), np.float32))
    said = run_lathe("infer", "digits", "-i", str(tmp_path / "in.npz"), "--url", digits, fails=True)
    assert "image" in said and said.count("\n") == 1
    assert "expected a file name that ends in .npz" in run_lathe(
        "infer", "digits", "-o", "x.json", "--url", digits, fails=True
    )


def test_a_push_with_other_inputs_says_what_the_promotion_needs(tmp_path: Path) -> None:
    with service(tmp_path / "repo") as running, running.client() as client:
        client.upload("m", toy(2.0))
        for name, content in (("same", toy(3.0)), ("wider", toy(3.0, (-1, 5)))):
            (tmp_path / f"{name}.onnx").write_bytes(content)
        where = ("--url", running.url)
        same = output_fields(run_lathe("push", "m", str(tmp_path / "same.onnx"), *where))
        assert "note" not in same and same["next"] == f"lathe promote m 2 --url {running.url}"
        wider = output_fields(run_lathe("push", "m", str(tmp_path / "wider.onnx"), *where))
        assert wider["note"] == "inputs or outputs differ from those of version 1, which is live"
        assert wider["next"] == f"lathe promote m 3 --allow-signature-change --url {running.url}"
        assert "m version 3 is live" in run_lathe(*wider["next"].split()[1:])


def test_all_names_of_wrong_inputs_are_in_one_error(tmp_path: Path) -> None:
    with service(tmp_path / "repo") as running, running.client() as client:
        client.upload("m", toy(2.0))
        file = tmp_path / "iris.npz"
        np.savez(file, y=np.zeros(3, np.int64), z=np.zeros((3, 4), np.float32))
        said = run_lathe("infer", "m", "-i", str(file), "--url", running.url, fails=True)
    assert said == f"error: --inputs {file}: expected ['x'], got ['y', 'z']\n"
