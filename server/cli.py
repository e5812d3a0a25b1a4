"""The command line: ``lathe --help`` lists the commands."""

from __future__ import annotations

from typing import Annotated

import typer

from server import (
    cli_canary,
    cli_completion,
    cli_datasets,
    cli_infer,
    cli_jobs,
    cli_kernels,
    cli_keys,
    cli_model,
    cli_models,
    cli_push,
    cli_rollout,
    cli_serve,
    cli_status,
    cli_top,
    cli_train,
    cli_versions,
)
from server.cli_group import Commands
from server.terminal import console

SERVING, VERSIONS, LOOKING = "Serving and asking", "Models and versions", "Looking at a server"
TRAINING, LOCAL = "Training", "On this machine, without a server"

app = Commands(
    "Serve ONNX models, compiled to native code. `lathe serve` starts a server, the other commands ask it. "
    "`lathe COMMAND --help` explains a command, with examples.",
    add_completion=True,
    epilog="docs/command-line.md shows the ten commonest tasks, step by step.",
)


def _print_version(asked: bool) -> None:
    if asked:
        from server.api.modelinfo import VERSION

        console.print(f"lathe {VERSION}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """What stands before a command."""


for command in (cli_serve.serve, cli_infer.infer):
    app.command(rich_help_panel=SERVING)(command)
app.add_typer(cli_keys.app, name="keys", rich_help_panel=SERVING)

for command in (cli_push.push, cli_models.models, cli_models.versions, cli_versions.promote, cli_versions.rollback):
    app.command(rich_help_panel=VERSIONS)(command)
app.add_typer(cli_canary.app, name="canary", rich_help_panel=VERSIONS)
for command in (cli_versions.alias, cli_versions.delete, cli_versions.load, cli_versions.unload):
    app.command(rich_help_panel=VERSIONS)(command)

for command in (cli_status.status, cli_status.health, cli_top.top, cli_models.audit):
    app.command(rich_help_panel=LOOKING)(command)
app.add_typer(cli_rollout.app, name="rollout", rich_help_panel=LOOKING)

app.command(rich_help_panel=TRAINING)(cli_train.train)
app.add_typer(cli_jobs.app, name="jobs", rich_help_panel=TRAINING)
app.add_typer(cli_datasets.app, name="datasets", rich_help_panel=TRAINING)

for command in (cli_model.compile, cli_model.run, cli_model.inspect, cli_model.profile, cli_model.bench):
    app.command(rich_help_panel=LOCAL)(command)
for command in (cli_kernels.kernels, cli_kernels.load_kernels, cli_completion.completion):
    app.command(rich_help_panel=LOCAL)(command)
