"""`lathe completion`: prints the script by which a shell completes commands and options."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from typer.completion import shell_complete

_NAME = "lathe"
_VARIABLE = "_LATHE_COMPLETE"  # set by the shell: the program then prints completions instead of running a command


class Shell(StrEnum):
    """A supported shell."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    context: typer.Context, shell: Annotated[Shell, typer.Argument(help="Your shell: bash, zsh or fish.")]
) -> None:
    """Print a script that completes commands, options and model names in your shell.

    \b
    Examples:
      lathe completion bash >> ~/.bashrc
      lathe completion zsh >> ~/.zshrc
      lathe completion fish > ~/.config/fish/completions/lathe.fish
    """
    shell_complete(context.find_root().command, {}, _NAME, _VARIABLE, f"source_{shell.value}")
