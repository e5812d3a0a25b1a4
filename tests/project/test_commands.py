"""The commands of the documentation run unchanged against a real server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from tests.compiled_code import share_compiled_code
from tests.server.generation.tiny_model import gguf_content
from tests.server.running import free_port

PROJECT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/getting-started.md", "docs/http-api.md")
STARTED_ELSEWHERE = (
    "make ",
    "docker ",
    "python3.11 -m venv",
    ".venv/bin/pip",
    ".venv/bin/lathe serve",
    "python -m tools",
)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (PROJECT / page).read_text(), re.DOTALL | re.MULTILINE)


def runnable(page: str) -> list[str]:
    """Whole commands, with continuation lines joined; without those that set up, serve, or take minutes."""
    lines = [line for block in blocks(page, "sh") for line in split_commands(block)]
    lines = [line for line in lines if not line.startswith(STARTED_ELSEWHERE) and "loadtest" not in line]
    return [line for line in lines if not is_of_training_section(line) and not is_of_text_section(line)]


def is_of_training_section(line: str) -> bool:
    """Whether a command belongs to the README's training section, which takes too long to run with the others."""
    return any(name in line for name in ("handwriting", "digits.npz", "digits-worse"))


def is_of_text_section(line: str) -> bool:
    """Whether a command belongs to the README's section on texts, whose model is a download."""
    return "smollm" in line


def split_commands(block: str) -> list[str]:
    """Split a block into commands. An open quote or a backslash continues a command on the next line."""
    commands, command = [], ""
    for line in block.splitlines():
        command += line + "\n"
        if command.count("'") % 2 == 0 and not line.endswith("\\"):
            commands.append(command.strip())
            command = ""
    return [command for command in commands if command]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's checkout after cloning and `make serve`, with a model of their own."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("model_repo", "docs"):
        shutil.copytree(PROJECT / name, folder / name)
    shutil.copy(PROJECT / "model_repo/digits/1/model.onnx", folder / "mine.onnx")
    shutil.copy(PROJECT / "model_repo/digits/1/model.onnx", folder / "model.onnx")
    commands = folder / ".venv/bin"
    commands.mkdir(parents=True)
    for name, target in (
        ("lathe", "-c 'from lathe.server.cli.app import app; app()'"),
        ("curl", str(PROJECT / "tests/project/curl.py")),
        ("python", ""),
    ):
        script = commands / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {target} "$@"\n')
        script.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def port(checkout: Path) -> Iterator[int]:
    port = free_port()
    shutil.copytree(checkout / "model_repo", checkout / "served")
    share_compiled_code(checkout / "served" / ".cache")
    command = [str(checkout / ".venv/bin/lathe"), "serve", "--model-repo", "served", "--port", str(port)]
    server = subprocess.Popen(command, cwd=checkout, env=environment(checkout, port))
    try:
        wait_ready(port, server)
        yield port
    finally:
        server.terminate()
        assert server.wait(30) == 0


def environment(checkout: Path, port: int) -> dict[str, str]:
    path = f"{checkout / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
    ours = {"LATHE_URL": f"http://127.0.0.1:{port}", "LATHE_JOB_IDLE": "false"}  # tests keep the machine busy
    return {**os.environ, "PATH": path, "PYTHONPATH": str(PROJECT), **ours}


def wait_ready(port: int, server: subprocess.Popen[bytes], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert server.poll() is None, "the server ended"
        try:
            if urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=2).status == 200:
                return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"not ready after {seconds} s")


def run(command: list[str], checkout: Path, port: int) -> str:
    command[0] = str(found) if (found := checkout / ".venv/bin" / command[0]).exists() else command[0]
    done = subprocess.run(command, cwd=checkout, env=environment(checkout, port), capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def test_a_rollback_changes_the_answer_as_the_readme_says(checkout: Path, port: int) -> None:
    """Comes first in this file because it needs the bundled versions 1 and 2 to be the only ones."""
    base = f"http://127.0.0.1:{port}"

    def live() -> tuple[str, int]:
        answer = orjson.loads(
            run(["curl", "-s", f"{base}/v2/models/digits/infer", "-d", "@docs/digit.json"], checkout, port)
        )
        data = answer["outputs"][0]["data"]
        return answer["model_version"], data.index(max(data))

    assert live() == ("2", 5)
    run(["curl", "-s", "-X", "POST", f"{base}/api/v1/models/digits/rollback"], checkout, port)
    assert live() == ("1", 6)
    run(["lathe", "rollback", "digits", "--to", "2"], checkout, port)
    assert live() == ("2", 5)


@pytest.mark.sample(3)
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_the_page_works(page: str, checkout: Path, port: int) -> None:
    commands = runnable(page)
    assert len(commands) >= 3
    for command in commands:
        run(["sh", "-c", command.replace("127.0.0.1:8080", f"127.0.0.1:{port}")], checkout, port)


def test_the_readmes_language_model_answers(checkout: Path, port: int) -> None:
    """With a small model in place of the download."""
    lines = [line for block in blocks("README.md", "sh") for line in split_commands(block)]
    *_, push, ask = [line for line in lines if is_of_text_section(line)]
    (checkout / "tiny.gguf").write_bytes(gguf_content())
    push, replaced = re.subn(r"\S+\.gguf", "tiny.gguf", push)
    assert replaced == 1
    run(["sh", "-c", f"{push} --url http://127.0.0.1:{port}"], checkout, port)
    answer = run(["sh", "-c", ask.replace("127.0.0.1:8080", f"127.0.0.1:{port}")], checkout, port)
    lines = [line for line in answer.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert orjson.loads(lines[0].removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"


@pytest.mark.slow
@pytest.mark.timeout(1800)  # other tests run first: a job has nice 19, and may wait until all of them have ended
def test_the_readmes_training_section_produces_a_version(checkout: Path, port: int) -> None:
    """The commands of the README's training section print what the README says."""
    lines = [line for block in blocks("README.md", "sh") for line in split_commands(block)]
    data, upload, train, ask, worse = [line for line in lines if is_of_training_section(line)]
    outputs = {}
    for command in (data, upload, train, ask, worse):
        here = command.replace("127.0.0.1:8080", f"127.0.0.1:{port}")
        outputs[command] = run(["sh", "-c", here], checkout, port)
    assert orjson.loads(outputs[upload])["rows"] == 1797
    scores = orjson.loads(outputs[ask])["outputs"][0]["data"]
    assert scores.index(max(scores)) == 0
    job = f"http://127.0.0.1:{port}/api/v1/jobs/{orjson.loads(outputs[worse])['id']}"
    end = time.monotonic() + 900
    while not (state := orjson.loads(run(["curl", "-s", job], checkout, port)))["finished"]:
        assert time.monotonic() < end
        time.sleep(0.2)
    assert (state["state"], state["result"]["moved_alias"], state["result"]["version"]) == ("succeeded", False, 2)
    model = orjson.loads(run(["curl", "-s", job.partition("jobs/")[0] + "models/handwriting"], checkout, port))
    assert model["aliases"] == {"live": 1}


def test_the_client_example_prints_what_its_comment_says(checkout: Path, port: int) -> None:
    run(
        ["lathe", "push", "digits", "model_repo/digits/2/model.onnx", "--promote"],
        checkout,
        port,
    )
    (example,) = blocks("README.md", "python")
    printed = run([sys.executable, "-c", example.replace("127.0.0.1:8080", f"127.0.0.1:{port}")], checkout, port)
    (comment,) = re.findall(r"print\(.*#\s*(.*)$", example, re.MULTILINE)
    assert printed.split()[1] == comment.split()[1] == "5"
