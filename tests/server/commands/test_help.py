"""What help says of every command, and what can be typed without having read it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import typer
from typer.core import TyperGroup

from server.api.modelinfo import VERSION
from server.cli import app
from tests.server.commands.running import PROJECT, lathe

GUESSED = {"models", "versions", "promote", "alias", "delete", "load", "unload", "infer", "status", "audit", "health"}
ALONE = {"serve", "compile", "run", "inspect", "profile", "bench", "kernels", "load-kernels", "keys"}  # ask no server


def paths(group: TyperGroup, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from paths(command, (*above, name))
        else:
            yield (*above, name)


def every_command() -> list[tuple[str, ...]]:
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    return list(paths(root))


COMMANDS = every_command()


def test_the_commands_that_one_guesses_are_there() -> None:
    assert {command[0] for command in COMMANDS} >= GUESSED


@pytest.mark.parametrize("command", [(), *COMMANDS], ids=lambda command: " ".join(command) or "lathe")
def test_help_is_there_under_both_names_and_shows_no_types_of_flags(command: tuple[str, ...]) -> None:
    shown = lathe(*command, "-h")
    assert shown == lathe(*command, "--help")
    assert "<bool>" not in shown
    assert "Examples:" in shown or len(command) != 1 or command[0] not in ("push", "promote", "infer", "serve", "train")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_that_asks_a_server_says_how_to_reach_it(command: tuple[str, ...]) -> None:
    shown = lathe(*command, "--help")
    names = [name for name in ("--url", "--api-key", "--ca", "--cert", "--cert-key") if f"{name} " in shown]
    variables = re.findall(r"LATHE_(?:URL|KEY|CA|CERT|CERT_KEY)\b", shown)
    expected = 0 if command[0] in ALONE else 5
    assert (len(names), len(set(variables))) == (expected, expected)


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_is_told(option: str) -> None:
    assert lathe(option) == f"lathe {VERSION}\n"


def test_a_mistyped_command_or_option_is_answered_with_the_nearest() -> None:
    assert "Did you mean 'promote'" in lathe("promot", fails=True)
    assert "--promote" in lathe("push", "m", "file", "--promot", fails=True)


def test_shells_can_complete_commands() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from server.cli import app; app(prog_name='lathe')"],
        cwd=PROJECT,
        env={**os.environ, "_LATHE_COMPLETE": "complete_bash", "COMP_WORDS": "lathe pro", "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["promote", "profile"]
