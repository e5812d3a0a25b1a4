"""The help of every command, and command lines that work without having read it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from lathe.core.train.recipe.recipe import Recipe
from lathe.server.access.scopes import Scope
from lathe.server.api.v2.model_info import VERSION
from lathe.server.cli import usage_hints
from lathe.server.cli.app import app
from lathe.server.settings import Settings
from tests.server.cli.running import PROJECT, lathe_process, run_lathe
from tests.server.repository.world import toy
from tests.server.service import service

GUESSABLE = {"models", "versions", "promote", "alias", "delete", "load", "unload", "infer", "status", "audit", "health"}
ALONE = {  # commands that send no request to a server
    "serve",
    "compile",
    "run",
    "inspect",
    "profile",
    "generate",
    "chat",
    "bench",
    "prune",
    "quantize",
    "kernels",
    "load-kernels",
    "keys",
    "completion",
}


LOCAL = {("datasets", "describe")}  # nor does this command of a group that does


def command_paths(group: TyperGroup, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from command_paths(command, (*above, name))
        else:
            yield (*above, name)


def every_command() -> list[tuple[str, ...]]:
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    return list(command_paths(root))


COMMANDS = every_command()


def test_the_commands_that_users_guess_exist() -> None:
    assert {command[0] for command in COMMANDS} >= GUESSABLE


@pytest.mark.sample(4)
@pytest.mark.parametrize("command", [(), *COMMANDS], ids=lambda command: " ".join(command) or "lathe")
def test_both_help_options_work_and_show_no_types_of_flags(command: tuple[str, ...]) -> None:
    shown = run_lathe(*command, "-h")
    assert shown == run_lathe(*command, "--help")
    assert "<bool>" not in shown
    assert "Examples:" in shown or len(command) != 1 or command[0] not in ("push", "promote", "infer", "serve", "train")


def test_help_shows_text_in_brackets() -> None:
    """It would be gone if it were read as markup."""
    assert "'.[cuda]'" in " ".join(run_lathe("kernels", "--help").split())


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_that_calls_a_server_says_how_to_reach_it(command: tuple[str, ...]) -> None:
    shown = run_lathe(*command, "--help")
    names = re.findall(r"│ +--(?:url|api-key|ca|cert|cert-key) ", shown)
    variables = re.findall(r"env var: LATHE_(?:URL|KEY|CA|CERT|CERT_KEY)\b", shown)
    expected = 0 if command[0] in ALONE or command in LOCAL else 5
    assert (len(names), len(set(variables))) == (expected, expected)


def test_the_help_says_which_commands_call_no_server() -> None:
    shown = run_lathe("--help")
    text = " ".join(shown.partition("╭")[0].split())
    assert "the other commands call it" not in text and "'On this machine'" in text
    on_this_machine = shown.partition("─ On this machine")[2]
    for command in sorted({(name,) for name in ALONE - {"serve"}} | LOCAL):
        listed = len(command) == 1 and f"│ {command[0]} " in on_this_machine
        assert listed != (f"`lathe {' '.join(command)}`" in text), command


def test_the_help_of_keys_names_each_scope_and_shared_memory() -> None:
    shown = " ".join(run_lathe("keys", "add", "--help").split())
    scopes = re.findall(r"(\w+) \(([^)]*)\)", shown.partition("Scopes: ")[2].partition(" Clients")[0])
    assert [name for name, _ in scopes] == list(Scope)
    assert "shared memory" in dict(scopes)["admin"]


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_is_printed(option: str) -> None:
    assert run_lathe(option) == f"lathe {VERSION}\n"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["promot"], "No such command 'promot', did you mean `lathe promote`? (see lathe --help)"),
        (["predict"], "No such command 'predict', did you mean `lathe infer`? (see lathe --help)"),
        (["version"], "No such command 'version', did you mean `lathe --version`? (see lathe --help)"),
        (["nonsense"], "No such command 'nonsense' (see lathe --help)"),
        (["canary", "status", "m"], "No such command 'status', did you mean `lathe canary watch`?"),
        (["canary", "wach"], "No such command 'wach', did you mean `lathe canary watch`?"),
        (["canary", "start", "m", "2", "--share", "1"], "No such option: --share, did you mean --weight? (see "),
        (["serve", "models"], "unexpected argument 'models', did you mean `--model-repo models`? (see lathe serve "),
        (["rollback", "m", "1"], "unexpected argument '1', did you mean `--to 1`? (see lathe rollback --help)"),
        (["models", "m"], "unexpected argument 'm': the command takes none (see lathe models --help)"),
        (["promote", "m", "1", "2"], "unexpected argument '2': expected MODEL VERSION (see lathe promote --help)"),
        (["--nope"], "No such option: --nope (see lathe --help)"),
        (["push", "m"], "Missing argument 'FILE'. (see lathe push --help)"),
        (
            ["push", "m", "file", "--promot"],
            "No such option: --promot, did you mean --promote? (see lathe push --help)",
        ),
        (["promote", "m", "0"], "Invalid value for 'VERSION': "),
        (["canary", "start", "m", "x"], "Invalid value for 'VERSION': "),
        (
            ["keys", "add", "x", "--scope", "all", "--file", "f"],
            "Invalid value for '--scope': 'all' is not one of 'infer'",
        ),
        (["infer", "m", "--version"], "Option '--version' requires an argument."),
        (["canary", "stop"], "No such command 'stop', did you mean `lathe canary cancel`? (see lathe canary --help)"),
    ],
)
def test_an_error_in_a_command_line_is_one_line_with_status_2(typed: list[str], expected: str) -> None:
    status, said = lathe_process(*typed, name="lathe")
    assert status == 2
    assert said.startswith(f"error: {expected}") and said.count("\n") == 1, said


def test_the_command_line_starts_without_the_compiler() -> None:
    """Only some commands need it, and its import takes four times as long as that of all commands."""
    code = "import sys, lathe.server.cli.app; print(*{'numpy', 'httpx', 'lathe.core.compiler'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_hints_name_commands_and_options_that_exist() -> None:
    paths, options = {" ".join(path) for path in COMMANDS}, set()
    for path in COMMANDS:
        options |= set(re.findall(r"--[a-z][a-z-]+", run_lathe(*path, "--help")))
    for group, words in usage_hints.COMMANDS.items():
        inside = {path.removeprefix(f"{group} ").split()[0] for path in paths if path.startswith(group)}
        for word, meant in words.items():
            assert meant in paths or meant == "--version", (group, word)
            assert word not in inside, (group, word)  # such a command would never get the hint
    assert {option for meant in usage_hints.OPTIONS.values() for option in meant} <= options
    for command, option in usage_hints.ARGUMENTS.items():
        assert option in run_lathe(*command.split(), "--help"), command


def test_help_names_no_file_that_an_installed_package_lacks() -> None:
    for command in [(), *COMMANDS]:
        assert not re.search(r"\bdocs/|\.md\b", run_lathe(*command, "--help")), command


@pytest.mark.sample(4)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_fits_80_columns(command: tuple[str, ...]) -> None:
    """Paragraphs are wrapped once, and examples are not wrapped, so that they can be copied."""
    _usage, *shown = run_lathe(*command, "--help", env={"COLUMNS": "80"}).partition("╭")[0].strip().splitlines()
    wide = run_lathe(*command, "--help").partition("╭")[0].splitlines()
    assert all(len(line.rstrip()) < 80 for line in wide if line.startswith("   ")), wide
    for line, following in pairwise(line.rstrip() for line in shown):
        is_prose = line.strip() and following.strip() and not line.endswith(":")
        if is_prose and not line.startswith("   ") and not following.startswith("   "):
            assert len(line) + 1 + len(following.split()[0]) > 78, (line, following)


def test_the_keys_of_recipes_are_printed() -> None:
    shown = " ".join(run_lathe("train", "--keys").split())
    for name, field in Recipe.model_fields.items():
        assert f"│ {name} │" in shown and (field.description or "")[:40] in shown, name
    for other in ('kind = "adamw"', 'architecture = "lenet5"', "weight_decay", 'kind = "one_cycle"'):
        assert other in shown, other


def test_the_settings_of_a_server_are_printed() -> None:
    shown = run_lathe("serve", "--settings", env={"COLUMNS": "400"})
    for name, field in Settings.model_fields.items():
        assert re.search(rf"│ LATHE_{name.upper()} +│.*│ {re.escape(field.description or '')} *│", shown), name


def test_help_names_the_metrics(tmp_path: Path) -> None:
    assert "GET /metrics" in run_lathe("serve", "--help")
    with service(tmp_path / "repo") as running:
        assert re.search(
            rf"^metrics +{running.url}/metrics *$", run_lathe("status", "--url", running.url), re.MULTILINE
        )


def test_the_default_of_a_url_is_what_the_command_does() -> None:
    assert "[default: (the server on this machine)]" in run_lathe("health", "--help")
    assert "[default: (train in this process)]" in run_lathe("train", "--help")
    assert "[default: http://127.0.0.1:8080]" in run_lathe("models", "--help")


def test_a_group_alone_lists_its_commands() -> None:
    result = CliRunner().invoke(app, ["canary"])
    assert (result.exit_code, result.stderr) == (2, "")
    assert "canary" in result.stdout and "start" in result.stdout


def test_help_does_not_use_python_types_as_names_of_values() -> None:
    for command in COMMANDS:
        shown = run_lathe(*command, "--help")
        assert not re.search(r"<(?:str|int|float|path|file|list|int range|float range)\b", shown), command
        (usage,) = re.findall(r"Usage: .*", shown)
        assert not re.search(r"\{[a-z]", usage), command  # names of arguments are in capitals


COMPLETED = """
eval "$(lathe completion bash)"
tab() { COMP_WORDS=(lathe "$@"); COMP_CWORD=$#; COMPREPLY=(); _lathe_completion lathe; echo "${COMPREPLY[@]}"; }
tab pro; tab canary ""; tab push m file --prom; tab promote ""; tab promote ab; tab promote --url http://127.0.0.1:1 ""
"""


@pytest.mark.slow
def test_bash_completes_commands_options_and_model_names(tmp_path: Path) -> None:
    script = tmp_path / "lathe"
    code = "from lathe.server.cli.app import app; app(prog_name='lathe')"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
    script.chmod(0o755)
    with service(tmp_path / "repo") as running, running.client() as client:
        for name in ("abc", "xyz"):
            client.upload(name, toy(2.0))
        own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(PROJECT), "LATHE_URL": running.url}
        done = subprocess.run(
            ["bash", "-c", COMPLETED], cwd=tmp_path, env={**os.environ, **own}, capture_output=True, text=True
        )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["promote profile", "start watch cancel", "--promote", "abc xyz", "abc", ""]


@pytest.mark.parametrize(("shell", "part"), [("zsh", "#compdef lathe"), ("fish", "complete --command lathe")])
def test_completion_scripts_exist_for_other_shells(shell: str, part: str) -> None:
    shown = run_lathe("completion", shell)
    assert part in shown and f"_LATHE_COMPLETE=complete_{shell}" in shown


def test_completion_is_silent_if_the_server_does_not_answer() -> None:
    status, said = lathe_process(
        env={"_LATHE_COMPLETE": "complete_bash", "COMP_WORDS": "lathe promote ", "COMP_CWORD": "2"}
        | {"LATHE_URL": "http://127.0.0.1:1"},
        name="lathe",
    )
    assert (status, said) == (0, "")


@pytest.mark.slow
def test_ctrl_c_ends_a_running_command_with_status_130(tmp_path: Path) -> None:
    with service(tmp_path / "repo") as running:
        process = subprocess.Popen(
            [sys.executable, "-c", "from lathe.server.cli.app import app; app()", "top", "--url", running.url],
            cwd=PROJECT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None and process.stdout.read(1)  # it shows figures
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, "")
