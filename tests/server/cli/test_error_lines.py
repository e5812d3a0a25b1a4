"""Bad files and bad answers: each command ends with one line of error and status 1 or 2, never with a traceback."""

from __future__ import annotations

import functools
import itertools
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
import typer
from typer.testing import CliRunner, Result

from lathe.server.cli.app import app
from lathe.server.repository.file_lock import FileLock
from tests.each_case import each_case
from tests.server.generation.tiny_model import gguf_content

JOB = "0123456789abcdef0123"
MODEL = onnx.helper.make_model(
    onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 4])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 2])],
        [onnx.numpy_helper.from_array(np.ones((4, 2), np.float32), "w")],
    ),
    opset_imports=[onnx.helper.make_opsetid("", 21)],
    ir_version=10,
).SerializeToString()
RECIPE = 'epochs = 1\nmodel = {architecture = "mlp", hidden = [2]}\noptimizer = {kind = "sgd", rate = 0.1}\n'


def leaves(group: Any, *names: str) -> Iterator[tuple[str, Any]]:
    """All commands below a group, by their words."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, *names, name)
        else:
            yield " ".join((*names, name)), command


LATHE: Any = typer.main.get_command(app)  # made once: it takes longer than most commands
COMMANDS = dict(leaves(LATHE))
CALLING = [name for name, command in COMMANDS.items() if any(each.name == "url" for each in command.params)]

# Valid arguments of each command. A positional file stands in braces.
ARGUMENTS: Mapping[str, str] = {
    "serve": "--port 0 --model-repo folder --tls-cert model.onnx",
    "infer": "m",
    "push": "m {model.onnx}",
    "models": "",
    "versions": "m",
    "promote": "m 2",
    "rollback": "m",
    "alias": "m staging 2",
    "delete": "m 2",
    "load": "m",
    "unload": "m",
    "status": "",
    "health": "",
    "top": "--rounds 1",
    "audit": "m",
    "train": "{recipe.toml} --data data.npz --out out --threads 1",
    "compress": "m --data data.npz",
    "compile": "{model.onnx} -o new.lathe --tune off --threads 1",
    "run": "{model.onnx} --threads 1",
    "inspect": "{model.onnx}",
    "profile": "{model.onnx} --batch 1 --runs 1 --threads 1",
    "bench": "{model.onnx} --batch 1 --seconds 0.01 --threads 1",
    "prune": "{model.onnx} --weights 50% -o new.onnx",
    "quantize": "{model.onnx} --data data.npz -o new.onnx --threads 1",
    "kernels": "--target sm_90 --model model.onnx -o new.tar",
    "load-kernels": "{kernels.tar}",
    "generate": "{model.gguf} Hello --max-tokens 2 --threads 1",
    "chat": "{model.gguf} --threads 1",
    "completion": "bash",
    "keys add": "ann --scope infer --file keys.json",
    "keys list": "--file keys.json",
    "keys revoke": "0123 --file keys.json",
    "canary start": "m 2",
    "canary watch": "m",
    "canary cancel": "m",
    "rollout watch": "m --rounds 1",
    "jobs list": "",
    "jobs show": JOB,
    "jobs watch": JOB,
    "jobs logs": JOB,
    "jobs report": f"{JOB} -o new.html",
    "jobs cancel": JOB,
    "jobs delete": JOB,
    "datasets push": "d {data.npz}",
    "datasets describe": "{data.npz}",
    "datasets list": "",
    "datasets show": "d",
    "datasets delete": "d",
}
TRAIN_ON_SERVER = "recipe.toml --dataset d --url http://127.0.0.1:8080"
WRITTEN = {"--output", "--out", "--picture", "--trace", "--tensorboard"}  # what a command writes
SUFFIXES = {"infer --inputs": (".npz", ".npy", ".json"), "datasets push content": (".npz", ".csv", ".parquet", "")}


def file_parameters() -> Iterator[tuple[str, str]]:
    """Each command with each of its parameters that is a file or folder."""
    for name, command in COMMANDS.items():
        for each in command.params:
            if each.type_descriptor.annotation in (Path, list[Path]):
                yield name, each.opts[0]


LOCAL = [name for name in COMMANDS if name not in {*CALLING, "serve", "kernels", "load-kernels", "keys revoke"}]
# A server reads its file of keys when it starts. The connection's files are read in one place, for all commands.
ELSEWHERE = {"--keys-file", "--ca", "--cert", "--cert-key"}
READ = [
    (name, option)
    for name, option in file_parameters()
    if option not in WRITTEN and (option not in ELSEWHERE or name == "models")
]
BAD_FILES = {
    "missing": None,
    "below a file": None,
    "too long a name": None,
    "a folder": None,
    "unreadable": None,
    "empty": b"",
    "binary": bytes(range(256)) * 8,
    "half an archive": b"PK\x03\x04" + bytes(100),
    "JSON": b'[{"a": 1}]\n',
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a valid file of each kind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("typer.testing._get_command", lambda app: LATHE, raising=False)
    monkeypatch.setattr("lathe.server.cli.serve._run", lambda settings: None)
    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", lambda *_: httpx.Response(404, json={"error": "none"}))
    (tmp_path / "folder").mkdir()
    (tmp_path / "model.onnx").write_bytes(MODEL)
    (tmp_path / "model.gguf").write_bytes(gguf_content())
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "parent.toml").write_text(RECIPE.replace('architecture = "mlp", hidden = [2]', "parent = true"))
    (tmp_path / "keys.json").write_text('{"schema": 1, "keys": []}')
    np.savez(tmp_path / "data.npz", x=np.ones((8, 4), np.float32), y=np.arange(8) % 2)
    return tmp_path


def bad_file(folder: Path, case: str, suffix: str) -> Path:
    if case == "unreadable":
        if not Path("/proc/self/mem").exists():
            pytest.skip("needs Linux")
        return Path("/proc/self/mem")  # reading address 0 is an OSError, for root too
    if (content := BAD_FILES[case]) is not None:
        (folder / f"{case}{suffix}").write_bytes(content)
        return folder / f"{case}{suffix}"
    if case == "a folder":
        (folder / f"bad{suffix}").mkdir()
    places = {
        "below a file": f"model.onnx/a{suffix}",
        "too long a name": "a" * 300 + suffix,
        "a folder": f"bad{suffix}",
    }
    return folder / places.get(case, f"missing/a{suffix}")


def command_line(command: str, parameter: str = "", file: Path | None = None) -> list[str]:
    """The words of a command with its valid arguments; `file` is the value of one parameter."""
    words = [
        word if word[0] != "{" else word[1:-1] if parameter.startswith("-") or file is None else str(file)
        for word in ARGUMENTS[command].split()
    ]
    option = [parameter, str(file)] if parameter.startswith("-") else []
    if command == "train" and parameter == "--parent":
        words[0] = "parent.toml"
    return [*command.split(), *words, *option]


def run(words: list[str], **variables: str) -> Result:
    clean = dict.fromkeys(("LATHE_URL", "LATHE_KEY", "LATHE_CA", "LATHE_CERT", "LATHE_KEYS_FILE"))
    return CliRunner().invoke(app, words, env={"COLUMNS": "240", **clean, **variables})


def check(result: Result, *statuses: int) -> None:
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in statuses, result.output
    if result.exit_code:
        lines = result.stderr.splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr


def test_every_command_is_tested() -> None:
    assert ARGUMENTS.keys() == COMMANDS.keys()
    assert len(READ) > 20


@pytest.mark.parametrize("command", [*LOCAL, "train"])
def test_the_arguments_are_valid(command: str, folder: Path) -> None:
    check(run(command_line(command)), 0)


@pytest.mark.parametrize(("command", "parameter"), READ, ids=map(" ".join, READ))
def test_a_bad_file_is_one_line(command: str, parameter: str, folder: Path) -> None:
    suffixes = SUFFIXES.get(f"{command} {parameter}")
    if suffixes is None:
        named = [word[1:-1] for word in ARGUMENTS[command].split() if word[0] == "{"]
        suffixes = (Path(named[0]).suffix if named and not parameter.startswith("-") else ".npz",)
    with each_case() as case:
        for kind, suffix in itertools.product(BAD_FILES, suffixes):
            with case(f"{kind}, {suffix}"):
                check(run(command_line(command, parameter, bad_file(folder, kind, suffix))), 1, 2)


ANSWERS: Mapping[str, Any] = {
    "HTML": {"status_code": 200, "html": "<html>\n<p>hello</p>\n</html>"},
    "an error page": {"status_code": 502, "html": "<html>\n<p>bad gateway</p>\n</html>"},
    "an object as error": {"status_code": 401, "json": {"error": {"message": "no"}, "code": 3}},
    "a list as error": {"status_code": 404, "json": {"error": ["no"]}},
    "null as error": {"status_code": 400, "json": {"error": None}},
    "no object as error": {"status_code": 500, "json": ["no"]},
    "a redirect": {"status_code": 302, "headers": {"location": "http://127.0.0.1:1/"}},
    "nothing": {"status_code": 200, "content": b""},
    "null": {"status_code": 200, "content": b"null"},
    "an empty object": {"status_code": 200, "json": {}},
    "an empty list": {"status_code": 200, "json": []},
    "a number": {"status_code": 200, "json": 3},
    "a list of numbers": {"status_code": 200, "json": [1, 2]},
    "an object of objects": {"status_code": 200, "json": {"inputs": {}, "outputs": {}, "name": {}, "version": {}}},
    "other bytes": {"status_code": 200, "content": bytes(range(128, 256))},
    "deep JSON": {"status_code": 200, "content": b"[" * 5000 + b"]" * 5000},
    "damaged gzip": {"status_code": 200, "content": b"no gzip", "headers": {"content-encoding": "gzip"}},
}
FAILURES = {
    "closes": httpx.RemoteProtocolError("Server disconnected without sending a response."),
    "resets": httpx.ReadError("Connection reset by peer"),
    "is silent": httpx.ReadTimeout("timed out"),
    "does not listen": httpx.ConnectError("Connection refused"),
}
# Commands that take any body, or none, of a successful answer.
UNREAD = {"load", "unload", "health", "top", "jobs logs", "jobs report"}


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of a command, which take no time; a command that makes too many waits for ever."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        assert len(pauses) < 100, "the command does not end"

    monkeypatch.setattr(time, "sleep", pause)
    return pauses


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", CALLING)
def test_a_bad_answer_is_one_line(command: str, pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["train", *TRAIN_ON_SERVER.split()] if command == "train" else command_line(command)
    with each_case() as case:
        for kind in (*ANSWERS, *FAILURES):
            pauses.clear()
            monkeypatch.setattr(httpx.HTTPTransport, "handle_request", functools.partial(answer, kind))
            with case(kind):
                check(run(line), *((0, 1) if command in UNREAD or kind == "an empty list" else (1,)))


def answer(kind: str, request: httpx.Request) -> httpx.Response:
    request.read()
    if kind in FAILURES:
        raise FAILURES[kind]
    return httpx.Response(**ANSWERS[kind])


WRITING = [(name, option) for name, option in file_parameters() if option in WRITTEN and name != "kernels"]
BAD_PLACES = ("folder", "model.onnx/new{}", "missing/new{}", "/proc/new{}", "a" * 300 + "{}")


@pytest.mark.parametrize(("command", "parameter"), WRITING, ids=map(" ".join, WRITING))
def test_a_place_that_cannot_be_written_is_one_line(
    command: str, parameter: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {"model_name": "m", "model_version": "1", "outputs": [], "name": "m", "inputs": []}
    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", lambda *_: httpx.Response(200, json=answer))
    suffix = {"infer": ".npz", "inspect": ".svg", "train": ""}.get(command, ".out")
    for place in BAD_PLACES:
        shutil.rmtree(folder / "out", ignore_errors=True)
        check(run(command_line(command, parameter, Path(place.format(suffix)))), 0, 1, 2)
    check(run(command_line(command, parameter, Path(BAD_PLACES[1].format(suffix)))), 1, 2)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", [name for name in CALLING if name not in ("train", "health")])
def test_a_key_or_a_name_that_no_request_can_have_is_one_line(command: str) -> None:
    words = command_line(command)
    names = [place for place, word in enumerate(words) if word in ("m", "d", "staging", JOB)]
    with each_case() as case:
        for text in ("ключ", "a\nb", "a b", "\udcff"):
            with case(repr(text)):
                result = run(words, LATHE_KEY=text)
                check(result, 1)
                assert result.stderr.startswith("error: --api-key, LATHE_KEY: expected visible ASCII characters")
                for place in names:
                    check(run([*words[:place], text, *words[place + 1 :]]), 1, 2)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("key", ["", "ключ", "a b", "a\n", "k" * 256, "\udcff"])
def test_an_idempotency_key_that_no_request_can_have_is_one_line(key: str) -> None:
    result = run([*command_line("push"), "--idempotency-key", key])
    check(result, 1)
    assert result.stderr.startswith("error: --idempotency-key: expected 1 to 255 visible ASCII characters, got ")


def test_a_locked_file_of_keys_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lathe.server.cli.keys._LOCK_TIMEOUT", 0.01)
    with FileLock(folder / ".keys.json.lock", 1.0, "the file").hold():
        result = run(command_line("keys add"))
    check(result, 1)
    assert "error: keys.json: the file of keys has been locked by another process" in result.stderr


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("option", "limit"), [([], "10000"), (["--last", "1500"], "1500")])
def test_audit_asks_for_all_changes(option: list[str], limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(self: Any, request: httpx.Request) -> httpx.Response:
        asked.append(request.url.params["limit"])
        return httpx.Response(200, json=[])

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", answer)
    check(run(["audit", "m", *option]), 0)
    assert asked == [limit]
