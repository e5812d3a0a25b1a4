"""How the commands look: ``-h``, help in words that are no types of Python, a mistake in one line."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.models import ArgumentInfo, OptionInfo

from server.terminal import complaints

F = TypeVar("F", bound=Callable[..., Any])

_WORDS = {int: "NUMBER", float: "NUMBER", str: "TEXT", Path: "PATH"}  # what help says in place of a type
_Mistake: type[Exception] = typer.BadParameter.__mro__[2]  # ClickException of typer's own copy of click
_COMPLETION = {"install_completion", "show_completion"}  # typer's options, for which there is `lathe completion`


class _PlainHelp:
    """Parameters as their help shows them."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters; a flag takes no value, so no type stands behind its name."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if isinstance(param, TyperOption) and param.is_flag:
                param.metavar = ""
                param.hidden = param.hidden or param.name in _COMPLETION
            elif isinstance(param, TyperArgument):
                param.display_type_rich = _no_type  # type: ignore[method-assign]
        return params


def _no_type(ctx: Any) -> str:
    """Say nothing of an argument's type: its name and its help say what it is."""
    return ""


class Command(_PlainHelp, TyperCommand):
    """One command."""


class Group(_PlainHelp, TyperGroup):
    """Commands below one name."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line; a mistake in it is one line and exit status 2."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        try:
            status = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except typer.Abort:
            complaints.print("aborted")
            sys.exit(1)
        except _Mistake as error:
            sys.exit(_tell(error))
        sys.exit(status if isinstance(status, int) else 0)


def _tell(error: Any) -> int:
    """Print what is wrong with a command line and where help is; return the exit status."""
    if type(error).__name__ != "NoArgsIsHelpError":  # a group alone: its help is printed by then
        text = " ".join(error.format_message().replace("Value error, ", "").split())
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        complaints.print(f"error: {text}{hint}", style="red", soft_wrap=True)
    return int(error.exit_code)


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
        add = super().command(name, **{"cls": Command, **options})

        def added(function: F) -> F:
            _name_values(function)
            return add(function)

        return added


def _name_values(function: Callable[..., Any]) -> None:
    """Give each parameter that has no name for its value one: MODEL for an argument `model`, NUMBER for an int."""
    signature = inspect.signature(function, eval_str=True)
    function.__signature__ = signature  # type: ignore[attr-defined]  # typer shall see the same objects
    function.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()}
    for parameter in signature.parameters.values():
        annotation, *extra = get_args(parameter.annotation) or (parameter.annotation,)
        for info in extra:
            if isinstance(info, ArgumentInfo) and info.metavar is None:
                info.metavar = parameter.name.upper()
            elif isinstance(info, OptionInfo) and info.metavar is None:
                info.metavar = _WORDS.get(_element(annotation))


def _element(annotation: Any) -> Any:
    """Return the type of one value: int for `int | None` and for `list[int]`."""
    if get_origin(annotation) in (Union, types.UnionType):
        return _element(next(part for part in get_args(annotation) if part is not type(None)))
    return get_args(annotation)[0] if get_origin(annotation) is list else annotation
