"""How the commands look: ``-h``, completion, and help that says what a flag does instead of its type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

F = TypeVar("F", bound=Callable[..., Any])


class _PlainHelp:
    """Parameters as their help shows them."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters; a flag takes no value, so no type stands behind its name."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if isinstance(param, TyperOption) and param.is_flag:
                param.metavar = ""
        return params


class Command(_PlainHelp, TyperCommand):
    """One command."""


class Group(_PlainHelp, TyperGroup):
    """Commands below one name."""


class Commands(typer.Typer):
    """A group whose commands have the same look; without arguments it prints its help."""

    def __init__(self, help: str, *, add_completion: bool = False, epilog: str | None = None) -> None:
        super().__init__(
            help=help,
            epilog=epilog,
            cls=Group,
            no_args_is_help=True,
            add_completion=add_completion,
            context_settings={"help_option_names": ["-h", "--help"]},
            pretty_exceptions_enable=False,
        )

    def command(self, name: str | None = None, **options: Any) -> Callable[[F], F]:
        """Add a command, as typer does."""
        return super().command(name, **{"cls": Command, **options})
