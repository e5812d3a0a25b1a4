"""docs/command-line.md: its ten tasks, each command run as a reader types it, against one server."""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from lathe.core.train.recipe.recipe import from_toml
from lathe.server.cli.app import app
from lathe.server.client import ApiError, Client
from tests.project.test_commands import checkout, split_commands
from tests.server.running import free_port

__all__ = ["checkout"]
PAGE = "docs/command-line.md"
TASKS = ["start", "push", "ask", "promote", "roll", "try", "train", "watch", "add", "switch"]
SERVES, GOES_ON = "lathe serve ", ("lathe top", "lathe rollout watch")
PATIENCE = 60.0  # seconds
TABLE_END = "┘".encode()


def tasks(project: Path) -> dict[str, list[str]]:
    """The commands of each task, by its heading. A Python block, marked by its language, writes `ask.py`."""
    text = (project / PAGE).read_text().partition("## Ten tasks\n")[2].partition("\n## ")[0]
    found = {}
    for part in text.split("\n### ")[1:]:
        blocks = re.findall(r"^```(sh|python)\n(.*?)^```", part, re.DOTALL | re.MULTILINE)
        found[part.partition("\n")[0]] = [
            line for kind, block in blocks for line in (split_commands(block) if kind == "sh" else [f"python\n{block}"])
        ]
    return found


class Terminal:
    """A reader's shell: exported variables persist, and one server runs beside it."""

    def __init__(self, folder: Path, port: int, environment: Mapping[str, str]) -> None:
        self.folder, self.port, self.environment = folder, port, dict(environment)
        self.server: subprocess.Popen[bytes] | None = None

    def type(self, command: str) -> str:
        """Run a command to its end and return its stdout."""
        command = command.replace(":8080", f":{self.port}")
        if command.startswith("python\n"):
            (self.folder / "ask.py").write_text(command.removeprefix("python\n"))
            return ""
        if command.startswith(SERVES):
            self.serve(command)
            return ""
        if command.startswith(GOES_ON):
            return self.watch(command)
        kept = self.folder / "environment"
        process = subprocess.Popen(
            ["bash", "-c", f"{command}\nstatus=$?; env -0 > {kept}; exit $status"],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, f"{command}: {out}{err}"
        if command.startswith("export "):
            self.environment = dict(line.split("=", 1) for line in kept.read_text().split("\0") if line)
        return out

    def watch(self, command: str) -> str:
        """Run a command that shows tables in a terminal, and press Ctrl-C once it has shown a table."""
        ours, theirs = os.openpty()
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        shown = b""
        with open(ours, "rb", buffering=0) as screen:
            while TABLE_END not in shown:
                shown += read_screen(screen)
                assert process.poll() is None, f"{command}: {shown.decode(errors='replace')}"
            os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches the whole foreground process group
            while more := read_screen(screen):
                shown += more
        screen_text = shown.decode(errors="replace")  # Ctrl-C may arrive in the middle of a character
        assert process.wait(PATIENCE) == 130, f"{command}: {screen_text}"
        return screen_text

    def serve(self, command: str) -> None:
        """Start the server, in place of the previous one."""
        self.stop()
        secure = "--tls-cert" in command
        command = f"exec {command} --port {self.port} --threads 1"
        self.server = subprocess.Popen(["bash", "-c", command], cwd=self.folder, env=self.environment)
        end = time.monotonic() + PATIENCE
        while not is_ready(f"{'https' if secure else 'http'}://127.0.0.1:{self.port}"):
            assert self.server.poll() is None and time.monotonic() < end, command
            time.sleep(0.1)

    def stop(self) -> None:
        """Press Ctrl-C in the server's terminal."""
        if self.server is not None:
            self.server.send_signal(signal.SIGINT)
            assert self.server.wait(30) == 0
            self.server = None


def read_screen(screen: IO[bytes]) -> bytes:
    """The text that a terminal's programs wrote within `PATIENCE`; nothing once all of them have ended."""
    assert select.select([screen], [], [], PATIENCE)[0], "nothing was shown in time"
    try:
        return screen.read(65536)
    except OSError:  # EIO: the last process with the other end closed it
        return b""


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v2/health/ready", verify=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def terminal(checkout: Path) -> Iterator[Terminal]:
    recipe = checkout / "docs/recipes/digits-lenet5.toml"
    recipe.write_text(recipe.read_text().replace("epochs = 60", "epochs = 2"))  # other tests check how well it learns
    port, project = free_port(), Path(__file__).parents[2]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("LATHE_")}
    path = f"{checkout / '.venv/bin'}{os.pathsep}{plain['PATH']}"
    own = {"PATH": path, "PYTHONPATH": str(project), "LATHE_URL": f"http://127.0.0.1:{port}", "COLUMNS": "200"}
    found = Terminal(checkout, port, {**plain, **own, "LATHE_CACHE_DIR": str(checkout / "cache")})
    try:
        yield found
        found.stop()
    finally:
        if found.server is not None:
            found.server.kill()
            found.server.wait()
        shutil.rmtree(checkout / "models", ignore_errors=True)


@contextmanager
def background_requests(url: str) -> Iterator[None]:
    """Send requests of other clients until the end of the block."""
    done, image = threading.Event(), np.random.default_rng(0).random((1, 1, 8, 8), np.float32) * 16

    def ask() -> None:
        with Client(url) as client:
            while not done.wait(0.005):
                client.infer("digits", {"image": image})

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_each_of_the_ten_tasks_takes_at_most_five_commands(project: Path) -> None:
    found = tasks(project)
    assert [heading.split()[1].lower() for heading in found] == TASKS
    for heading, commands in found.items():
        assert 1 <= len(commands) <= 5, heading


SHELL_COMMANDS = ("mkdir", "python", "export", "openssl")  # what a task needs besides `lathe`


def help_of(*command: str) -> str:
    """The help of a command: its lines joined, without the frames around tables."""
    shown = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "240"}).output
    return "\n".join(line.strip("│ ") for line in shown.splitlines())


def calls(commands: list[str]) -> list[list[str]]:
    """The words of each call of `lathe` in a task, including calls inside `$(...)`."""
    lines = [line for line in commands if not line.startswith("python\n")]
    found = [part for line in lines for part in re.findall(r"(?:^|\$\()lathe ([^)\n]+)", line, re.MULTILINE)]
    return [shlex.split(call) for call in found]


def rows(shown: str) -> dict[str, str]:
    """The commands, arguments and options in a help's tables, each with its explanation."""
    found: dict[str, str] = {}
    for line in shown.splitlines():
        if entry := re.match(r"(?:\*\s+)?(--[a-z-]+|[a-z][a-z-]+|[A-Z]+)(?:\s+-\w)?\s{2,}(.+)", line):
            found.setdefault(entry[1], entry[2])
    return found


@pytest.mark.parametrize("name", TASKS)
def test_help_alone_leads_through_each_task(project: Path, name: str) -> None:
    """`lathe --help` lists every command, and a command's help explains each option and argument in a sentence."""
    commands = dict(zip(TASKS, tasks(project).values(), strict=True))[name]
    found = calls(commands)
    assert found or name == "ask"
    for words in found:
        path: list[str] = []
        while (
            words and words[0] in (listed := rows(help_of(*path))) and not words[0].startswith("--") and len(path) < 2
        ):
            assert len(listed[words[0]].split()) >= 3, (path, words[0])  # a sentence, not a word
            path.append(words.pop(0))
        assert path, words
        explained = rows(help_of(*path))
        options = [word for word in words if word.startswith("--")]
        for option in options:
            assert option in explained and len(explained[option].split()) >= 3, (path, option)
        taken = sum(1 for row in explained if row.isupper())
        values = [word for word in words if not word.startswith("--")]
        assert len(values) <= taken + len(options), (path, values)


def test_help_covers_what_the_tasks_take_from_the_shell(project: Path) -> None:
    """The help covers variables, the certificate for tests, the smallest recipe, and the Python client."""
    lines = [line for commands in tasks(project).values() for line in commands]
    others = [line for line in lines if not line.startswith("lathe ")]
    assert {line.split()[0] for line in others} == set(SHELL_COMMANDS)
    served = help_of("serve")
    for word in next(line for line in others if line.startswith("openssl ")).split():
        assert word in served, word
    models = help_of("models")
    for variable in re.findall(r"LATHE_\w+(?==)", "\n".join(others)):
        assert f"env var: {variable}]" in models, variable
    (client,) = [line for line in others if line.startswith("python\n")]
    (imported,) = re.findall(r"^from lathe\S* import \w+$", client, re.MULTILINE)
    assert imported in help_of("infer")
    recipe = help_of("train").partition("The smallest recipe.toml")[2].partition("\n\n")[0]
    assert from_toml("\n".join(recipe.splitlines()[1:]).encode()).epochs == 10


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_ten_tasks_work_as_written(project: Path, terminal: Terminal) -> None:
    output: dict[str, list[str]] = {}
    url = terminal.environment["LATHE_URL"]
    for name, commands in zip(TASKS, tasks(project).values(), strict=True):
        for command in commands:
            if command.startswith("lathe canary watch"):
                with background_requests(url):
                    output.setdefault(name, []).append(terminal.type(command))
            else:
                output.setdefault(name, []).append(terminal.type(command))
    *_, status = output["start"]
    assert re.search(r"^ready +yes *$", status, re.MULTILINE)
    pushed, asked = output["push"]
    assert "digits version 1 is ready, live" in pushed and "image FP32[-1, 1, 8, 8]" in pushed
    assert "answered by digits version 1" in asked
    assert output["ask"][-1] == "6\n"  # version 1 reads this five as a six
    pushed, asked, promoted, listed = output["promote"]
    assert "not live yet" in pushed and "answered by digits version 2" in asked
    assert promoted == "digits version 2 is live (before: 1)\n" and listed.count("│ live") == 1
    assert output["roll"] == ["digits version 1 is live\n"]
    assert "digits version 3: rolled back: differing" in output["try"][-1]
    assert "lenet5 version 1 is ready, live" in output["train"][-1]
    models, top, rollout, audit = output["watch"]
    assert "lenet5" in models and "digits" in top and "canary failed" in rollout and "canary failed" in audit
    assert "lenet5" in output["add"][-1] and "lenet5" in output["switch"][-1]
    with (
        Client(terminal.environment["LATHE_URL"], ca=terminal.folder / "server.pem") as stranger,
        pytest.raises(ApiError) as refused,
    ):
        stranger.models()
    assert refused.value.status == 401
