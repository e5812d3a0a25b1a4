"""Typer classes for Lathe's commands: `-h`, help without Python's type names, usage errors in one line."""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

import typer
from rich.markup import escape
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.models import ArgumentInfo, OptionInfo

from lathe.server.cli.terminal import error_console
from lathe.server.cli.usage_hints import argument_error, command_hint, option_hint, options_of

F = TypeVar("F", bound=Callable[..., Any])

_METAVARS = {int: "NUMBER", float: "NUMBER", str: "TEXT", Path: "PATH"}  # placeholders of values in help
_ClickException: Any = typer.BadParameter.__mro__[2]  # of the copy of click that typer bundles
_EXTRA = re.compile(r"Got unexpected extra argument\(?s?\)? \((.*)\)$")
_COMPLETION = {"install_completion", "show_completion"}  # options of typer that `lathe completion` replaces


class _PlainHelp:
    """Mixin for commands whose help shows no Python types."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters; flags have no metavar, since they take no value."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if isinstance(param, TyperOption) and param.is_flag:
                param.metavar = ""
                param.hidden = param.hidden or param.name in _COMPLETION
            elif isinstance(param, TyperArgument):
                param.display_type_rich = _no_type  # type: ignore[method-assign]
        return params


def _no_type(ctx: Any) -> str:
    """Return an empty type for an argument: its name and its help describe it."""
    return ""


class Command(_PlainHelp, TyperCommand):
    """One command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; the error for values that the command does not take suggests an option."""
        try:
            return super().parse_args(ctx, args)
        except _ClickException as error:
            if found := _EXTRA.match(getattr(error, "message", "")):
                expected = [param.metavar or param.name or "" for param in self.params if _is_argument(param)]
                error.message = argument_error(_path(ctx), found[1], expected)
            raise


class Group(_PlainHelp, TyperGroup):
    """A command with subcommands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of a command line; the error for an unknown one suggests another."""
        try:
            return super().resolve_command(ctx, args)
        except _ClickException as error:
            hint = command_hint(_path(ctx), args[0], self.list_commands(ctx))
            error.message = f"No such command {args[0]!r}{hint}"
            raise

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line; a usage error prints one line and exits with status 2, an OSError with status 1."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        try:
            status = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except typer.Abort:
            error_console.print("aborted")
            sys.exit(1)
        except _ClickException as error:
            sys.exit(_print_usage_error(error))
        except OSError as error:
            where = f"{error.filename}: " if error.filename is not None else ""
            error_console.print(f"error: {where}{error.strerror or error}", style="red", soft_wrap=True)
            sys.exit(1)
        sys.exit(status if isinstance(status, int) else 0)


def _print_usage_error(error: Any) -> int:
    """Print what is wrong with a command line and where its help is; return the exit status."""
    if type(error).__name__ != "NoArgsIsHelpError":  # a group without a subcommand: click has printed its help already
        context = getattr(error, "ctx", None)
        text = " ".join(_usage_text(error, context).replace("Value error, ", "").split())
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        error_console.print(f"error: {text}{hint}", style="red", soft_wrap=True)
    return int(error.exit_code)


def _usage_text(error: Any, context: Any) -> str:
    """Return what is wrong with a command line; for an unknown option, with the one that is meant."""
    typed = str(getattr(error, "option_name", ""))
    if type(error).__name__ != "NoSuchOption" or context is None:
        return str(error.format_message())
    return f"No such option: {typed}{option_hint(typed, options_of(context.command))}"


def _path(context: Any) -> str:
    """Return a command's words after `lathe`: `canary start`."""
    return str(context.command_path).partition(" ")[2]


def _is_argument(param: Any) -> bool:
    return isinstance(param, TyperArgument)


def _paragraphs(text: str) -> str:
    """Return a docstring whose paragraphs are one line each, so that a terminal of any width wraps them once.

    Lines of a paragraph that begins with a backspace, click's mark, are kept.
    """
    first, *others = (
        part.removeprefix("\b\n") if part.startswith("\b") else " ".join(part.split()) for part in text.split("\n\n")
    )
    # typer removes the common indentation of what follows the first paragraph, and ignores its first line for that.
    return "\n\n\n".join([first, "\n\n".join(others)]) if others else first


class Commands(typer.Typer):
    """A typer application whose commands all use `Command` and `Group`; without arguments it prints its help."""

    def __init__(self, help: str, *, add_completion: bool = False, epilog: str | None = None) -> None:
        super().__init__(
            help=help,
            epilog=epilog,
            cls=Group,
            no_args_is_help=True,
            add_completion=add_completion,
            context_settings={"help_option_names": ["-h", "--help"]},
            pretty_exceptions_enable=False,
            suggest_commands=False,  # `command_hint` does so
        )

    def command(self, name: str | None = None, **options: Any) -> Callable[[F], F]:
        """Return a decorator that adds a command, like `typer.Typer.command`, and sets its metavars and its help."""
        add = super().command

        def decorate(function: F) -> F:
            _set_metavars(function)
            text = escape(_paragraphs(inspect.getdoc(function) or ""))  # otherwise '.[cuda]' would be read as markup
            return add(name, **{"cls": Command, "help": text, **options})(function)

        return decorate


def _set_metavars(function: Callable[..., Any]) -> None:
    """Set the metavar of each parameter that has none: MODEL for an argument `model`, NUMBER for an int option."""
    signature = inspect.signature(function, eval_str=True)
    function.__signature__ = signature  # type: ignore[attr-defined]  # so that typer reads the objects changed below
    function.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()}
    for parameter in signature.parameters.values():
        annotation, *extra = get_args(parameter.annotation) or (parameter.annotation,)
        for info in extra:
            if isinstance(info, ArgumentInfo) and info.metavar is None:
                info.metavar = parameter.name.upper()
            elif isinstance(info, OptionInfo) and info.metavar is None:
                info.metavar = _METAVARS.get(_element_type(annotation))


def _element_type(annotation: Any) -> Any:
    """Return the type of one value: int for `int | None` and for `list[int]`."""
    if get_origin(annotation) in (Union, types.UnionType):
        return _element_type(next(part for part in get_args(annotation) if part is not type(None)))
    return get_args(annotation)[0] if get_origin(annotation) is list else annotation
