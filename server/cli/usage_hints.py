"""Hints for commands, options and arguments that do not exist: by meaning first, then by spelling."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

_NEAR = 0.75  # least similarity of a suggestion: `promot` has 0.92 with `promote`, `status` 0.73 with `start`

# Words of other tools, by group ("" for lathe itself), and the commands that mean the same here.
COMMANDS = {
    "": {
        **dict.fromkeys(("predict", "call", "query", "ask", "classify"), "infer"),
        **dict.fromkeys(("deploy", "upload", "publish", "register", "add", "create", "import"), "push"),
        **dict.fromkeys(("list", "ls", "show", "get", "describe"), "models"),
        **dict.fromkeys(("logs", "log"), "jobs logs"),
        **dict.fromkeys(("metrics", "stats", "statistics", "monitor", "watch"), "top"),
        **dict.fromkeys(("events", "history"), "audit"),
        **dict.fromkeys(("revert", "undo"), "rollback"),
        **dict.fromkeys(("release", "activate", "live"), "promote"),
        **dict.fromkeys(("start", "server", "up"), "serve"),
        **dict.fromkeys(("remove", "rm"), "delete"),
        **dict.fromkeys(("ps", "info", "ping"), "status"),
        **dict.fromkeys(("key", "token", "auth", "login"), "keys add"),
        **dict.fromkeys(("job",), "jobs list"),
        **dict.fromkeys(("dataset", "data"), "datasets list"),
        **dict.fromkeys(("fit", "finetune"), "train"),
        "version": "--version",
    },
    "canary": {
        **dict.fromkeys(("status", "show", "get", "list"), "canary watch"),
        **dict.fromkeys(("stop", "end", "abort", "delete", "rollback"), "canary cancel"),
        **dict.fromkeys(("run", "create", "begin"), "canary start"),
        "promote": "promote",
    },
    "rollout": dict.fromkeys(("status", "show", "get", "list"), "rollout watch"),
    "jobs": {
        **dict.fromkeys(("status", "get", "describe"), "jobs show"),
        **dict.fromkeys(("stop", "kill", "abort"), "jobs cancel"),
        **dict.fromkeys(("submit", "run", "start", "create"), "train"),
        **dict.fromkeys(("log",), "jobs logs"),
        **dict.fromkeys(("events", "follow", "tail"), "jobs watch"),
        **dict.fromkeys(("ls",), "jobs list"),
        **dict.fromkeys(("rm", "remove"), "jobs delete"),
    },
    "datasets": {
        **dict.fromkeys(("upload", "add", "create"), "datasets push"),
        **dict.fromkeys(("ls",), "datasets list"),
        **dict.fromkeys(("get",), "datasets show"),
        **dict.fromkeys(("rm", "remove"), "datasets delete"),
    },
    "keys": {
        **dict.fromkeys(("create", "new", "generate"), "keys add"),
        **dict.fromkeys(("delete", "remove", "rm"), "keys revoke"),
        **dict.fromkeys(("ls", "show"), "keys list"),
    },
}
# Options of other tools, and those that mean the same here; the first one that the command has is suggested.
OPTIONS = {
    **dict.fromkeys(("--share", "--percent", "--percentage", "--traffic", "--fraction"), ("--weight",)),
    **dict.fromkeys(("--key", "--token", "--apikey", "--auth"), ("--api-key", "--keys-file")),
    **dict.fromkeys(("--server", "--address", "--endpoint", "--host"), ("--url",)),
    **dict.fromkeys(("--models", "--model-repository", "--repo", "--repository", "--models-dir"), ("--model-repo",)),
    **dict.fromkeys(("--input", "--data", "--file"), ("--inputs",)),
    **dict.fromkeys(("--mirror", "--compare"), ("--shadow",)),
    **dict.fromkeys(("--cacert", "--ca-cert", "--cafile"), ("--ca",)),
    **dict.fromkeys(("--live", "--activate"), ("--promote",)),
    **dict.fromkeys(("--version",), ("--to",)),
    **dict.fromkeys(("--output",), ("--out",)),
}
# Commands that users give a value without its option, and that option.
ARGUMENTS = {
    "serve": "--model-repo",
    "rollback": "--to",
    "infer": "--inputs",
    "train": "--data",
    "canary start": "--weight",
    "keys add": "--scope",
    "keys list": "--file",
}


def command_hint(group: str, typed: str, commands: Sequence[str]) -> str:
    """Return a suggestion for a command that `group` does not have, to append to the error; empty without one."""
    meant = COMMANDS.get(group, {}).get(typed.lower())
    if meant is not None:
        return f", did you mean `lathe {meant}`?"
    near = difflib.get_close_matches(typed, commands, n=2, cutoff=_NEAR)
    prefix = f"lathe {group} ".replace("  ", " ")
    return f", did you mean {' or '.join(f'`{prefix}{name}`' for name in near)}?" if near else ""


def option_hint(typed: str, options: Sequence[str]) -> str:
    """Return a suggestion for an option that a command does not have, to append to the error; empty without one."""
    meant = next((option for option in OPTIONS.get(typed, ()) if option in options), None)
    near = [meant] if meant else difflib.get_close_matches(typed, options, n=1, cutoff=_NEAR)
    return f", did you mean {near[0]}?" if near else ""


def argument_error(command: str, typed: str, arguments: Sequence[str]) -> str:
    """Return the error for values that a command does not take."""
    option = ARGUMENTS.get(command)
    if option is not None:
        return f"unexpected argument {typed!r}, did you mean `{option} {typed}`?"
    expected = f"expected {' '.join(arguments)}" if arguments else "the command takes none"
    return f"unexpected argument {typed!r}: {expected}"


def options_of(command: Any) -> list[str]:
    """Return the names of a command's options: `--url`."""
    return [name for param in command.params for name in param.opts if name.startswith("--")]
